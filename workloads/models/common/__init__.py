"""The parts that models share: the decoder, its experts, attention kernels and loss."""
