"""The estimate of a step's peak memory."""
