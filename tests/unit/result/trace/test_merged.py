"""Traces of ranks, merged into one trace."""

import json
from collections import defaultdict

import pytest

from pytest_aorta.result.folder import trace_file
from pytest_aorta.result.trace.kineto import read_trace
from pytest_aorta.result.trace.merged import merge_run, merge_traces, traces_note
from tests.unit.kineto_traces import BASE_NS, keep_traces, rank_trace


def check_structure(merged: dict) -> None:
    """Check the rules of Chrome's trace format and of Perfetto's importer."""
    ends: dict[int, list[float]] = defaultdict(list)
    threads: dict[int, int] = {}
    for entry in sorted(merged["traceEvents"], key=lambda one: (one["ts"], -one.get("dur", 0))):
        assert entry["ph"] in "XMsfti"
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        if entry["tid"]:
            assert threads.setdefault(entry["tid"], entry["pid"]) == entry["pid"], "one process a thread"
        if entry["ph"] == "X":
            assert entry["dur"] >= 0
            # Slices of a thread nest or follow each other.
            stack = ends[entry["tid"]]
            while stack and stack[-1] <= entry["ts"]:
                stack.pop()
            assert not stack or entry["ts"] + entry["dur"] <= stack[-1] + 1e-3
            stack.append(entry["ts"] + entry["dur"])
    json.dumps(merged, allow_nan=False)


def of(merged: dict, rank: int, phases: str = "X") -> list[dict]:
    return [entry for entry in merged["traceEvents"] if entry["pid"] == rank + 1 and entry["ph"] in phases]


def test_each_rank_is_a_process_with_its_threads_above_its_streams():
    merged = merge_traces({1: rank_trace(), 0: rank_trace()})
    check_structure(merged)
    for rank in (0, 1):
        entries = of(merged, rank, "M")
        by_name = defaultdict(dict)
        for entry in entries:
            by_name[entry["name"]][entry["tid"]] = next(iter(entry["args"].values()))
        assert list(by_name["process_name"].values()) == [f"rank {rank}"]
        assert list(by_name["process_sort_index"].values()) == [rank]
        order = sorted(by_name["thread_sort_index"], key=by_name["thread_sort_index"].get)
        assert [by_name["thread_name"][thread] for thread in order][-1] == "stream 7"


def test_every_slice_is_there_and_flows_connect_a_launch_with_its_kernel():
    merged = merge_traces({0: rank_trace(), 1: rank_trace()})
    own = [(entry["name"], entry["dur"]) for entry in rank_trace()["traceEvents"] if entry["ph"] == "X"]
    assert [[(entry["name"], entry["dur"]) for entry in of(merged, rank)] for rank in (0, 1)] == [own, own]
    ids = [{entry["id"] for entry in of(merged, rank, "sf")} for rank in (0, 1)]
    assert [len(each) for each in ids] == [1, 1]
    assert ids[0].isdisjoint(ids[1])


def test_ranks_with_other_base_times_are_on_one_clock():
    merged = merge_traces({0: rank_trace(later_ns=3_000_500), 1: rank_trace()})
    assert merged["baseTimeNanoseconds"] == BASE_NS
    first, second = (next(one["ts"] for one in of(merged, rank) if one["name"] == "gemm") for rank in (0, 1))
    assert first - second == pytest.approx(3000.5, abs=2e-3)


def test_traces_of_each_repeat_are_merged_into_a_file_of_their_own(tmp_path):
    keep_traces(tmp_path, [rank_trace()] * 2)
    for rank, repeat in ((0, 2), (1, 2), (0, 10)):
        folder = tmp_path / "ranks" / str(rank)
        (folder / trace_file(repeat)).write_bytes((folder / "trace.json.gz").read_bytes())
    paths = merge_run(tmp_path)
    assert [path.name for path in paths] == ["trace.json.gz", "trace-2.json.gz", "trace-10.json.gz"]
    assert [list(read_trace(path)["ranks"]) for path in paths] == [["0", "1"], ["0", "1"], ["0"]]
    assert merge_run(tmp_path) == paths


@pytest.mark.parametrize(
    ("profiler", "files", "note"),
    [
        ("nsys", ["nsys.nsys-rep"], "traces of nsys in {}: nsys.nsys-rep"),
        ("torch", ["ranks/0/trace.json.gz", "ranks/1/trace.json.gz"], "ranks/0/trace.json.gz and 1 more"),
        ("rocprofv3", ["rocprofv3/host/7_results.pftrace"], "rocprofv3/host/7_results.pftrace"),
        ("torch", [], ""),
    ],
)
@pytest.mark.parametrize("on_device", [True, False])
def test_note_says_where_the_traces_are_or_that_there_are_none(tmp_path, profiler, files, note, on_device):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    text = traces_note(profiler, tmp_path, on_device=on_device)
    located, _, about_steps = text.partition("; ")
    assert located.endswith(note.format(tmp_path))
    # Only torch's traces are of additional steps, and only a device can be behind its host.
    assert about_steps.startswith("the host had no head start") == (profiler == "torch" and on_device and bool(files))


def test_merged_trace_says_of_each_rank_whether_its_host_had_a_head_start():
    merged = merge_traces({0: rank_trace() | {"headStart": False}, 1: rank_trace()})
    assert merged["ranks"] == {"0": {"rank": 0, "headStart": False}, "1": {"rank": 0}}
