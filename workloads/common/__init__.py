"""What several workloads share; no workload itself."""
