"""The section `aorta` of the terminal summary."""

from __future__ import annotations

from pytest_aorta.plugin.summary import summary_lines
from pytest_aorta.session.record import Compared, TestRecord
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import make_verdict

CASE = "tests/test_a.py::test_x::fsdp"
RECORD = TestRecord(
    "tests/test_a.py::test_x",
    verdicts=[make_verdict(Outcome.PASS, case=CASE)],
    compared=[Compared(CASE, measured={"step_time_p50": 10.0, "device_idle_ms": 3.33462, "weight_hash": "ab" * 16})],
)


def test_verbose_summary_has_what_was_measured_and_not_compared():
    rows = [line.split() for line in summary_lines([RECORD], verbose=True)]
    assert ["test_a::test_x::fsdp", "device_idle_ms", "3.335", "ms", "-", "-", "-", "-", "measured"] in rows
    assert ["test_a::test_x::fsdp", "weight_hash", "abababababab", "-", "-", "-", "-", "measured"] in rows
    assert sum("step_time_p50" in row for row in rows) == 1


def test_summary_has_compared_metrics_alone():
    assert not any("device_idle_ms" in line for line in summary_lines([RECORD]))
