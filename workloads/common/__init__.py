"""Code that several workloads share."""
