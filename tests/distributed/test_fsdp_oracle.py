"""Every fault that can be planted in `fsdp` is caught, counted and located by its own checks."""

from __future__ import annotations

import pytest

from pytest_aorta.common.errors import WorkloadFailed

pytestmark = pytest.mark.world(size=2, warm=True)

SHORT = {"steps": 2, "warmup": 1, "verify": 3}
GATHER = "all_gather_forward: iteration 1, layer 2, on rank 1, from source rank 0"
REDUCE = "reduce_scatter: iteration 1, layer 2, on rank"
# fault -> the location that has to be reported, and the cause that has to be named
FAULTS = {
    "stale_gather": (GATHER, "stale"),
    "zeroed_gather": (GATHER, "zeroed"),
    "partial_gather": (GATHER, "only part"),
    "permuted_gather": (GATHER, "permuted"),
    "swapped_shards": (GATHER, "the data of rank 1"),
    "stale_h2d": ("h2d: iteration 1, on rank 1", "stale"),
    "dropped_gradient": (f"{REDUCE} 0, from source rank 0", "the contribution of rank 1 is missing"),
    "stale_gradient": (REDUCE, "stale"),
}


# Tests of ranks find each fault in the data of a collective; every night, each of them is found in a launch too.
IN_CI = ("permuted_gather", "stale_h2d", "dropped_gradient")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in IN_CI else pytest.mark.extended) for kind in FAULTS]
)
def test_planted_fault_is_located_and_named(workload, kind):
    place, cause = FAULTS[kind]
    fault = {"kind": kind, "iteration": 1, "layer": 2, "rank": 1, "source_rank": 0}
    with pytest.raises(WorkloadFailed) as caught:
        workload.run("fsdp", **SHORT, fault=fault)
    line = next(line for line in str(caught.value).splitlines() if place in line)
    assert cause in line
    assert "iteration 0" not in str(caught.value)
