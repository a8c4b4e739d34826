"""Reads one rank's Chrome trace, as Kineto (torch.profiler) writes it, into the steps between its boundaries."""
