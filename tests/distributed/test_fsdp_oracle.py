"""Faults planted in `fsdp` are caught and located in a launch; tests of ranks find every kind in data."""

import pytest

from pytest_aorta.common.errors import WorkloadFailed

pytestmark = pytest.mark.world(size=2, warm=True)

SHORT = {"steps": 2, "warmup": 1, "verify": 3}
GATHER = "all_gather_forward: iteration 1, layer 2, on rank 1, from source rank 0"
REDUCE = "reduce_scatter: iteration 1, layer 2, on rank"
# fault -> the location that has to be reported, and the cause that has to be named
FAULTS = {
    "permuted_gather": (GATHER, "permuted"),
    "stale_h2d": ("h2d: iteration 1, on rank 1", "stale"),
    "dropped_gradient": (f"{REDUCE} 0, from source rank 0", "the contribution of rank 1 is missing"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_planted_fault_is_located_and_named(workload, kind):
    place, cause = FAULTS[kind]
    fault = {"kind": kind, "iteration": 1, "layer": 2, "rank": 1, "source_rank": 0}
    with pytest.raises(WorkloadFailed) as caught:
        workload.run("fsdp", **SHORT, fault=fault)
    line = next(line for line in str(caught.value).splitlines() if place in line)
    assert cause in line
    assert "iteration 0" not in str(caught.value)
