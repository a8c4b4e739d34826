"""Random numbers that depend only on their purpose, so that no layout of ranks changes them."""

import hashlib

import torch


def seed_of(*key: int | str) -> int:
    """Return 63 bits of a hash of ``key``."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def generator(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a generator seeded by a hash of ``key``; its numbers differ between kinds of devices."""
    return torch.Generator(device).manual_seed(seed_of(*key))
