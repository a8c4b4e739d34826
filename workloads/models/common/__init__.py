"""The parts that models share."""
