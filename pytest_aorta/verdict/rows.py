"""Rows of a comparison: whether a metric applies to the launches of both sides, and verdicts without statistics."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.facts import CHOICES, PROGRAM_ENVIRONMENT, LaunchFacts
from pytest_aorta.result.series import first_other_weights
from pytest_aorta.result.trace.profiled_steps import AS_RUN, Cost
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import (
    METRICS,
    UNDECLARED,
    Direction,
    Metric,
    MetricKind,
    Origin,
    Tolerance,
    Value,
    format_value,
    metric_of,
    middle,
    own_metrics,
)
from pytest_aorta.verdict.noise import BLOCK_GAP_S, RESET
from pytest_aorta.verdict.statistics.decision import FALSE_ALARM_RATE, MIN_LAUNCHES_TO_FAIL, Decision, Outcome
from pytest_aorta.verdict.verdicts import (
    Decided,
    Missing,
    MissingPart,
    NotApplicable,
    Open,
    Reason,
    ReferenceKind,
    State,
    Unrecorded,
    Verdict,
    VerdictReference,
)

# Metrics that a launch lacks if the trace of its profiled steps is too large.
_OF_PROFILED_STEPS = ("overlap_ratio", "exposed_comm_ms", "device_idle_ms", "kernel_ms")
# Costs that another version of torch changes, and the libraries whose versions count.
_OF_VERSIONS = (Cost.OPERATORS, Cost.KERNELS)
_VERSIONS = ("torch", "cuda", "hip", "cudnn", "triton")
# What needs data or a clock that a simulated world lacks.
NOT_SIMULATED = (MetricKind.TIMING, MetricKind.NUMERIC, MetricKind.OWN)
# The config key of test hooks. A launch with a planted fault is compared with the baseline of the undisturbed workload.
TEST_HOOK_KEY = "fault"
# Facts that can be None because of the host rather than the code under test.
_FROM_HOST = ("cpu_kernels", "cublas")
# Facts that the code under test sets. If one of them is False, a launch is not bitwise reproducible.
_REPRODUCIBILITY = ("deterministic_algorithms", "bitwise_reproducible")


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that identifies its baseline: all keys except the test hook."""
    return {key: value for key, value in config.items() if key != TEST_HOOK_KEY}


def choose_tolerances(marked: Mapping[str, Tolerance], *facts: LaunchFacts) -> dict[str, Tolerance]:
    """Return the tolerances of the metrics to compare.

    These are the metrics that a tolerance names, and the metrics with a default tolerance that any launch has. Other
    metrics that the workload or script records are compared for presence if there is a launch to compare with. The
    launch under test is the first of ``facts``. In a simulated world, which has no times and no numbers, only costs are
    left.

    Raises:
        SpecError: A marker names a metric that needs more steps than the launch under test has, or a launch in a
            simulated world has no cost.
    """
    chosen = {name: tolerance for name, tolerance in marked.items() if tolerance.origin is not Origin.NUMERICS}
    num_steps = facts[0].num_steps
    for name in marked:
        if num_steps < (least := metric_of(name).min_steps):
            raise SpecError(
                f"tolerance of {name}: {num_steps} steps were measured, but {name} needs at least "
                f"{least}; measure more steps, or use step_time_tail5"
            )
    for name, metric in METRICS.items():
        has_it = any(metric.measure(launch) is not None or not_profiled(metric, launch) for launch in facts)
        # Most costs are 0 on both sides.
        if metric.cost is not None:
            has_it = any(metric.measure(launch) for launch in facts)
        # Times of operators on shared CPUs are compared on request only.
        if metric.only_on_gpus and facts[0].device == "cpu":
            continue
        if name not in chosen and metric.default is not None and has_it:
            chosen[name] = marked.get(name, metric.default)
    if len(facts) > 1:
        chosen |= {name: UNDECLARED for launch in facts for name in own_metrics(launch) if name not in chosen}
    left_out = NOT_SIMULATED if facts[0].simulated else ()
    names = [*METRICS, *sorted(chosen.keys() - METRICS.keys())]
    kept = {name: chosen[name] for name in names if name in chosen and metric_of(name).kind not in left_out}
    if left_out and not kept:
        raise SpecError("simulated world: no cost was counted, so nothing can be compared; record steps on the ranks")
    return kept


def applicable(marked: Mapping[str, Tolerance], facts: LaunchFacts, *others: LaunchFacts) -> dict[str, Tolerance]:
    """Return the metrics of :func:`choose_tolerances` that can be compared, if only with the same launch."""
    return {
        name: tolerance
        for name, tolerance in choose_tolerances(marked, facts, *others).items()
        if not_applicable(metric_of(name, tolerance.direction), tolerance, facts, facts) is None
    }


def known_to(
    other: LaunchFacts,
    tolerances: Mapping[str, Tolerance],
    marked: Mapping[str, Tolerance],
    *,
    is_variant: bool = False,
) -> dict[str, Tolerance]:
    """Return tolerances without those of metrics that no marker names and that another side has no value of.

    A baseline that is older than costs, or than a new metric, stays valid. Variants of a test have different costs and
    memory on purpose.
    """
    lacks_costs = is_variant or not has_costs(other)

    def is_lacking(metric: Metric) -> bool:
        if metric.cost is not None:
            return lacks_costs
        return (metric.is_growth and is_variant) or (metric.is_new and metric.measure(other) is None)

    return {name: found for name, found in tolerances.items() if name in marked or not is_lacking(metric_of(name))}


def has_costs(facts: LaunchFacts) -> bool:
    """Return whether the costs of a step were counted on every rank."""
    return bool(facts.costs) and not any(group.costs.problem for group in facts.costs)


def not_profiled(metric: Metric, facts: LaunchFacts) -> str | None:
    """Return why profiled steps gave no value of a metric that can be compared, or None.

    Either the trace of the steps was not read, or the launch has only the as-run value, measured without a head start,
    with which the text then ends.
    """
    known = facts.description
    if known.overlap_problem and metric.name in _OF_PROFILED_STEPS:
        return known.overlap_problem
    as_run = facts.metrics.get(metric.name + AS_RUN)
    if as_run is None:
        return None
    reason = "the host was late in the profiled steps in spite of every head start"
    if known.blocked_by:
        reason = f"a step waits for the device in {known.blocked_by}, so the host cannot run ahead"
    return f"{reason}; as run {format_value(as_run, metric.unit)}"


def is_not_profiled_again(facts: LaunchFacts) -> bool:
    """Return whether further launches of this code lack overlap too: its steps wait, or their trace is too large."""
    return bool(facts.description.blocked_by or facts.description.overlap_problem)


def not_applicable(
    metric: Metric, tolerance: Tolerance, facts: LaunchFacts, recorded: LaunchFacts, side: str = "baseline"
) -> tuple[Reason, str] | None:
    """Return the general reason and the details if a metric can't be compared between two launches, or None.

    The details call ``recorded`` by the word ``side``.
    """
    if tolerance.origin is Origin.UNDECLARED:
        return Reason.UNDECLARED, f"e.g. tolerance({metric.name}='+5%') if lower is better"
    if metric.kind is MetricKind.TIMING and recorded.launcher != facts.launcher:
        detail = f"ranks were started by {facts.launcher}, the {side}'s by {recorded.launcher}"
        return Reason.LAUNCHER, detail
    if metric.kind is MetricKind.TIMING and facts.device == "cpu":
        # A test without a tolerance marker for times does not lease the host exclusively.
        if tolerance.origin is Origin.DEFAULT:
            detail = "times of CPU ranks are compared only if a tolerance marker names the metric"
            return Reason.UNMARKED_CPU_TIMES, detail
        here, there = facts.provenance, recorded.provenance
        if here.block != there.block or abs(here.moment_s - there.moment_s) > BLOCK_GAP_S["cpu"]:
            return Reason.OLD_CPU_TIMES, "times of CPU ranks are compared only within one hour on one machine"
    if metric.cost in _OF_VERSIONS and (other := other_versions(facts, recorded, side)):
        return Reason.VERSIONS, other
    if metric.kind is not MetricKind.NUMERIC or tolerance.value is not None:
        return None
    if not (is_reproducible(facts) and is_reproducible(recorded)):
        detail = "this workload is not bitwise reproducible here; run it in its deterministic mode"
        return Reason.NOT_REPRODUCIBLE, detail
    different = other_machine(facts, recorded)
    return (Reason.ENVIRONMENT, different) if different else None


def other_versions(facts: LaunchFacts, recorded: LaunchFacts, side: str) -> str | None:
    """Return the first library of another version that chooses operators and kernels, or None."""
    for name in _VERSIONS:
        here, there = facts.environment.get(name), recorded.environment.get(name)
        if here != there:
            return f"{name} is {here}, the {side}'s {there}"
    return None


def other_machine(facts: LaunchFacts, recorded: LaunchFacts) -> str:
    """Return text on each difference in machine or installation, with both values; empty if there is none.

    Numbers of another machine, or of other versions, are not compared bit for bit.
    """
    changed = _changes(facts, recorded, of_machine=True)
    return f"other environment: {', '.join(changed)}" if changed else ""


def other_settings(facts: LaunchFacts, recorded: LaunchFacts) -> str:
    """Return text on the numeric settings that the code changed, with both values; empty if it changed none."""
    changed = _changes(facts, recorded, of_machine=False)
    return f"changed settings: {', '.join(changed)}" if changed else ""


def other_setting(recorded: LaunchFacts, launches: Sequence[LaunchFacts]) -> str:
    """Return the first difference in launcher or environment; both change times and numbers without a code change."""
    for launch in launches:
        if launch.launcher != recorded.launcher:
            return f"launcher is {launch.launcher!r}, the baseline's {recorded.launcher!r}"
        if difference := other_machine(launch, recorded) or other_settings(launch, recorded):
            return difference
    return ""


def _changes(facts: LaunchFacts, recorded: LaunchFacts, *, of_machine: bool) -> list[str]:
    return [
        f"{key} {recorded.environment.get(key)!r} -> {facts.environment.get(key)!r}"
        for key in _different_facts(facts, recorded)
        if _is_of_machine(key, facts, recorded) is of_machine
    ]


def _different_facts(facts: LaunchFacts, recorded: LaunchFacts) -> list[str]:
    """Return the facts of the numeric environment that differ, without choices of setup().

    Launches of one session block ran on the same CPUs, so their ``cpu_vendor`` is not compared: only one of them may
    report the vendor.
    """
    left_out = {*CHOICES, "cpu_vendor"} if facts.provenance.block == recorded.provenance.block else {*CHOICES}
    here, there = facts.environment, recorded.environment
    if None in (here.get("cublas"), there.get("cublas")):  # baselines of earlier versions lack this fact
        left_out.add("cublas")
    keys = sorted((here.keys() | there.keys()) - left_out, key=lambda key: (key != "torch", key))
    return [key for key in keys if here.get(key) != there.get(key)]


def _is_of_machine(key: str, facts: LaunchFacts, recorded: LaunchFacts) -> bool:
    """Return whether a fact that differs belongs to the machine or the installation, not to the code under test."""
    if key == "cpu_vendor":  # reported unless the code declares that it computes the same bits on every CPU
        return None not in (facts.environment.get(key), recorded.environment.get(key))
    if key in ("cpu_capability", "cpu_kernels"):
        return _is_other_cpu(facts, recorded)
    return key not in PROGRAM_ENVIRONMENT


def _is_other_cpu(facts: LaunchFacts, recorded: LaunchFacts) -> bool:
    """Return whether two launches ran on CPUs of different capability, as far as the code did not change the pins.

    The launcher pins the kernels of a CPU with AVX2, so that all of these CPUs report the capability of the pins.
    """
    sides = (facts.environment, recorded.environment)
    has_avx2 = [str(side.get("cpu_capability")).startswith("AVX") for side in sides]
    is_pinned = [side.get("cpu_kernels") is not None for side in sides]
    has_other_capability = facts.environment.get("cpu_capability") != recorded.environment.get("cpu_capability")
    return has_other_capability and is_pinned == has_avx2 and not all(is_pinned)


def lost_reproducibility(launches: Sequence[LaunchFacts], recorded: LaunchFacts, side: str) -> str | None:
    """Return the fact that makes a launch not bitwise reproducible although ``recorded`` is, or None.

    Without this check, code whose numbers changed could avoid the comparison. The text calls ``recorded`` by the word
    ``side``.
    """
    if not is_reproducible(recorded):
        return None
    for facts in launches:
        for key, there in sorted(recorded.environment.items()):
            if (
                key == "cpu_vendor" and facts.provenance.block == recorded.provenance.block
            ):  # one host, so the vendor is known
                continue
            if there is not None and facts.environment.get(key) is None and key not in (*_FROM_HOST, *CHOICES):
                return f"the launch does not report {key}, which is {there!r} in the {side}"
        for key in _REPRODUCIBILITY:
            if recorded.environment.get(key, True) and not facts.environment.get(key, True):
                return f"{key} is False, but True in the {side}"
    return None


def is_reproducible(facts: LaunchFacts) -> bool:
    """Return whether a second launch is known to compute the same bits, or nothing else is known."""
    return bool(facts.environment.get("bitwise_reproducible", True))


def changed_settings(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Return the settings of two configs that differ, as text for each config; empty texts if the configs are equal."""
    nothing = object()  # unequal to every value
    keys = sorted(one.keys() | other.keys())
    changed = [key for key in keys if not _is_same(one.get(key, nothing), other.get(key, nothing))]
    there, here = (", ".join(_setting(side, key) for key in changed) for side in (one, other))
    return there, here


def _is_same(one: object, other: object) -> bool:
    """Return whether two values of a config are equal. In Python ``True == 1``, but a config can allow both."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _setting(config: dict[str, Any], key: str) -> str:
    return f"{key}={brief(repr(config[key]))}" if key in config else f"no key {key}"


def other_steps(launches: Sequence[LaunchFacts], recorded: LaunchFacts, *, is_ab: bool = False) -> str:
    """Return text if a launch has another number of measured steps than that of the other side; else empty.

    A script can change its number of steps without a change of the config, and statistics over fewer steps hide slow
    steps.
    """
    found = next((facts.num_steps for facts in launches if facts.num_steps != recorded.num_steps), None)
    if found is None:
        return ""
    there, here = ("the reference ran", "launch") if is_ab else ("the baseline was recorded with", "test has")
    return f"{there} {counted(recorded.num_steps, 'measured step')}, the {here} {found}"


def changed_choice(facts: LaunchFacts, recorded: LaunchFacts) -> str | None:
    """Return the key of the first choice of setup() that differs between two launches, or None."""
    return next((key for key in CHOICES if facts.environment.get(key) != recorded.environment.get(key)), None)


def other_setup(
    baseline: Baseline, workload: str, config: dict[str, Any], launches: Sequence[LaunchFacts]
) -> str | None:
    """Return why a baseline is not one of these launches, or None if it is.

    The reason is another workload or script, config or choice of setup().
    """
    before = "the baseline was recorded with"
    if baseline.workload != workload:
        return f"{before} the workload {baseline.workload!r}, the test has {workload!r}"
    there, here = changed_settings(baseline.config, config)
    if there:
        return f"{before} {there}, the test has {here}"
    recorded = baseline.center_launches[-1]
    for facts in launches:
        if key := changed_choice(facts, recorded):
            chosen, other = (side.environment.get(key) for side in (recorded, facts))
            return f"{before} {key}={chosen!r}, which setup chose, and a launch with {other!r}"
    return None


def profiled(metric: Metric, launches: Sequence[LaunchFacts]) -> list[LaunchFacts]:
    """Return the launches without those whose profiled steps gave no value of the metric."""
    return [launch for launch in launches if not_profiled(metric, launch) is None]


STALE = f"the baseline is stale; record the better value with {RESET}"


@dataclass(frozen=True)
class Row:
    """A metric that is judged, with the launches of both sides. Each method builds the verdict, once.

    Attributes:
        reference: The other side of the comparison.
        launches, others: The launches under test and those of the other side.
        count: Number of launches under test, with those that have no value of the metric because their host was late.
        late: The explanation if hosts were late and no further launch is allowed, so that an open verdict is final.
    """

    case: str
    metric: Metric
    tolerance: Tolerance
    reference: VerdictReference
    launches: Sequence[LaunchFacts]
    others: Sequence[LaunchFacts]
    count: int
    late: str = ""

    @property
    def value(self) -> Value:
        """Return the value of the launches under test."""
        return middle(self.metric, self.launches)

    def decided(
        self,
        outcome: Outcome | None,
        value: Value,
        baseline: Value,
        detail: str = "",
        *,
        delta: float | None = None,
        tolerance: Tolerance | None = None,
    ) -> Verdict:
        """Return the verdict of a comparison; it is open if ``outcome`` is None and further launches are allowed."""
        if outcome is None and self.late:
            outcome, detail = Outcome.INCONCLUSIVE, self.late
        state = Open() if outcome is None else Decided(outcome)
        return self._verdict(state, value, baseline, detail).replace(delta=delta, tolerance=tolerance or self.tolerance)

    def missing(
        self, part: MissingPart, detail: str, value: Value, baseline: Value = None, unrecorded: Unrecorded | None = None
    ) -> Verdict:
        """Return the verdict *missing*. Without a value of the candidate, the state of the baseline does not matter."""
        lacking = Missing(MissingPart.CANDIDATE_VALUE if value is None else part, unrecorded)
        return self._verdict(lacking, value, baseline, detail)

    def not_applicable(self, reason: Reason, detail: str, value: Value, baseline: Value = None) -> Verdict:
        """Return the verdict *not applicable*."""
        return self._verdict(NotApplicable(reason), value, baseline, detail)

    def _verdict(self, state: State, value: Value, baseline: Value, detail: str) -> Verdict:
        name, reference, count = self.metric.name, self.reference, self.count
        return Verdict(self.case, name, state, value, baseline, None, self.tolerance, reference, detail, launches=count)

    def by_decision(self, decision: Decision, center: Value, detail: str) -> Verdict:
        """Return the verdict of a decision; ``center`` is the value of the other side.

        For a time that did not pass, the detail names throttled devices.
        """
        change, worse, outcome = self.metric.scale.change, self.metric.worse, decision.outcome
        num_hot = sum(bool(launch.description.throttled) for launch in self.launches)
        if outcome is Outcome.IMPROVED:
            detail = STALE
        if num_hot and self.metric.kind is MetricKind.TIMING and outcome is not Outcome.PASS:
            of = f"{num_hot} of {len(self.launches)} launches" if len(self.launches) > 1 else "the launch"
            detail = ", ".join(filter(None, [f"GPUs throttled in {of}", detail]))
        low, high = sorted(change(worse * end) for end in (decision.low, decision.high))
        found = self.decided(outcome, self.value, center, detail, delta=change(worse * decision.effect))
        return found.replace(low=low, high=high, launches=decision.launches)

    def under_profiler(self, launches: Sequence[LaunchFacts]) -> Verdict | None:
        """Return the verdict for a time if a profiler slowed the ranks of one of the launches, or None."""
        found = next((launch.profiler for launch in launches if launch.profiler), None)
        if found is None or self.metric.kind is not MetricKind.TIMING:
            return None
        return self.not_applicable(Reason.PROFILER, f"ranks ran under {found}, which slows them", self.value)

    def late_hosts(self, launches: Sequence[LaunchFacts]) -> str:
        """Return text on the launches that have no value because their host was late; empty without any."""
        late = [detail for launch in launches if (detail := not_profiled(self.metric, launch))]
        number = f"{len(late)} of {counted(len(launches), 'launch')}" if len(launches) > 1 else "the launch"
        return f"no value of {number}: {late[-1]}" if late else ""

    def unprofiled(self, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> Verdict | None:
        """Return the verdict for a metric that profiled steps of ``launches`` did not give, or None.

        The metric does not apply if no launch of ``others`` has it. If one has it, a new wait for the device and a
        trace that has become too large fail the test. Otherwise a change could avoid the comparison by either. After a
        late host, the next launch can have the metric.
        """
        metric = self.metric
        found = [(launch, detail) for launch in launches if (detail := not_profiled(metric, launch))]
        if not found:
            return None
        known = profiled(metric, [other for other in others if metric.measure(other) is not None])
        if not known:
            launch, detail = found[0]
            reason = Reason.TRACE if launch.description.overlap_problem else Reason.HEAD_START
            return self.not_applicable(reason, detail, None)
        lasting = [detail for launch, detail in found if is_not_profiled_again(launch)]
        if not lasting:
            return None
        return self.missing(MissingPart.CANDIDATE_VALUE, lasting[0], None, middle(metric, known))

    def incomparable(self) -> Verdict | None:
        """Return the verdict for a metric that one side lacks or that does not apply, or None if it can be compared."""
        metric, launches, others, side = self.metric, self.launches, self.others, str(self.reference)
        known, last = [metric.measure(other) for other in others], others[-1]
        if any(metric.measure(launch) is None for launch in launches):
            return self.missing(MissingPart.CANDIDATE_VALUE, f"the launch has no {metric.name}", None, known[-1])
        value, is_ab, is_variant = self.value, self.reference.is_ab, self.reference.is_variant
        is_elsewhere = is_variant or self.reference.kind is ReferenceKind.RESULTS
        # A test may compare a reproducible variant with a variant that is not.
        is_bitwise = metric.kind is MetricKind.NUMERIC and self.tolerance.is_exact and not is_variant
        device = None if is_elsewhere else _other_device(launches, last, side)
        if lost := device or (lost_reproducibility(launches, last, side) if is_bitwise else None):
            remedy = "" if is_ab else f"; if this is intended, record the baseline again with {RESET}"
            return self.missing(MissingPart.CANDIDATE_VALUE, lost + remedy, value, known[-1])
        # Equal bits need no equal environment, but nothing asks for the others.
        is_asked = is_ab and self.tolerance.is_exact and self.tolerance.origin is not Origin.DEFAULT
        is_equal = is_asked and {*map(metric.measure, (*launches, *others))} == {known[-1]}
        if not is_equal and (found := not_applicable(metric, self.tolerance, launches[0], last, side)):
            baseline = None if metric.direction is Direction.EXACT else middle(metric, others)
            return self.not_applicable(*found, value, baseline)
        if any(value is None for value in known):
            reason = not_profiled(metric, last)
            absent = f"the {side} has no {metric.name}" + (f": {reason}" if reason else "")
            again = "" if is_ab else f"; record it again with {RESET}"
            return self.missing(MissingPart.BASELINE_VALUE, absent + again, value)
        if metric.by_step is not None:
            here, there = metric.by_step(launches[-1]), metric.by_step(last)
            if max(here) != max(there):
                detail = f"the last hash is that of step {max(here)}, the {side}'s that of step {max(there)}"
                if different := _different_steps(here, there):
                    return self._other_hash(different[0], launches[-1], last, detail)
                return self.missing(MissingPart.CANDIDATE_VALUE, detail, value, known[-1])
        return None

    def judge_exact(self) -> Verdict:
        """Return the verdict on values that must be equal: the last ones, and those of every earlier step."""
        metric = self.metric
        for launch in self.launches:
            value = metric.measure(launch)
            if unequal := [other for other in self.others if metric.measure(other) != value]:
                other = min(unequal, key=lambda other: str(metric.measure(other)))
                where = _first_difference(metric, launch, other)
                return self._other_bits(value, metric.measure(other), launch, self.others[-1], where)
        if metric.by_step is None:
            return self.decided(Outcome.PASS, self.value, self.value)
        for launch, other in itertools.product(self.launches, self.others):
            here, there = metric.by_step(launch), metric.by_step(other)
            if different := _different_steps(here, there):
                # With several optimizers, the last step is that of the one with most steps.
                equal = f"after the last step, {max(here)}, the {metric.hashed} are equal"
                return self._other_hash(different[0], launch, other, equal if len(launch.series) < 2 else "")
        for launch in () if self.reference.is_variant else self.launches:  # variants of a test may hash different steps
            if lost := sorted(metric.by_step(self.others[-1]).keys() - metric.by_step(launch).keys()):
                steps = f"{counted(len(lost), 'step')} for which the {self.reference} has one"
                detail = f"the launch has no hash of {steps}: {brief(', '.join(map(str, lost)))}"
                return self.missing(MissingPart.CANDIDATE_VALUE, detail, self.value, self.value)
        return self.decided(Outcome.PASS, self.value, self.value)

    def _other_hash(self, step: int, launch: LaunchFacts, other: LaunchFacts, further: str) -> Verdict:
        """Return the regression of the first hash that differs, that of a step which both sides have."""
        assert self.metric.by_step is not None
        here, there = self.metric.by_step(launch), self.metric.by_step(other)
        where = _first_other(self.metric, launch, other) or f"after step {step}"
        return self._other_bits(here[step], there[step], launch, other, "; ".join(filter(None, [where, further])))

    def _other_bits(
        self, value: Value, expected: Value, launch: LaunchFacts, other: LaunchFacts, where: str
    ) -> Verdict:
        """Return the regression of other bits, with the numeric settings that the code changed."""
        settings = other_settings(launch, other) if self.metric.kind is MetricKind.NUMERIC else ""
        detail = "; ".join(filter(None, [where, settings]))
        return self.decided(Outcome.REGRESSION, value, expected, detail)

    def judge_ranges(self, max_launches: int) -> Verdict:
        """Return the verdict on the ranges of values, because values of zero or below have no logarithm.

        A change is reported if every launch lies beyond all launches of the other side, and the medians differ by more
        than the tolerance.
        """
        here, there = (
            [self.metric.worse * float(self.metric.measure(launch) or 0) for launch in side]
            for side in (self.launches, self.others)
        )
        by_chance = 1 / math.comb(len(here) + len(there), len(here))
        never_varies = len(set(here)) == len(set(there)) == 1
        are_separate = len(here) >= MIN_LAUNCHES_TO_FAIL and (never_varies or by_chance <= FALSE_ALARM_RATE)
        allowed = (self.tolerance.value or 0.0) * abs(median(there))
        if min(there) <= median(here) <= max(there) or abs(median(here) - median(there)) <= allowed:
            outcome: Outcome | None = Outcome.PASS
        elif are_separate and min(here) > max(there):
            outcome = Outcome.REGRESSION
        elif are_separate and max(here) < min(there):
            outcome = Outcome.IMPROVED
        else:
            outcome = None if len(here) < max_launches else Outcome.INCONCLUSIVE
        detail = "values are not positive, so their ranges are compared"
        return self.decided(outcome, self.value, middle(self.metric, self.others), detail)


def _other_device(launches: Sequence[LaunchFacts], other: LaunchFacts, side: str) -> str | None:
    """Return text if a launch computed on another kind of device than the other side on the same platform, or None.

    The code has left the devices of its world, e.g. because torch finds no GPU and a script then takes the CPU.
    """
    there = other.environment.get("device")
    for here in (launch.environment.get("device") for launch in launches):
        if None not in (here, there) and here != there:
            return f"the ranks computed on {here}, those of the {side} on {there}"
    return None


def _different_steps(here: Mapping[int, str], there: Mapping[int, str]) -> list[int]:
    """Return the steps, in order, for which both sides have a value and the values differ."""
    return [step for step in sorted(here.keys() & there.keys()) if here[step] != there[step]]


def _first_other(metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> str:
    """Return which optimizer's weights differ first, or the first optimizer that only one side has; or empty."""
    here, there = len(launch.series), len(other.series)
    found = first_other_weights(launch.series, other.series, metric.hashed)
    if found or here == there:
        return found
    return f"{launch.series[there].name} is new" if here > there else f"{other.series[here].name} is gone"


def _first_difference(metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> str:
    """Return after which step two sides first differ; empty if both have a value for one step only, or for none."""
    if metric.by_step is None:
        return ""
    if found := _first_other(metric, launch, other):
        return found
    here, there = metric.by_step(launch), metric.by_step(other)
    different, common = _different_steps(here, there), sorted(here.keys() & there.keys())
    if len(common) < 2 or not different:
        return ""
    position = common.index(different[0])
    before = f", and are equal after step {common[position - 1]}" if position else ""
    return f"the {metric.hashed} first differ after step {different[0]}{before}"
