"""Performance, overlap and numerics tests for FSDP training, as a pytest plugin."""

from __future__ import annotations
