"""The estimate of a step's peak memory, and the choices that fit a budget."""
