"""Launches over several nodes: the coordinator on node 0 and one node agent per node."""
