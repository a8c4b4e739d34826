"""The files of the history: their content, and errors that name each bad line."""

import os

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.model import decode, to_json
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.history import (
    MAX_COMMAND,
    MAX_FILE_BYTES,
    MAX_TOTAL_BYTES,
    HistoryEntry,
    keep_history,
    read_history,
)
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.learning import NewBaseline
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import ReferenceKind, VerdictReference
from tests.unit.builders import CAUGHT, compared, make_baseline, make_facts, make_options, make_verdict, stored
from tests.unit.sample_history import entries_of, make_entry, write_history

CASE = "tests/test_a.py::test_x::fsdp"


FACTS = make_facts(commit="c" * 40, branch="main", dirty=False)


def record(facts: LaunchFacts = FACTS, **changes) -> TestRecord:
    reference = VerdictReference(ReferenceKind.BASELINE, "file", 3)
    known = {
        "platform": "nvidia-h200-x2-nccl",
        "workload": "fsdp",
        "rows": (make_verdict(Outcome.PASS, case=CASE, reference=reference),),
    }
    comparison = compared(CASE, facts, **(known | changes))
    return TestRecord("tests/test_a.py::test_x", outcome="passed", comparisons=(comparison,))


def read_line(line: str) -> HistoryEntry:
    return decode(line, HistoryEntry, "f:7", by_hand=False)


def test_run_that_compared_nothing_or_keeps_no_history_writes_no_file(tmp_path):
    assert keep_history([TestRecord("a::b")], [], make_options(history=tmp_path)) == []
    assert keep_history([record()], [], make_options()) == []
    assert list(tmp_path.iterdir()) == []


def test_long_command_line_is_cut(tmp_path):
    keep_history([record()], ["x" * 2 * MAX_COMMAND], make_options(history=tmp_path))
    assert len(read_history(tmp_path)[0][0].command) == MAX_COMMAND


def test_change_without_a_number_is_null_and_an_expected_regression_is_kept_as_such():
    row = make_verdict(CAUGHT, delta=float("inf"), low=0.0)
    (read,) = read_line(to_json(make_entry(rows=(row,)))).comparison.rows
    assert (read.label, read.delta, read.low) == ("expected regression", None, 0.0)


def test_launches_of_update_baselines_belong_to_the_revision_that_is_written(tmp_path):
    new = make_baseline(launches=(*stored(make_facts(), center=False), *stored(make_facts(), revision=2)))
    records = [record(rows=(), new=NewBaseline(new, "")), record(rows=())]
    keep_history(records, [], make_options(history=tmp_path))
    entries = read_history(tmp_path)[0]
    assert [(entry.revision, entry.comparison.new) for entry in entries] == [(2, None), (None, None)]


def test_bad_lines_are_named_and_the_others_are_read(tmp_path):
    write_history(tmp_path, entries_of([1.0, 2.0, 3.0]))
    first, second, third = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes() + b"{\n\xff\n" + b'{"schema_version": 1, "run": 0}')
    second.write_text(second.read_text().replace('"pytest -m overlap"', "7"))
    third.write_text(third.read_text().replace('"num_steps"', '"fastest_rank_p50_ms":9.0,"num_steps"'))
    entries, problems = read_history(tmp_path)
    assert len(entries) == 1
    starts = (
        f"{first}:2: not valid JSON",
        f"{first}:3: not UTF-8",
        f"{first}:4: $.schema_version: got 1",
        f"{second}:1: $.command: got 7",
        f"{third}:1: $.comparison.launches[0].facts: unknown key 'fastest_rank_p50_ms'",
    )
    assert [problem.startswith(start) for problem, start in zip(problems, starts, strict=True)] == [True] * 5


def test_moment_that_does_not_exist_is_a_problem_of_its_line():
    line = to_json(make_entry()).replace("2026-01-05T", "2026-13-05T")
    with pytest.raises(AortaError, match=r"^f:7: \$\.comparison\.launches.*measured_at: got '2026-13-05T"):
        read_line(line)


def write_sparse(path, num_bytes):
    path.touch()
    os.truncate(path, num_bytes)


def test_link_and_large_file_are_problems_of_their_files(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("/dev/zero")
    write_sparse(tmp_path / "b.jsonl", MAX_FILE_BYTES + 1)
    _, problems = read_history(tmp_path)
    assert ["a symbolic link" in problems[0], "larger than the 67,108,864 bytes" in problems[1]] == [True, True]


def test_history_beyond_the_limit_is_refused(tmp_path):
    for number in range(MAX_TOTAL_BYTES // MAX_FILE_BYTES + 1):
        write_sparse(tmp_path / f"{number}.jsonl", MAX_FILE_BYTES)
    with pytest.raises(AortaError, match="larger than the 268,435,456 bytes allowed; move old files"):
        read_history(tmp_path)
