"""Benchmarks of verdicts: detection rates, false alarms and the rules behind them."""
