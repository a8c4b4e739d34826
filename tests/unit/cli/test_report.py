"""``aorta report``: two sets of kept results, matched and compared."""

import json

import pytest

from pytest_aorta.cli.main import main
from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.report.data import dataset_report
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import make_result


def keep(folder, test, step_ms, *, number=1, plan=None, **changes):
    """Keep one launch as --aorta-results does, with three steps per rank."""
    place = folder / test / f"{number:02d}-fsdp"
    (place / "ranks" / "0").mkdir(parents=True)
    (place / "ranks" / "0" / "result.json").write_text("{}")
    result = make_result([[step_ms] * 20] * 2, device="cuda", environment={"device": "cuda"}, **changes)
    write_json(place / "result.json", to_builtins(result))
    write_json(place / "plan.json", plan or {"reference": None})
    return place / "result.json"


@pytest.fixture
def two(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, factor in ((old, 1.0), (new, 1.3)):
        for number in (1, 2, 3):
            keep(folder, "test-a", 10.0 * factor, number=number)
        keep(folder, "test-b", 20.0)
    return old, new


def report_of(old, new):
    return dataset_report({"old": [old], "new": [new]}, "new", "old")


def test_tests_are_matched_by_folder_and_compared(two):
    slower, same = report_of(*two).tests
    assert (slower.record.nodeid, slower.record.outcome, len(slower.cases[0].candidate)) == ("test-a", "failed", 3)
    assert {row.metric: row.outcome for row in slower.record.verdicts}["step_time_p50"] is Outcome.REGRESSION
    assert (same.record.nodeid, same.record.outcome) == ("test-b", "compared")
    assert [str(row.reference) for row in slower.record.verdicts] == ["old"]


def test_launches_that_ended_without_a_result_are_counted(two):
    old, new = two
    for folder, plan in (
        (old / "test-a" / "09-fsdp", {}),
        (new / "test-a" / "08-fsdp", {"reference": {"commit": "c0"}}),
    ):
        folder.mkdir()
        write_json(folder / "plan.json", plan)
        write_json(folder / "outcome.json", {})
    # A launch that has not ended yet is not counted.
    (new / "test-a" / "09-fsdp").mkdir()
    write_json(new / "test-a" / "09-fsdp" / "plan.json", {"reference": None})
    report = report_of(old, new)
    assert list(report.remarks) == ["9 in total", "1 launch failed"]


def test_launches_of_another_config_of_a_test_are_a_case_of_their_own(tmp_path):
    for folder in (tmp_path / "old", tmp_path / "new"):
        for number, overlap in ((1, True), (2, False)):
            keep(folder, "test-a", 10.0, number=number, config={"overlap": overlap})
    cases = [test.cases[0] for test in report_of(tmp_path / "old", tmp_path / "new").tests]
    assert [case.name for case in cases] == ["toy", "toy 2"]
    assert [case.reference[0].result.config for case in cases] == [{"overlap": True}, {"overlap": False}]


def test_two_single_files_are_compared_whatever_they_are_called(tmp_path):
    old = keep(tmp_path, "x", 10.0, config={"steps": 20, "overlap": True})
    new = keep(tmp_path, "y", 10.0, config={"steps": 20, "batch": 4}, workload="other")
    (test,) = report_of(old, new).tests
    assert test.record.verdicts
    note = "old ran toy with no key batch, overlap=True; new ran other with batch=4, no key overlap"
    assert note in map(str, test.record.unshown_notes)


def test_what_has_nothing_to_be_compared_with_is_reported(two):
    old, new = two
    keep(new, "test-a", 1.0, number=4, plan={"reference": {"name": "main"}})
    keep(new, "test-c", 5.0)
    report = report_of(old, new)
    assert len(report.tests[0].cases[0].candidate) == 3
    assert "a launch of the A/B reference" in report.warnings[0]
    added = report.tests[-1].record
    assert (added.nodeid, added.outcome, added.verdicts) == ("test-c", "measured", [])
    assert list(map(str, added.unshown_notes)) == ["only in new: no result to compare with"]


def test_wrong_numbers_fail_and_the_failed_checks_are_the_evidence(tmp_path):
    old = keep(tmp_path / "old", "a", 10.0)
    new = keep(tmp_path / "new", "a", 10.0, passed=False, failure_count=3)
    (test,) = report_of(old, new).tests
    assert test.record.outcome == "failed"
    assert "3 of its own checks failed" in test.record.failure


def test_command_writes_the_page_and_the_summary(two, tmp_path, capsys):
    old, new = two
    page = tmp_path / "out" / "page.html"
    assert main(["report", f"old={old}", f"new={new}", "-o", str(page)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page), str(page.with_name("summary.json"))]
    assert json.loads(page.with_name("summary.json").read_text())["ratios"]["step_time_p50"]["highest"] == 1.3


def test_command_says_what_it_left_out_and_exits_with_1(two, tmp_path, capsys):
    old, new = two
    (new / "test-b" / "01-fsdp" / "result.json").write_text("{")
    assert main(["report", f"old={old}", f"new={new}", "-o", str(tmp_path / "page.html")]) == 1
    assert "WARNING: result left out of the report: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["old"], "LABEL=PATH"),
        (["../x=."], "LABEL=PATH"),
        (["old=gone"], "gone does not exist"),
        (["old=.", "new=.", "-o", "page.txt"], "ends in .html"),
        (["old=.", "new=."], "new=.: contains no result.json"),
        (["old=.", "new=.", "other=."], "allowed are two labels"),
        (["old=.", "old=."], "got ['old'], allowed are two labels"),
    ],
)
def test_wrong_usage_says_what_is_allowed(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["report", *arguments]))
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
