"""Results of launches: measurements, evidence, diagnosis, and the facts that verdicts are computed from."""
