"""Runs rank code with the environment that a launch gives its ranks, and on a GPU that it has leased."""

import os
from collections.abc import Iterator

import pytest

from pytest_aorta.launch.leases import lease
from pytest_aorta.plan.accelerators import visible_devices

# torchrun gives ranks one thread; beside other workers, more threads than cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def leased_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test of this process on a GPU that no launch uses meanwhile; skip it where there is none."""
    import torch  # most tests run without

    if not (pool := [device.uuid for device in visible_devices()]):
        pytest.skip("needs a GPU")
    with lease(pool, 1, exclusive=False, wait_s=600.0, owner=request.node.nodeid) as leased:
        torch.cuda.set_device(pool.index(leased.resources[0]))
        yield
