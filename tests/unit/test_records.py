from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from unit_builders import make_baseline

from pytest_aorta.comparison import Verdict
from pytest_aorta.decision import Outcome
from pytest_aorta.records import LaunchTimes, TestRecord

VALUE = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VERDICT = st.builds(
    Verdict,
    case=st.text(),
    metric=st.just("step_time_p50"),
    outcome=st.sampled_from(Outcome),
    value=VALUE,
    baseline=VALUE,
    delta=st.none() | st.floats(allow_nan=False),
    tolerance=st.text(),
    reason=st.text(),
)


TIMES = st.builds(
    LaunchTimes,
    number=st.integers(1, 9),
    launcher=st.just("torchrun"),
    times_s=st.dictionaries(st.sampled_from(["wall", "run"]), st.floats(0, 1e6)),
)


@given(st.lists(VERDICT, max_size=3), st.none() | st.text(), st.lists(TIMES, max_size=3))
def test_record_survives_the_way_from_a_worker(verdicts, lacked, times):
    record = TestRecord("a::b", verdicts, [make_baseline()], ["case"], lacked, 2, times)
    assert TestRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
