"""Benchmarks of the plugin in a pytest run without launches."""
