"""Benchmarks of training workloads next to torchtitan, and the cost of the step timer."""
