"""The weight hash has the same bits on a GPU as on a CPU, for all dtypes, sizes, offsets and blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_aorta.session.world import DistributedWorld
from tests.rank.process import CheckProcess, checks_of


@pytest.fixture(scope="module")
def gpu_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckProcess]:
    process = CheckProcess(tmp_path_factory.mktemp("gpu") / "log")
    yield process
    process.close()


@pytest.mark.world(size=1, device="cuda")
@pytest.mark.parametrize("check", checks_of("device_*.py"))
def test_a_gpu_computes_the_bits_of_a_cpu(distributed_world: DistributedWorld, gpu_process, check):
    gpu_process.check(check)
