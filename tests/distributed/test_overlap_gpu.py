"""Facts of profiled steps in which the profiler records only the device."""

import pytest

from pytest_aorta import WorkloadRunner
from tests.distributed import small_llama

EXPERTS = small_llama.SIZE | {
    "n_kv_heads": 4,
    "num_experts": 4,
    "expert_parallel_degree": 2,
    "batch_size": 2,
    "steps": 5,
    "profile_steps": 3,
}


@pytest.mark.world(size=2, device="cuda", warm=True)
def test_kinds_are_those_that_the_host_asked_for(workload: WorkloadRunner):
    """Check all-to-all, which consists of sends, so no kernel has its name."""
    result = workload.run("llama_fsdp2", **EXPERTS)
    assert [len(steps) for steps in result.overlap] == [3, 3]
    # The host reads how many tokens each expert gets, so it can't be ahead.
    assert not any(lead.succeeded for lead in result.head_start)
    assert all(lead.blocked_by for lead in result.head_start)
    for step in (step for steps in result.overlap for step in steps):
        assert {"all_to_all", "all_gather", "reduce_scatter"} <= set(step.collectives)
        assert "send_recv" not in step.collectives
