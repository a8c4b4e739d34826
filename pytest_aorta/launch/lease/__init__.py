"""Leases of devices, which the processes of one user share on a host."""
