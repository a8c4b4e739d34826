"""Regressions that a test expects, such as that of a planted fault."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import msgspec

from pytest_aorta.common.errors import ComparisonFailed, SpecError
from pytest_aorta.common.text import did_you_mean
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.bitwise import STEP_METRICS
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict


@dataclass
class ExpectedRegression:
    """The regression that ended a ``with`` block.

    Attributes:
        text: The text of the failure; empty until the block has ended.
    """

    text: str = ""


def expected_regression(
    record: TestRecord, metrics: Collection[str], fail_on: Collection[Outcome] = ()
) -> AbstractContextManager[ExpectedRegression]:
    """Return a context manager that requires a regression of exactly ``metrics``, and marks their verdicts.

    Raises:
        SpecError: ``metrics`` is empty or contains an unknown name.
        ComparisonFailed: When the block ends, no comparison has failed in it, or the failed comparison has other
            regressions, a missing metric, or another verdict of ``fail_on``.
    """
    _check_metrics(metrics)
    return _requirement(record, metrics, fail_on)


@contextmanager
def _requirement(
    record: TestRecord, metrics: Collection[str], fail_on: Collection[Outcome]
) -> Iterator[ExpectedRegression]:
    __tracebackhide__ = True
    found, begin = ExpectedRegression(), len(record.verdicts)
    try:
        yield found
    except ComparisonFailed as failure:
        rows = record.verdicts[begin:]
        if not _have_regressed(rows, metrics, {Outcome.MISSING, *fail_on}):
            raise
        record.verdicts[begin:] = [
            msgspec.structs.replace(row, is_expected=row.outcome is Outcome.REGRESSION) for row in rows
        ]
        found.text = str(failure)
    else:
        raise ComparisonFailed(_unmet_text(record.verdicts[begin:], metrics))


def _check_metrics(metrics: Collection[str]) -> None:
    known = [*METRICS, *(name for name in STEP_METRICS if name not in METRICS)]
    if not metrics:
        raise SpecError("expect_regression: names no metric; name each metric whose regression the test expects")
    if unknown := sorted(str(name) for name in metrics if name not in known):
        raise SpecError(
            f"expect_regression: metrics {unknown} are unknown{did_you_mean(unknown, known)}; "
            f"allowed are {sorted(known)}"
        )


def _have_regressed(rows: Sequence[Verdict], metrics: Collection[str], fail_on: Collection[Outcome]) -> bool:
    """Return True if exactly these metrics regressed, and no other verdict fails the test."""
    regressed = {row.metric for row in rows if row.outcome is Outcome.REGRESSION}
    # An open metric is undecided because the regression ended the launches.
    others = [row for row in rows if not (row.outcome is Outcome.INCONCLUSIVE and row.is_open)]
    failing = {row.outcome for row in others if row.is_one_of(fail_on)}
    return regressed == set(metrics) and failing <= {Outcome.REGRESSION}


def _unmet_text(rows: Sequence[Verdict], metrics: Collection[str]) -> str:
    compared = [f"\n  {row}" for row in rows] or ["\n  nothing was compared"]
    return f"expect_regression: no regression of {', '.join(metrics)} was found:{''.join(compared)}"
