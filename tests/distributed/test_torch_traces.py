"""A launch under torch's profiler: traces beside the results, and a result like that of any other launch."""

import gzip
import json

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
    result.stdout.fnmatch_lines(["test_inner::test_traced: traces of torch in *: ranks/0/trace.json.gz and 1 other"])
    for rank in ("0", "1"):
        assert any("allgather" in event.get("name", "") for event in events(folder / "ranks" / rank / "trace.json.gz"))


def events(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
