"""A launch under torch's profiler: traces beside the results, and a result like that of any other launch."""

import gzip
import json

import pytest

INNER = """
import pytest

@pytest.mark.world(size=2, device="cpu")
def test_traced(workload):
    result = workload.run("fsdp", steps=3, warmup=1, verify=1, layers=1, profile_steps=0)
    assert (result.profiler, result.overlap, result.total_iterations) == ("torch", [], 3)
    assert not {"overlap_ratio", "exposed_comm_ms"} & set(result.rank_metrics)
"""


def test_launch_that_profiles_nothing_by_itself_leaves_traces_and_no_overlap(pytester, inner):
    result = inner(INNER, "--aorta-profiler=torch", "--aorta-results=results")
    result.assert_outcomes(passed=1)
    [folder] = (path.parent for path in pytester.path.glob("results/*/*/plan.json"))
    result.stdout.fnmatch_lines(["test_inner::test_traced: all ranks' traces on one clock: */trace.json.gz"])
    for rank in ("0", "1"):
        assert any("allgather" in event.get("name", "") for event in events(folder / "ranks" / rank / "trace.json.gz"))
    processes = {event["args"]["name"] for event in events(folder / "trace.json.gz") if event["name"] == "process_name"}
    assert len(processes) == 2


SCHEDULED = """
import pytest

@pytest.mark.world(size=2, device="cpu")
def test_scheduled(workload):
    workload.run("fsdp", steps=3, warmup=1, verify=1, layers=1, profile_steps=0)
"""


@pytest.mark.extended
def test_schedule_keeps_a_trace_of_each_repeat(pytester, inner):
    result = inner(SCHEDULED, "--aorta-profiler=torch:wait=1 active=2 repeat=2 shapes", "--aorta-results=results")
    result.assert_outcomes(passed=1)
    [folder] = (path.parent for path in pytester.path.glob("results/*/*/plan.json"))
    schedule = json.loads((folder / "plan.json").read_text())["profiler_schedule"]
    times = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    assert schedule == times | {"shapes": True, "memory": False}
    for path in (folder, folder / "ranks/0", folder / "ranks/1"):
        assert sorted(trace.name for trace in path.glob("trace*")) == ["trace-2.json.gz", "trace.json.gz"]
    kept = events(folder / "ranks/1/trace-2.json.gz")
    assert len([event for event in kept if "allgather" in event["name"] and "Input Dims" in event["args"]]) >= 2
    result.stdout.fnmatch_lines(["test_inner::*: all ranks' traces on one clock: */trace.json.gz, */trace-2.json.gz"])


def events(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
