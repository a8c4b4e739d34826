"""A world that is too small for a workload is reported as an error of the workload."""

from __future__ import annotations

import pytest

from pytest_aorta.common.errors import LaunchError


@pytest.mark.world(size=1, device="cpu", warm=True)
@pytest.mark.parametrize("name", ["ddp_overlap", "fsdp", "llama_fsdp2", "llama_simple_fsdp", "ranking"])
def test_one_rank_is_a_runtime_error_that_says_what_to_do(workload, name):
    with pytest.raises(LaunchError) as caught:
        workload.run(name)
    text = str(caught.value)
    assert f"RuntimeError: workload '{name}' needs at least 2 ranks and was started with WORLD_SIZE=1" in text
    assert "@pytest.mark.world(size=2)" in text
