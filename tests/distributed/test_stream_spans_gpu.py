"""Two sources of overlap in one launch on GPUs: events on streams, and the profiler."""

from statistics import fmean

import pytest

pytestmark = [
    pytest.mark.overlap,
    pytest.mark.world(size="all", device="cuda", warm=True, simulated=False),
    pytest.mark.launch_timeout(300),
]

STEPS = {"steps": 40, "span_every": 4, "profile_steps": 6}
# So much work for the device that the host is ahead in both kinds of steps, since the host's delays differ.
LONG = {"layers": 8, "gemm_size": 8192, "fsdp_shard_size": 1 << 24}


def test_events_and_profiler_agree_on_what_is_hidden(workload, captured_steps, config_of):
    lanes = {"all_gather", "reduce_scatter"}
    result = workload.run("fsdp", **config_of("fsdp") | LONG | STEPS)
    for steps, profiled in zip(captured_steps(result), result.overlap, strict=True):
        assert len(steps) == 10
        assert all({"compute", "copy", *lanes} == set(step["stream_ms"]) for step in steps)
        hidden_ms, exposed_ms = (sum(step[f"{kind}_comm_ms"] for step in steps) for kind in ("hidden", "exposed"))
        expected = sum(step.hidden_comm_ms for step in profiled) / sum(step.comm_ms for step in profiled)
        assert hidden_ms / (hidden_ms + exposed_ms) == pytest.approx(expected, abs=0.1)


def test_profiled_ratio_of_ranking_does_not_depend_on_the_host(workload, captured_steps, config_of):
    results = [workload.run("ranking", **config_of("ranking") | {"steps": 40, "profile_steps": 2}) for _ in range(2)]
    for result in results:
        assert all(lead.succeeded for lead in result.head_start)
        for steps in captured_steps(result):
            lanes = {"compute", "copy", "all_gather", "reduce_scatter", "all_reduce"}
            assert [set(step["stream_ms"]) for step in steps] == [lanes] * 2
    first, second = (fmean(result.rank_metrics["overlap_ratio"]) for result in results)
    assert first == pytest.approx(second, abs=0.03)


@pytest.mark.world(size=1, device="cuda", warm=True, simulated=False)
def test_events_and_profiler_agree_on_copies_beside_products(workload, captured_steps, config_of):
    result = workload.run("copy_compute", **config_of("copy") | STEPS)
    for steps, profiled in zip(captured_steps(result), result.overlap, strict=True):
        for lane in ("compute", "copy"):
            share = sum(step["stream_ms"][lane] for step in steps) / sum(step["step_time_ms"] for step in steps)
            expected = sum(getattr(step, f"{lane}_ms") for step in profiled) / sum(step.step_ms for step in profiled)
            assert share == pytest.approx(expected, abs=0.1)
