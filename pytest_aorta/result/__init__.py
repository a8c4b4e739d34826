"""What a launch leaves: measurements, evidence, diagnosis, facts."""
