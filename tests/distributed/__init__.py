"""Tests with real ranks, and the worlds of warm ranks that most of them run in."""

import pytest

TWO_CPU_RANKS = pytest.mark.world(size=2, device="cpu", warm=True)
ONE_GPU = pytest.mark.world(size=1, device="cuda", warm=True)
ALL_GPUS = pytest.mark.world(size="all", device="cuda", warm=True)
