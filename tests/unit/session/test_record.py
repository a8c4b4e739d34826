from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.session.record import Compared, LaunchTimes, TestRecord
from pytest_aorta.verdict.learning import NewLaunches
from pytest_aorta.verdict.metrics import Origin, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome, Scale
from pytest_aorta.verdict.verdicts import Missing, NotApplicable, ReferenceKind, Verdict, VerdictReference
from tests.unit.builders import make_baseline, make_verdict

MARKED = {"step_time_p50": Tolerance(0.05), "weight_hash": Tolerance(None)}
VALUE = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VERDICT = st.builds(
    Verdict,
    case=st.text(),
    metric=st.just("step_time_p50"),
    outcome=st.sampled_from(Outcome),
    value=VALUE,
    baseline=VALUE,
    delta=st.none() | st.floats(allow_nan=False),
    tolerance=st.builds(
        Tolerance, st.none() | st.floats(allow_nan=False), st.sampled_from(Scale), st.sampled_from(Origin)
    ),
    reference=st.builds(VerdictReference, st.sampled_from(ReferenceKind), st.text(), st.none() | st.integers(1, 9)),
    missing=st.none() | st.sampled_from(Missing),
    detail=st.text(),
    low=st.none() | st.floats(allow_nan=False),
    high=st.none() | st.floats(allow_nan=False),
    launches=st.integers(1, 13),
    is_open=st.booleans(),
    not_applicable=st.none() | st.sampled_from(NotApplicable),
    is_expected=st.booleans(),
)


TIMES = st.builds(
    LaunchTimes,
    number=st.integers(1, 9),
    launcher=st.just("torchrun"),
    times_s=st.dictionaries(st.sampled_from(["wall", "run"]), st.floats(0, 1e6)),
)

COMPARED = st.builds(
    Compared,
    case=st.text(),
    candidate=st.lists(st.text(), max_size=2),
    reference=st.lists(st.text(), max_size=2),
    baseline=st.none() | st.text(),
    measured=st.dictionaries(st.text(), st.floats(allow_nan=False) | st.text(), max_size=2),
)


@given(
    st.lists(VERDICT, max_size=3),
    st.lists(st.text(), max_size=2),
    st.none() | st.text(),
    st.lists(TIMES, max_size=3),
    st.lists(COMPARED, max_size=2),
)
def test_record_survives_the_way_from_a_worker(verdicts, notes, lacked, times, compared):
    record = TestRecord(
        "a::b",
        verdicts,
        [NewLaunches(make_baseline(), MARKED, {"steps": 1}, fresh=True)],
        ["case"],
        notes,
        ["detects"],
        lacked,
        2,
        times,
        compared,
        "failed",
        "why",
        traces=notes[:1],
    )
    assert TestRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_record_is_undecided_as_soon_as_one_verdict_is():
    decided = TestRecord("a::b", [make_verdict(Outcome.PASS), make_verdict(Outcome.NOT_APPLICABLE)])
    assert not decided.is_undecided
    assert TestRecord("a::b", [*decided.verdicts, make_verdict(Outcome.INCONCLUSIVE)]).is_undecided
