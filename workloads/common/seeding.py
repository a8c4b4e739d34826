"""Random numbers that depend on what they are for alone, so that no layout of ranks changes them."""

from __future__ import annotations

import hashlib

import torch


def seed_of(*key: int | str) -> int:
    """63 bits of a hash of ``key``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator seeded by a hash of ``key``; on another kind of device it gives other numbers."""
    return torch.Generator(device).manual_seed(seed_of(*key))
