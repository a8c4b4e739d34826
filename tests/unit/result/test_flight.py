from __future__ import annotations

import pickle

from pytest_aorta.result.evidence import FlightVerdict, flight_verdict, read_report

REPORT = """
Not all ranks joining collective, sequence number: 7
internal record id: 6
group info: 0:default_pg
collective: nccl:all_reduce
missing ranks: {3, 1}
input sizes: [[1]]
"""


def test_first_collective_that_ranks_are_missing_from_is_read():
    assert read_report(REPORT + REPORT.replace("7", "9")) == FlightVerdict("nccl:all_reduce", 7, (1, 3))


def test_report_without_a_finding_is_none():
    assert read_report("loaded 2 files") is None
    assert read_report(REPORT.replace("missing ranks", "ranks")) is None


def test_launch_without_dumps_has_no_verdict(tmp_path):
    assert flight_verdict(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_dump_that_is_not_a_pickle_keeps_the_analyzers_words(tmp_path):
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank_0").write_text("no pickle")
    assert flight_verdict(tmp_path) is None
    assert (tmp_path / "flight_recorder.txt").read_text() != ""


def test_analyzer_that_imports_torch_for_two_minutes_is_waited_for(tmp_path, monkeypatch):
    def run(command: list[str], _environ: object, limit_s: float, **_: object) -> tuple[int, str, str]:
        assert limit_s > 120
        return 0, REPORT, ""

    monkeypatch.setattr("pytest_aorta.result.evidence.run_program", run)
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank_0").write_bytes(pickle.dumps({"entries": []}, protocol=2))
    assert flight_verdict(tmp_path) == FlightVerdict("nccl:all_reduce", 7, (1, 3))
