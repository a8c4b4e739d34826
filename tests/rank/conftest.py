"""Runs rank code with the environment that a launch gives its ranks, and on a GPU that it has leased."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from pytest_aorta.launch.leases import lease
from pytest_aorta.plan.accelerators import visible_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_aorta.worker import Workload

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


@pytest.fixture(scope="session")
def compiler_is_left_out() -> None:
    """Import what the first optimizer imports; a search of all objects then leaves it out, as in warm ranks."""
    import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workload]]:
    """Return a function that returns a workload after ``setup()`` on rank 0, whose collectives do nothing."""
    import torch  # most tests run without

    from pytest_aorta.worker import RankEnv
    from tests.rank.ranks import fake_group
    from tests.rank.settings import default_config

    with ExitStack() as groups:

        def make(workload_type: type[Workload], world_size: int = 1, **changes: object) -> Workload:
            def join(_env: RankEnv, _workload: str) -> torch.device:
                groups.enter_context(fake_group(world_size))
                return torch.device("cpu")

            monkeypatch.setattr(RankEnv, "join", join)
            for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0}.items():
                monkeypatch.setenv(name, str(value))
            workload = workload_type(default_config(workload_type.name, **changes))
            workload.setup()
            return workload

        yield make


@pytest.fixture
def deterministic() -> Iterator[Callable[..., None]]:
    """Return a function that turns deterministic algorithms on until the end of the test."""
    import torch

    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give torch the version of HIP that the parameter says; None is a torch for CUDA."""
    import torch

    monkeypatch.setattr(torch.version, "hip", request.param)
