"""Leases of devices, shared by the processes of one host."""
