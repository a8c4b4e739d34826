"""Verdicts on overlap, with and without a head start of the host."""

import random
import re

import pytest

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.profiled_steps import (
    ANOTHER_RANK,
    AS_RUN,
    CollectiveFacts,
    CollectiveTime,
    FamilyTime,
    HeadStart,
    StepOverlap,
)
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import in_pairs, settle, with_baseline
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.causes import cause_of
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import METRICS, parse_tolerances
from pytest_aorta.verdict.statistics.decision import FALSE_ALARM_RATE, MISS_RATE, Scale, StoredRule
from pytest_aorta.verdict.statistics.variance import VarianceComponents, baseline_estimate
from pytest_aorta.verdict.verdicts import Decided, Open, Verdict
from tests.unit.builders import (
    INCONCLUSIVE,
    MISSING,
    NOT_APPLICABLE,
    PASS,
    REGRESSION,
    baseline_of,
    changed,
    each_of,
    make_facts,
    make_result,
    on_cpu,
)
from tests.unit.simulated import at_most, until_decided
from tests.unit.verdict import compared
from tests.unit.verdict.compared import compare, detection_lines, launches_needed, left_out, outcomes

STEP_MS = 10.0


def launch(ratio: float, *, all_gather_ms=0.3, reduce_scatter_ms=0.2, rank=0, build=make_facts):
    """Return a launch whose communication takes as long as a step."""
    exposed = {"all_gather": all_gather_ms, "reduce_scatter": reduce_scatter_ms}
    metrics = {"overlap_ratio": ratio, "exposed_comm_ms": (1 - ratio) * STEP_MS}
    return build(metrics=metrics, exposed_ms=exposed, most_exposed_rank=rank)


def around(ratio: float, count: int, noise=0.004, seed=0, **changes):
    rng = random.Random(seed)
    return [launch(min(1.0, ratio + rng.gauss(0, noise)), **changes) for _ in range(count)]


HIDDEN = baseline_of(*around(0.86, 10))


@pytest.mark.parametrize(("marker", "outcome"), [({}, None), ({"all_gather_ms": "10%"}, REGRESSION)])
def test_slower_transfers_that_compute_hides_fail_where_a_marker_names_them(marker, outcome):
    rng = random.Random(0)

    def gathering(transfer_ms, launches):
        sizes = (CollectiveFacts(4.0, 1e8, transfer_ms * rng.uniform(0.99, 1.01), [0.0, 0.1], 0) for _ in launches)
        return [one.replace(collectives={"all_gather": facts}) for one, facts in zip(launches, sizes, strict=True)]

    baseline = baseline_of(*gathering(1.0, around(0.86, 10)))
    verdicts = check(gathering(1.5, around(0.86, 4, seed=1)), baseline, parse_tolerances(marker, "test"))
    failing = {row.metric: row.outcome for row in verdicts.rows if row.outcome is REGRESSION}
    assert failing == ({"all_gather_ms": outcome} if outcome else {})


def check(launches, baseline=HIDDEN, marked=None, max_launches=None):
    return compared.check(*launches, baseline=baseline, marked=marked, max_launches=max_launches)


def test_lost_overlap_is_a_regression_with_the_reason():
    verdicts = check(around(0.12, 3, seed=1, all_gather_ms=4.1, rank=2))
    text = str(verdicts["overlap_ratio"])
    assert re.match(r"Regression: overlap_ratio -7\d\.\d points \(0\.8[56]\d* -> 0\.12\d*, limit 3 points\); ", text)
    assert text.endswith("; all_gather exposed 4.1 ms/step, was 0.3; rank 2 worst")
    row = verdicts["exposed_comm_ms"]
    assert (row.outcome, str(row.tolerance)) == (REGRESSION, "1% of step")
    assert row.delta == pytest.approx(0.74, abs=0.02)
    assert "% of step" in row.change


def test_lost_overlap_shows_in_pairs_with_a_reference():
    row = compare(around(0.12, 6, seed=1, reduce_scatter_ms=3.0), around(0.86, 6))["overlap_ratio"]
    assert row.outcome is REGRESSION
    assert "reduce_scatter exposed 3 ms/step, was 0.2; rank 0" in row.reason


def test_cpu_ranks_are_compared_where_a_marker_says_so_by_its_tolerance():
    recorded = baseline_of(*around(0.6, 10, build=on_cpu))
    assert "overlap_ratio" not in outcomes(check(around(0.1, 3, build=on_cpu), recorded))
    marked = {"overlap_ratio": METRICS["overlap_ratio"].parse_tolerance("1 points")}
    found = check(around(0.5, 3, build=on_cpu), recorded, marked)["overlap_ratio"]
    assert found.tolerance.value == pytest.approx(0.01)
    assert check(around(0.1, 3, build=on_cpu), recorded, marked)["overlap_ratio"].outcome is REGRESSION


def test_baseline_from_before_overlap_was_measured_is_not_missing_anything():
    older = baseline_of(*[on_cpu()] * 10)
    assert "overlap_ratio" not in outcomes(check([launch(0.6, build=on_cpu)] * 3, older))


def test_reason_names_the_collective_whose_exposed_time_grew_most():
    before = [launch(0.9, all_gather_ms=5.0, reduce_scatter_ms=0.1)]
    now = [launch(0.5, all_gather_ms=5.5, reduce_scatter_ms=2.0, rank=rank) for rank in (3, 1, 3)]
    assert "reduce_scatter exposed 2 ms/step, was 0.1; rank 3" in cause_of("overlap_ratio", now, before)
    assert "all_gather exposed 5.5 ms/step; rank 3" in cause_of("overlap_ratio", now, [make_facts()])
    assert not cause_of("overlap_ratio", [make_facts()], before)


def test_facts_average_exposed_time_over_ranks_and_steps_and_name_the_worst_rank():
    def step(**exposed_ms):
        total = sum(exposed_ms.values())
        times = {kind: CollectiveTime(ms + 1, 1.0) for kind, ms in exposed_ms.items()}
        return StepOverlap(10, 5, total + 1, 0, 0, 1, times)

    overlap = [
        [step(all_gather=1.0), step(all_gather=2.0)],
        [step(all_gather=4.0, send_recv=2.0), step(all_gather=5.0)],
    ]
    facts = make_result([[1.0] * 3] * 2, overlap=overlap).facts
    assert facts.exposed_ms == {"all_gather": 3.0, "send_recv": 0.5}
    assert facts.description.most_exposed_rank == 1
    bare = make_result([[1.0] * 3] * 2).facts
    assert (bare.exposed_ms, bare.description.most_exposed_rank) == ({}, None)


@pytest.mark.parametrize("late", [(0, 4, 9), (9,), (0,)])
def test_stored_launches_with_late_hosts_leave_the_others_values(late):
    """Compare what is shown and reported with a baseline of the other launches alone."""
    name = "overlap_ratio"
    launches = [
        launch.replace(metrics={f"{name}{AS_RUN}": 0.61}) if number in late else launch
        for number, launch in enumerate(around(0.86, 10))
    ]
    others = [launch for launch in launches if name in launch.metrics]
    some, whole = (baseline_of(*part) for part in (launches, others))
    reported = [next(line for line in detection_lines(baseline, {}) if name in line) for baseline in (some, whole)]
    assert reported[0] == reported[1]


def test_detection_of_lost_overlap_is_reported_in_points():
    marked = {"overlap_ratio": METRICS["overlap_ratio"].parse_tolerance("5 points")}
    (line,) = [line for line in detection_lines(HIDDEN, marked) if "overlap_ratio" in line]
    assert re.search(r"overlap_ratio: detects from -\d+\.\d+ points with 3, ", line)


def test_noisy_overlap_is_left_out_of_a_baseline_and_the_advised_tolerance_is_taken():
    metric, noisy = METRICS["overlap_ratio"], around(0.5, 10, noise=0.05)
    for marked in ({}, {"overlap_ratio": metric.parse_tolerance("5 points")}):
        problem = left_out(noisy, marked)["overlap_ratio"]
        found = re.search(
            r"standard deviation of launches is \d\.\d+ points, .*set a tolerance of ([\d.]+ points)", problem
        )
        assert "overlap_ratio" not in left_out(noisy, {"overlap_ratio": metric.parse_tolerance(found[1])})


@pytest.mark.parametrize("noise", [0.002, 0.016, 0.05])
def test_tolerance_that_was_given_is_the_one_that_is_applied(noise):
    recorded = baseline_of(*around(0.5, 10, noise=noise))
    found = check(around(0.5, 1, noise=noise), recorded, max_launches=5)["overlap_ratio"]
    assert found.tolerance.value == pytest.approx(0.03)


def test_noisier_baseline_decides_only_what_is_obvious_and_says_why():
    recorded = baseline_of(*around(0.6, 10, noise=0.05))
    for ratio in (0.53, 0.54):
        row = check([launch(ratio)] * 5, recorded)["overlap_ratio"]
        assert row.outcome is INCONCLUSIVE
        assert re.search(r"resolves? 3 points", row.detail)
    assert check([launch(0.1)], recorded, max_launches=5)["overlap_ratio"].state == Open()
    assert check([launch(0.1)] * 3, recorded)["overlap_ratio"].outcome is REGRESSION


def idle(idle_ms: float) -> LaunchFacts:
    return make_facts(metrics={"device_idle_ms": idle_ms})


def test_idle_time_is_compared_where_a_marker_names_it_and_names_the_host():
    recorded = baseline_of(*[idle(0.5 + number / 50) for number in range(10)])
    with pytest.raises(KeyError):
        check([idle(0.6)], recorded)["device_idle_ms"]
    marked = {"device_idle_ms": METRICS["device_idle_ms"].parse_tolerance("10% of step")}
    assert check([idle(0.6)] * 3, recorded, marked)["device_idle_ms"].outcome is PASS
    row = check([idle(5.0)] * 3, recorded, marked)["device_idle_ms"]
    assert (row.outcome, str(row.tolerance)) == (REGRESSION, "10% of step")
    assert row.detail.startswith("the host is the bottleneck: no stream is busy for 5 ms/step, was 0.59; look for ")


PRIOR = VarianceComponents.of(0.01, 0.01, 2)


def drawn(rng: random.Random, center: float, count: int) -> list[float]:
    """Return the ratios of launches of one block, none above 1 or below 0."""
    block = rng.gauss(center, 0.01)
    return [min(1.0, max(0.0, rng.gauss(block, 0.01))) for _ in range(count)]


def outcome(rng, center, change, tolerance=0.05):
    recorded = {number: drawn(rng, center, 5) for number in range(2)}
    baseline = baseline_estimate(recorded, [list(recorded.values())], PRIOR)
    candidate = drawn(rng, center + change, 5)
    rule = StoredRule(baseline, "new", tolerance, 5, -1, Scale.POINTS)
    return until_decided(lambda count: rule.decide(candidate[:count]), 5).outcome


@each_of("center", {"middle": 0.5, "all hidden": 0.99, "none hidden": 0.02})
def test_error_rates_hold_for_ratios_also_at_their_ends(center):
    rng, trials = random.Random(7), 1500
    unchanged = [outcome(rng, center, 0.0) for _ in range(trials)]
    assert unchanged.count(REGRESSION) <= at_most(FALSE_ALARM_RATE, trials)
    if center > 0.1:
        lost = [outcome(rng, center, -0.1) for _ in range(trials)]
        assert lost.count(PASS) <= at_most(MISS_RATE, trials)


CALL = "cudaStreamSynchronize in aten::item"
BLOCKED = make_facts(metrics={"overlap_ratio_as_run": 0.61, "exposed_comm_ms_as_run": 3.9}, blocked_by=CALL)
LATE = changed(BLOCKED, blocked_by="")
WAITS = f"a step waits for the device in {CALL}, so the host cannot run ahead; as run 0.61"
LARGE = "the trace of one profiled step has 412,345,678 bytes on the largest rank"
UNREAD = make_facts(overlap_problem=LARGE)
LATE_HOST = "the host was late in the profiled steps in spite of every head start; as run 0.61"
MARKED = {"overlap_ratio": METRICS["overlap_ratio"].parse_tolerance("4 points")}


def ahead(ratio: float) -> LaunchFacts:
    return make_facts(metrics={"overlap_ratio": ratio, "exposed_comm_ms": 10 * (1 - ratio)})


AHEAD = baseline_of(*[ahead(0.86 + number / 1000) for number in range(10)])
NEVER = baseline_of(*[make_facts()] * 10)
SYNCHRONIZED = baseline_of(*[BLOCKED] * 10)
TOO_LARGE = baseline_of(*[UNREAD] * 10)


def ratio_of(launches: list[LaunchFacts], baseline: Baseline | None, marked=None, max_launches=5) -> Verdict:
    return check(launches, baseline, marked, max_launches)["overlap_ratio"]


@each_of("marked", {"default": {}, "marked": MARKED})
@each_of("baseline", {"none": None, "without overlap": NEVER, "synchronized": SYNCHRONIZED, "too large": TOO_LARGE})
@each_of("launch, reason", {"blocked": (BLOCKED, WAITS), "late": (LATE, LATE_HOST), "too large": (UNREAD, LARGE)})
def test_ratio_that_the_baseline_never_had_does_not_apply_with_the_reason(launch, reason, baseline, marked):
    row = ratio_of([launch], baseline, marked)
    assert (row.outcome, row.detail, row.value) == (NOT_APPLICABLE, reason, None)


@each_of("marked", {"default": {}, "marked": MARKED})
@each_of("others", {"alone": [], "after others": [ahead(0.86), ahead(0.86)], "late": [LATE]})
@each_of("lost, reason", {"blocked": (BLOCKED, WAITS), "too large": (UNREAD, LARGE)})
def test_step_that_has_no_overlap_any_more_fails_and_names_the_reason(lost, reason, others, marked):
    row = ratio_of([*others, lost], AHEAD, marked)
    assert (row.outcome, row.is_lost, row.detail) == (MISSING, True, reason)
    assert (row.value, row.baseline) == (None, pytest.approx(0.8645))


@pytest.mark.parametrize(("name", "tolerance"), [("device_idle_ms", "5% of step"), ("kernel_ms", "5%")])
def test_every_metric_of_profiled_steps_names_the_trace_that_is_too_large(name, tolerance):
    kernels = {"gemm": FamilyTime(3.0, 1.0)}
    known = baseline_of(*[make_facts(metrics={"device_idle_ms": 1.0}, kernels=kernels)] * 10)
    row = check([UNREAD], known, {name: METRICS[name].parse_tolerance(tolerance)})[name]
    assert (row.outcome, row.detail) == (MISSING, LARGE)


def settled(*launches: LaunchFacts, max_launches=5) -> tuple[Verdict, int]:
    left = list(launches[1:])
    comparison = StoredComparison("case", AHEAD.config, AHEAD, {}, max_launches)
    found = settle(with_baseline(comparison, launches[0]), lambda side: left.pop(0))["overlap_ratio"]
    return found, len(launches) - len(left)


def test_late_host_is_launched_again_and_the_next_launch_decides():
    row, made = settled(LATE, ahead(0.86))
    assert (row.outcome, row.value, row.launches, made) == (PASS, 0.86, 1, 2)


def test_regression_is_found_in_the_launches_whose_host_was_not_late():
    row, made = settled(ahead(0.3), LATE, ahead(0.3), ahead(0.31))
    assert (row.outcome, row.value, row.launches, made) == (REGRESSION, 0.3, 3, 4)


@pytest.mark.parametrize("max_launches", [1, 2, 3, 5])
def test_host_that_is_always_late_is_inconclusive_after_the_last_launch(max_launches):
    row, made = settled(*[LATE] * 5, max_launches=max_launches)
    last_look = {1: 1, 2: 1, 3: 3, 5: 5}[max_launches]
    number = f"{last_look} of {last_look} launches" if last_look > 1 else "the launch"
    assert (row.state, made) == (Decided(INCONCLUSIVE), last_look)
    assert row.value is None
    assert f"{number}: {LATE_HOST}" in row.detail


def test_launches_that_are_too_few_without_the_late_ones_name_the_late_host():
    row, made = settled(ahead(0.3), ahead(0.3), LATE, LATE, LATE)
    assert (row.state, made) == (Decided(INCONCLUSIVE), 5)
    assert f"3 of 5 launches: {LATE_HOST}" in row.detail


def paired(candidates: list[LaunchFacts], references: list[LaunchFacts], max_pairs=6) -> tuple[Verdict, int]:
    left = {Side.CANDIDATE: [*candidates], Side.REFERENCE: [*references]}
    comparison = PairedComparison("case", MARKED, ["overlap_ratio"], max_pairs)
    verdicts = settle(in_pairs(comparison), lambda side: left[side].pop(0))
    return verdicts["overlap_ratio"], len(candidates) - len(left[Side.CANDIDATE])


def test_pair_with_a_late_host_is_left_out():
    same = [ahead(0.86)] * 4
    row, made = paired([LATE, *same], [*same[:1], LATE, *same])
    assert (row.outcome, row.launches, made) == (PASS, 2, 4)
    row, made = paired([LATE] * 6, [ahead(0.86)] * 6)
    assert (row.state, made) == (Decided(INCONCLUSIVE), 6)
    assert f"6 of 12 launches: {LATE_HOST}" in row.detail


@each_of("lost, reason", {"blocked": (BLOCKED, WAITS), "too large": (UNREAD, LARGE)})
def test_step_without_overlap_is_missing_in_one_version_and_not_applicable_in_both(lost, reason):
    for candidate, reference in ((lost, ahead(0.86)), (ahead(0.86), lost), (lost, lost)):
        row, made = paired([candidate], [reference])
        outcome = NOT_APPLICABLE if candidate is reference else MISSING
        assert (row.outcome, row.detail, made) == (outcome, reason, 1)


@pytest.mark.parametrize(("launch", "baseline"), [(BLOCKED, SYNCHRONIZED), (UNREAD, TOO_LARGE)])
def test_launches_without_overlap_are_recorded_and_compare_with_themselves(launch, baseline):
    assert left_out([launch] * 10, {}) == {}
    assert launches_needed(launch, {}) == 5
    assert ratio_of([launch] * 10, baseline, max_launches=10).outcome is NOT_APPLICABLE


def test_metric_of_a_late_host_is_left_out_and_is_left_out_of_a_center_by_force():
    launches = [ahead(0.86 + number / 1000) for number in range(9)] + [LATE]
    found = left_out(launches, {})
    assert found.keys() == {"overlap_ratio", "exposed_comm_ms"}
    assert all(text.startswith("launch 10 has no value") for text in found.values())
    forced = baseline_of(*launches)
    assert ratio_of([ahead(0.86)], forced).outcome is PASS
    assert ratio_of([ahead(0.2)] * 3, forced).outcome is REGRESSION


def test_facts_name_the_call_of_a_rank_before_that_of_another_rank():
    def facts(*calls: str | None) -> LaunchFacts:
        leads = [HeadStart(100.0, 2, 1.0, succeeded=call is None, blocked_by=call) for call in calls]
        return make_result([[1.0] * 3] * 2, head_start=leads).facts

    assert facts(ANOTHER_RANK, CALL).description.blocked_by == CALL
    assert facts(ANOTHER_RANK, ANOTHER_RANK).description.blocked_by == ANOTHER_RANK
    assert facts(None, None).description == make_result([[1.0] * 3]).facts.description
