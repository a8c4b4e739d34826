from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.model import from_text, to_text
from pytest_aorta.session.record import ComparedLaunch, Comparison, LaunchNote, Side, TestRecord
from pytest_aorta.verdict.learning import NewBaseline
from pytest_aorta.verdict.metrics import Origin, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome, Scale
from pytest_aorta.verdict.verdicts import (
    Decided,
    Missing,
    MissingPart,
    NotApplicable,
    Note,
    NoteKind,
    Open,
    Reason,
    ReferenceKind,
    Unrecorded,
    Verdict,
    VerdictReference,
)
from tests.unit.builders import INCONCLUSIVE, NOT_APPLICABLE, PASS, make_baseline, make_facts, make_record, make_verdict

MARKED = {"step_time_p50": Tolerance(0.05), "weight_hash": Tolerance(None)}
VALUE = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
CHANGE = st.none() | st.floats(allow_nan=False)
TOLERANCE = st.builds(Tolerance, CHANGE, st.sampled_from(Scale), st.sampled_from(Origin))
REFERENCE = st.builds(VerdictReference, st.sampled_from(ReferenceKind), st.text(), st.none() | st.integers(1, 9))
STATE = (
    st.builds(Decided, st.sampled_from(Outcome), st.booleans())
    | st.just(Open())
    | st.builds(Missing, st.sampled_from(MissingPart), st.none() | st.sampled_from(Unrecorded))
    | st.builds(NotApplicable, st.sampled_from(Reason))
)
VERDICT = st.builds(
    Verdict,
    case=st.text(),
    metric=st.just("step_time_p50"),
    state=STATE,
    value=VALUE,
    baseline=VALUE,
    delta=CHANGE,
    tolerance=TOLERANCE,
    reference=REFERENCE,
    detail=st.text(),
    low=CHANGE,
    high=CHANGE,
    launches=st.integers(1, 13),
)
NOTE = st.builds(Note, st.text(), st.sampled_from(NoteKind))
COMPARISON = st.builds(
    Comparison,
    case=st.text(),
    kind=st.sampled_from(ReferenceKind),
    launches=st.lists(st.builds(ComparedLaunch, st.sampled_from(Side), st.just(make_facts())), max_size=2).map(tuple),
    rows=st.lists(VERDICT, max_size=2).map(tuple),
    notes=st.lists(NOTE, max_size=2).map(tuple),
    baseline=st.text(),
    new=st.none() | st.just(NewBaseline(make_baseline(), "digest", ("a line",))),
)
LAUNCH = st.builds(
    LaunchNote,
    wall_s=st.floats(0, 1e6),
    has_result=st.booleans(),
    traces=st.lists(st.text(), max_size=1).map(tuple),
)


@given(st.lists(COMPARISON, max_size=2), st.lists(LAUNCH, max_size=2), st.none() | st.text(), st.text())
def test_record_survives_the_way_from_a_worker(comparisons, launches, lacked, failure):
    record = TestRecord("a::b", 2, "failed", failure, tuple(comparisons), tuple(launches), lacked, True, "cpu")
    assert from_text(to_text(record), TestRecord) == record


def test_record_is_undecided_as_soon_as_one_verdict_is():
    decided = [make_verdict(PASS), make_verdict(NOT_APPLICABLE)]
    assert not make_record("a::b", decided).is_undecided
    assert make_record("a::b", [*decided, make_verdict(INCONCLUSIVE)]).is_undecided
