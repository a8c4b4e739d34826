"""Programs that run as processes of their own: guard, agent and rank. Only the standard library at import."""
