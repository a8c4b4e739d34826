"""Timing of steps on a rank."""
