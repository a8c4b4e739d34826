"""The markers of the test that ``aorta init`` writes, and the reasons for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_aorta.cli.init_launches import Pair
from pytest_aorta.common.text import counted
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.workloads import pinned_cpu_kernels
from pytest_aorta.plan.world import World
from pytest_aorta.result.facts import Launches
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.statistics.decision import CONFIDENCE, quantile_t
from pytest_aorta.verdict.statistics.variance import own_variance

# The least of these tolerances that launches can decide is marked.
_TOLERANCES = (0.03, 0.05, 0.1, 0.2)
# Kernels that take less than this in a step, in ms, vary by about 1% between launches of one H200, whatever two show.
_SHORT_MS, _LEAST_OF_SHORT = 1.0, 0.05


@dataclass(frozen=True)
class Fit:
    """The comparisons of a test that fit two launches.

    Attributes:
        markers: Markers of the test.
        notes: Why the test is as it is, in sentences.
        compares: Whether the test compares anything.
    """

    markers: Sequence[str]
    notes: Sequence[str]
    compares: bool


def fitted(pair: Pair, world: World) -> Fit:
    """Return what a test of two launches compares.

    Raises:
        AortaError: A launch failed.
    """
    first, second = facts = [result.facts for result in pair.results()]
    on_cpu = world.device == DeviceKind.CPU
    # The lanes of docs/ci.md: bits are compared on any machine, times only on GPUs.
    markers = ["numerics" if on_cpu else "overlap", f"world(size={world.size})"]
    said = [
        f"measured {counted(first.num_steps, 'step')} on {world.platform}",
        first.description.optimizers,
        *pair.notes,
    ]
    costs, of_costs = _costs(facts)
    said.append(of_costs)
    if first.description.overlap_problem:
        said.append(f"measured overlap is not compared: {first.description.overlap_problem}")
    if first.num_steps != second.num_steps:
        said.append(
            f"a launch measured {first.num_steps} steps and the next {second.num_steps}, so the test fails: have the "
            "script make a fixed number of steps"
        )
    compares = not on_cpu or bool(first.weight_hashes or first.series or costs)
    if on_cpu:
        said.append(
            "of CPU ranks' times, only gross changes are compared: steps twice as slow, and a rank that is late"
        )
        if pair.settings["record"] and pinned_cpu_kernels():
            said.append(
                "printed losses may differ from plain torchrun's in their last digits: launches that compare bits pin "
                "the kernels of the CPU, for equal bits on other CPUs"
            )
    else:
        marker, of_times = _times(facts)
        markers += [marker] if marker else []
        said.append(of_times)
    if not compares:
        said.append(
            "nothing is compared, so the test fails: have the script call recorder.start(warmup=2), recorder.step() "
            "and recorder.weights(model), with pytest_aorta.worker.recorder"
        )
    return Fit(markers, [note for note in said if note], compares)


def _costs(facts: Launches) -> tuple[bool, str]:
    """Return whether all launches have a cost of a step, and a note."""
    rows = [row for row in METRICS.values() if row.cost is not None]
    values = {row.name: [row.measure(launch) for launch in facts] for row in rows}
    known = {name: found for name, found in values.items() if None not in found}
    if not known:
        problem = next((group.costs.problem for group in facts[0].costs), "")
        return False, f"costs of a step are not compared{f': {problem}' if problem else ''}"
    varying = [name for name, found in known.items() if len(set(found)) > 1]
    return True, f"costs of a step are compared{f', except what varies: {varying}' if varying else ''}"


def _times(facts: Launches) -> tuple[str, str]:
    """Return the marker of a tolerance that launches can decide, or none; and why.

    Time of kernels hardly depends on the host. Its delays change the times of steps from launch to launch, and two
    launches do not show by how much, so these times get no marker.
    """
    row = METRICS["kernel_ms"]
    values = [value for launch in facts if isinstance(value := row.measure(launch), float) and value > 0]
    if len(values) < len(facts):
        return "", "times have no marker: no kernels were timed, and times of steps vary with the host"
    own = own_variance(list(map(math.log, values)))
    # Where a further launch is expected: two launches that are close may be so by chance.
    spread = quantile_t((1 + CONFIDENCE) / 2, own.df) * math.sqrt(own.value * (1 + 1 / len(values)))
    said = f"{row.name} of two launches differs by {100 * (max(values) / min(values) - 1):.2f}%"
    least = max(math.expm1(spread), _LEAST_OF_SHORT if min(values) < _SHORT_MS else 0.0)
    fits = next((each for each in _TOLERANCES if each >= least), None)
    if fits is None:
        return "", f"times have no marker: {said}, so a third may differ by {100 * math.expm1(spread):.0f}%"
    text = row.scale.text(fits)
    return f'tolerance({row.name}="{text}")', f"{row.name} is compared with a tolerance of {text}: {said}"
