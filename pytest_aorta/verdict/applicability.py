"""The choice of metrics to compare, and the reasons why two launches can't be compared by one."""

from collections.abc import Collection

from pytest_aorta.common.errors import SpecError
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.trace.profiled_steps import AS_RUN, Cost
from pytest_aorta.verdict.environment import changes, is_reproducible, other_versions
from pytest_aorta.verdict.metrics import (
    LATE_RANK,
    METRICS,
    UNDECLARED,
    Metric,
    MetricKind,
    Origin,
    Tolerance,
    Tolerances,
    format_value,
    metric_of,
    own_metrics,
)
from pytest_aorta.verdict.noise import BLOCK_GAP_S
from pytest_aorta.verdict.verdicts import Reason

# Metrics that a launch lacks if the trace of its profiled steps is too large.
_OF_PROFILED_STEPS = ("overlap_ratio", "exposed_comm_ms", "device_idle_ms", "kernel_ms")
# Metrics that the step's schedule decides where ranks compute on shared CPUs, whose times are noise.
_SCHEDULED_ON_CPU = ("overlap_ratio", "exposed_comm_ms")
# Costs that another version of torch changes, and the libraries whose versions count.
_OF_VERSIONS = (Cost.OPERATORS, Cost.KERNELS)
# What needs data or a clock that a simulated world lacks.
NOT_SIMULATED = (MetricKind.TIMING, MetricKind.NUMERIC, MetricKind.OWN)


def choose_tolerances(
    marked: Tolerances, *facts: LaunchFacts, asked: Collection[str] = (), is_variant: bool = False
) -> dict[str, Tolerance]:
    """Return the tolerances of the metrics to compare.

    These are the metrics that a tolerance names, and the metrics with a default tolerance that any launch has. Other
    metrics that the workload or script records are compared for presence if there is a launch to compare with. The
    launch under test is the first of ``facts``. In a simulated world, which has no times and no numbers, only costs and
    schedules are left. On CPU ranks, timed overlap is left out beside a schedule unless it is ``asked`` for.

    Of what no marker names and nobody has asked for, costs and metrics that are new are left out where the other side
    has none, so that a baseline that is older stays valid. Variants of a test have other costs and memory on purpose.

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
    # Who names a time has said which change of speed counts; a launch alone has nothing to differ from.
    is_gross = len(facts) > 1 and not any(metric_of(name).kind is MetricKind.TIMING for name in marked)
    is_on_cpu = {launch.device for launch in facts} == {"cpu"}
    for name, metric in METRICS.items():
        if is_on_cpu and metric.kind is MetricKind.TIMING:
            default, needed = metric.on_cpu if is_gross else None, all
        else:
            default, needed = (metric.on_cpu if is_on_cpu else None) or metric.default, any
        if name not in chosen and default is not None and needed(_has(metric, launch) for launch in facts):
            chosen[name] = marked.get(name, default)
    if len(facts) > 1 and not is_variant:
        chosen |= {name: UNDECLARED for launch in facts for name in own_metrics(launch) if name not in chosen}
    left_out = NOT_SIMULATED if facts[0].simulated else ()
    timed = _SCHEDULED_ON_CPU if facts[0].device == "cpu" and facts[0].schedules else ()
    names = [*METRICS, *sorted(chosen.keys() - METRICS.keys())]
    names = [name for name in names if name in chosen and (name in asked or name not in timed)]
    names = [name for name in names if metric_of(name).kind not in left_out]
    if left_out and not names:
        raise SpecError("simulated world: no cost was counted, so nothing can be compared; record steps on the ranks")
    if len(facts) > 1:
        named = {*marked, *asked}
        names = [name for name in names if name in named or _is_known(metric_of(name), facts[-1], is_variant)]
    return {name: chosen[name] for name in names}


def _has(metric: Metric, launch: LaunchFacts) -> bool:
    """Return whether a launch asks for the comparison of a metric; most costs are 0 on both sides."""
    value = metric.measure(launch)
    return bool(value) if metric.cost is not None else value is not None or not_profiled(metric, launch) is not None


def _is_known(metric: Metric, other: LaunchFacts, is_variant: bool) -> bool:
    """Return whether the other side has what it takes to compare a metric that nobody names."""
    if metric.cost is not None and (is_variant or not has_costs(other)):
        return False
    is_varied = is_variant and bool(metric.grows or metric.scheduled)
    return not is_varied and not (metric.is_new and metric.measure(other) is None)


def applicable(marked: Tolerances, facts: LaunchFacts, *others: LaunchFacts) -> dict[Metric, Tolerance]:
    """Return the metrics of :func:`choose_tolerances` that can be compared, if only with the same launch."""
    chosen = choose_tolerances(marked, facts, *others)
    metrics = {metric_of(name, tolerance.direction): tolerance for name, tolerance in chosen.items()}
    return {one: found for one, found in metrics.items() if not_applicable(one, found, facts, facts) is None}


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
        return Reason.LAUNCHER, f"ranks were started by {facts.launcher}, the {side}'s by {recorded.launcher}"
    # The difference between ranks, unlike a time, hardly depends on the machine.
    if metric.kind is MetricKind.TIMING and facts.device == "cpu" and metric.name != LATE_RANK:
        here, there = facts.provenance, recorded.provenance
        is_other = recorded.device != facts.device or here.block != there.block
        if is_other or abs(here.moment_s - there.moment_s) > BLOCK_GAP_S["cpu"]:
            is_asked = tolerance.origin is Origin.MARKER
            reason = Reason.OLD_CPU_TIMES if is_asked else Reason.UNMARKED_CPU_TIMES
            return reason, "times of CPU ranks are compared only within one hour on one machine"
    if metric.cost in _OF_VERSIONS and (other := other_versions(facts, recorded, side)):
        return Reason.VERSIONS, other
    if metric.kind is not MetricKind.NUMERIC or tolerance.value is not None:
        return None
    if not (is_reproducible(facts) and is_reproducible(recorded)):
        detail = "this workload is not bitwise reproducible here; run it in its deterministic mode"
        return Reason.NOT_REPRODUCIBLE, detail
    different = changes(facts, recorded).machine
    return (Reason.ENVIRONMENT, different) if different else None


def profiled(metric: Metric, launches: Launches) -> list[LaunchFacts]:
    """Return the launches without those whose profiled steps gave no value of the metric."""
    return [launch for launch in launches if not_profiled(metric, launch) is None]
