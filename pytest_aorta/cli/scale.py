"""``aorta scale``: shows how the costs of a step on one rank grow with the number of ranks, in simulated worlds.

The step's graph of streams is played on the nominal machine too: on how many ranks communication no longer hides.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.pytest_run import run_pytest, unfinished
from pytest_aorta.cli.target import (
    ScriptTarget,
    WorkloadTarget,
    add_config,
    add_drawing,
    add_shared,
    given_options,
    given_target,
    write_drawing,
)
from pytest_aorta.common.errors import LaunchError, ResultError, UsageError
from pytest_aorta.common.files import create_numbered_folder, slug
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.text import aligned, counted, emit
from pytest_aorta.launch.guarded import require_torch
from pytest_aorta.launch.watch import SpokenState
from pytest_aorta.plan.options import Options, integer_from
from pytest_aorta.plan.world import MAX_WORLD_SIZE, WorldSpec, resolve_world
from pytest_aorta.report.timeline import BETWEEN_HOSTS, IN_HOST, Bars, Drawing, Row, drawn_schedules
from pytest_aorta.result.folder import RESULT_FILE, rank_folder, steps_entered
from pytest_aorta.result.measurements import PADDED, WorkloadResult
from pytest_aorta.result.reading import read_result
from pytest_aorta.result.trace.overlap import Lane
from pytest_aorta.result.trace.profiled_steps import CollectiveCost, Cost
from pytest_aorta.result.trace.schedule import NOMINAL, Schedule, play
from pytest_aorta.result.trace.step_graph import StepGraph
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.session import Session, TestSpec
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import format_value

OWNER = "aorta scale"
SHARED = ("timeout", "workloads")
_COLUMNS = ("ranks", "collectives", "bytes", "operators", "FLOPs", "peak memory", "")
_BAR = 24
# Follows the ranks of a row whose step is of another kind.
_OTHER = "*"
_MOST_NAMED = 2
# A change of less than this is no growth.
_LEAST_GROWTH = 0.01
_SCHEDULED = ("ranks", "overlap", "exposed in a host", "between hosts", "step", "nothing to hide under")
# Communication hides no longer where this much more of the step is exposed than on the fewest ranks.
_MORE_EXPOSED = 0.05
_WORKS = (2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand; those of ``aorta run`` have the same names."""
    parser.usage = "aorta scale [options] WORKLOAD|SCRIPT|TEST [-- ARG ...]"
    parser.add_argument(
        "target", metavar="WORKLOAD|SCRIPT|TEST", help="a workload, a training script (.py), or a test's node id"
    )
    parser.add_argument(
        "--sizes",
        metavar="N,N,...",
        type=_sizes,
        default=(2, 8, 64, 1024),
        help="numbers of ranks (default: 2,8,64,1024)",
    )
    parser.add_argument(
        "--rank", metavar="N", type=integer_from(0), default=0, help="the rank to simulate (default: 0)"
    )
    add_config(parser)
    add_drawing(parser)
    add_shared(parser, SHARED)
    parser.epilog = "After -- come arguments of the script, or options of the test's pytest."
    parser.set_defaults(run=run, args=())


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(map(integer_from(1, MAX_WORLD_SIZE), text.split(",")))))


def run(arguments: argparse.Namespace) -> int:
    """Launch one rank at each size, then print the table and what explains it.

    If a launch fails, the sizes before it are printed first.

    Raises:
        UsageError: The command line is wrong; nothing was launched.
        ResultError: A launch counted no costs.
        AortaError: A launch failed.
    """
    if arguments.rank >= arguments.sizes[0]:
        raise UsageError(f"--rank: got {arguments.rank}, allowed is a rank from 0 to {arguments.sizes[0] - 1}")
    sizes, word, args = arguments.sizes, arguments.target, arguments.args
    places = (arguments.results, sizes, arguments.rank)
    if "::" in word:
        if arguments.config or arguments.assignments:
            raise UsageError("--config, --set: a test gives its own config; give options of pytest after --")
        results = _of_test(word, args, *places)
    else:
        options = given_options(arguments)
        workload, script = (None, word) if "." in word else (word, None)
        target = given_target(options, workload, script, args, arguments.config, arguments.assignments)
        results = _of_target(target, options, *places)
    points: list[Point] = []
    failed: dict[int, int] = {}
    try:
        for result in results:
            points.append(point_of(result))
    except LaunchError as error:
        if error.run_dir is not None:
            # A script enters the step after its last one.
            entered = steps_entered(rank_folder(error.run_dir, arguments.rank))
            failed = {sizes[len(points)]: max(0, entered - 1)}
        raise
    finally:
        if points:
            emit([*table(points), *explanations(points, failed), *scheduled(points)])
    if arguments.draw:
        write_drawing(arguments.draw, panels(points))
    return ExitCode.OK


def _split(steps: Mapping[int, int]) -> list[str]:
    """Return a line on steps by number of ranks that become fewer on more ranks."""
    (least, few), (most, many) = (end(steps.items(), key=lambda item: item[1]) for end in (min, max))
    if few == many or least < most:
        return []
    shown = f"{counted(few, 'step')} at {least:,} ranks, {many} at {most:,}"
    return [f"{shown}: the data are split; give the script a number of steps"]


def _of_target(
    target: WorkloadTarget | ScriptTarget, options: Options, base: Path, sizes: Sequence[int], rank: int
) -> Iterator[WorkloadResult]:
    """Launch a workload or a script at each size."""
    require_torch()
    with closing(Session(options, line=SpokenState())) as session, terminable():
        for size in sizes:
            spec = TestSpec(WorldSpec(size, simulated=(rank,)))
            world, folder = resolve_world(spec.world, options, []), base / target.slug / f"x{size}"
            with session.launcher(world, spec, RunningTest(OWNER), folder, timed=False) as launcher:
                yield target.launch(DistributedWorld(launcher))


def _of_test(test: str, words: Sequence[str], base: Path, sizes: Sequence[int], rank: int) -> Iterator[WorkloadResult]:
    """Run a test at each size, whatever its verdicts; yield the result of its first launch at each.

    Raises:
        AortaError: The test left no result.
    """
    for size in sizes:
        folder = create_numbered_folder(base.absolute() / slug(test), f"x{size}")
        world = {"size": size, "simulated": [rank]}
        _, found = run_pytest([f"--aorta-results={folder}", test, *words], folder, marks={"world": world})
        left = [note.folder for record in found.records for note in record.launches if note.has_result]
        if not left:
            raise unfinished(folder, f"{test}: no launch on {size} simulated ranks had a result; pytest printed")
        yield read_result(Path(left[0]) / RESULT_FILE)


@dataclass(frozen=True)
class Point:
    """The costs of a step on one rank of a world.

    Attributes:
        size: Number of ranks.
        collectives: Rows by kind, size of group and type.
        operators, flops: Numbers per step.
        memory_bytes: Estimate of the peak; None if tensors had data.
        padded: Names of parameters with fewer rows than ranks that share them.
        steps: Number of steps of the optimizer, or of the workload.
        multiplying: Calls of the operators that have FLOPs.
        graph: The step's graph of streams; None without one that has a collective.
    """

    size: int
    collectives: Sequence[CollectiveCost]
    operators: int
    flops: int
    memory_bytes: float | None
    padded: str
    steps: int = 0
    multiplying: Mapping[str, int] = field(default_factory=dict)
    graph: StepGraph | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all collectives."""
        return self.bytes_by_kind.total()

    @property
    def bytes_by_kind(self) -> Counter[str]:
        """The bytes of each kind of collective."""
        found: Counter[str] = Counter()
        for row in self.collectives:
            found[str(row.kind)] += row.bytes or 0
        return found


def point_of(result: WorkloadResult) -> Point:
    """Return the costs of the one simulated rank of a result.

    Raises:
        ResultError: They were not counted.
    """
    costs = result.costs[0]
    if costs is None or costs.problem:
        problem = costs.problem if costs else "no step was recorded"
        raise ResultError(
            f"{result.workload} on {counted(result.world_size, 'rank')}: no costs were counted: {problem}"
        )
    operators, flops = (costs.counts(cost) or {} for cost in (Cost.OPERATORS, Cost.FLOPS))
    return Point(
        size=result.world_size,
        collectives=costs.collectives,
        operators=sum(operators.values()),
        flops=sum(flops.values()),
        memory_bytes=result.metrics.get("peak_memory_bytes"),
        padded=str(result.environment.get(PADDED, "")),
        steps=max((series.num_steps for series in result.ranks[0].series), default=result.total_iterations),
        multiplying={name: operators[name] for name in flops if name in operators},
        graph=costs.graph if result.facts.schedules else None,
    )


def table(points: Sequence[Point]) -> list[str]:
    """Return a line for each size, with a bar for the bytes of its collectives."""
    most = max(point.num_bytes for point in points) or 1
    rows = [
        (
            f"{point.size:,}{_OTHER * bool(_other_kind(points[0], point))}",
            f"{sum(row.calls for row in point.collectives):,}",
            format_value(float(point.num_bytes), "B"),
            f"{point.operators:,}",
            f"{point.flops:,}",
            "-" if point.memory_bytes is None else format_value(point.memory_bytes, "B"),
            "#" * math.ceil(_BAR * point.num_bytes / most),
        )
        for point in points
    ]
    return aligned([_COLUMNS, *rows], [""] * (len(rows) + 1))


def explanations(points: Sequence[Point], failed: Mapping[int, int] | None = None) -> list[str]:
    """Return what grows from one size to the next although the work of a rank does not, and why.

    ``failed`` is the number of steps of a launch that failed, by its number of ranks.
    """
    lines = _split({point.size: point.steps for point in points} | dict(failed or {}))
    lines += [
        f"{_OTHER} {point.size:,} ranks: another kind of step was counted, such as one with a validation: {found}"
        for point in points
        if (found := _other_kind(points[0], point))
    ]
    for before, after in pairwise(points):
        sizes = f"{before.size:,} -> {after.size:,} ranks"
        why = f": padding of parameters with fewer rows than ranks: {after.padded}" if after.padded else ""
        former = before.bytes_by_kind
        lines += [
            f"{sizes}: bytes of {kind} +{now / former[kind] - 1:.0%}{why}"
            for kind, now in sorted(after.bytes_by_kind.items())
            if now > former[kind] * (1 + _LEAST_GROWTH) > 0
        ]
        if (after.memory_bytes or 0) > (before.memory_bytes or math.inf) * (1 - _LEAST_GROWTH):
            lines.append(f"{sizes}: peak memory stops falling{why}")
    groups = sorted({f"{row.kind} over {row.group_size}" for row in points[-1].collectives if row.group_size})
    return [*lines, f"groups at {points[-1].size:,} ranks: {', '.join(groups)}" if groups else "no groups are known"]


def scheduled(points: Sequence[Point]) -> list[str]:
    """Return a line for each size on the nominal machine, where communication hides no longer, and what hides it."""
    known = {point.size: (point.graph, play(point.graph)) for point in points if point.graph}
    if not known:
        return []
    rows = [
        (
            f"{size:,}",
            f"{schedule.overlap_ratio:.3f}",
            *(format_value(part_ms, "ms") for part_ms in exposed_ms(schedule)),
            format_value(schedule.step_ms, "ms"),
            f"{schedule.serialized} of {counted(schedule.collectives, 'collective')}",
        )
        for size, (_, schedule) in known.items()
    ]
    lines = ["on the nominal machine:", *aligned([_SCHEDULED, *rows], [""] * (len(rows) + 1))]
    schedules = [schedule for _, schedule in known.values()]
    allowed = _exposed(schedules[0]) + _MORE_EXPOSED
    beyond = {size: graph for size, (graph, schedule) in known.items() if _exposed(schedule) > allowed}
    if beyond:
        place = [*known].index(size := min(beyond))
        former, now = schedules[place - 1 : place + 1]
        lines.append(
            f"{size:,} ranks: communication hides no longer: {_exposed(now):.0%} of the step is exposed, "
            f"{_exposed(former):.0%} before; it grew most for {_grown(former, now)}"
        )
    for size, graph in beyond.items():
        works = [work for work in _WORKS if _exposed(play(_with_work(graph, work))) <= allowed]
        lines.append(
            f"{size:,} ranks: {works[0]} times the FLOPs of a rank, such as its batch, hide it again"
            if works
            else f"{size:,} ranks: not even {_WORKS[-1]} times the FLOPs of a rank hide it"
        )
    return lines


def _grown(former: Schedule, now: Schedule) -> str:
    """Return the collectives, without numbers of layers, whose exposed time grew most."""
    grown: Counter[str] = Counter()
    for sign, schedule in ((-1, former), (1, now)):
        for one in schedule.issued:
            grown[re.sub(r"\d+", "*", f"{one.name} of {one.of}" if one.of else one.name)] += sign * round(
                one.exposed_us
            )
    return grown.most_common(1)[0][0]


def _with_work(graph: StepGraph, factor: int) -> StepGraph:
    return graph.replace(nodes=[node.replace(flops=factor * node.flops) for node in graph.nodes])


def panels(points: Sequence[Point]) -> list[tuple[str, Drawing]]:
    """Return a drawing of the parts of each size's step on the nominal machine, and one of each size's streams."""
    schedules = {counted(point.size, "rank"): play(point.graph) for point in points if point.graph}
    drawn = [(name, drawing) for name, schedule in schedules.items() if (drawing := drawn_schedules([schedule]))]
    rows = [Row(name, _parts(schedule)) for name, schedule in schedules.items()]
    whole = max((drawing.end for _, drawing in drawn), default=0.0)
    return [("on the nominal machine", Drawing(rows, whole)), *drawn] if drawn else []


def _parts(schedule: Schedule) -> list[Bars]:
    within, between = exposed_ms(schedule)
    edges = pairwise(accumulate((schedule.step_ms - within - between, within, between), initial=0.0))
    return [
        Bars(kind, [span])
        for kind, span in zip((Lane.COMPUTE, IN_HOST, BETWEEN_HOSTS), edges, strict=True)
        if span[1] > span[0]
    ]


def exposed_ms(schedule: Schedule) -> tuple[float, float]:
    """Return the exposed communication of groups within a host, and of those over several hosts."""
    total_us = sum(one.exposed_us for one in schedule.issued)
    between_us = sum(one.exposed_us for one in schedule.issued if one.group_size > NOMINAL.ranks_per_host)
    between = schedule.exposed_ms * between_us / (total_us or 1)
    return schedule.exposed_ms - between, between


def _exposed(schedule: Schedule) -> float:
    return schedule.exposed_ms / schedule.step_ms


def _other_kind(first: Point, point: Point) -> str:
    """Return which operators of a step tell that it is another kind of step than that of the first size, or nothing."""
    names = sorted(first.multiplying.keys() | point.multiplying.keys())
    calls = [(name, first.multiplying.get(name, 0), point.multiplying.get(name, 0)) for name in names]
    differing = [f"{now} calls of {name}, {then} at {first.size:,}" for name, then, now in calls if then != now]
    return ", ".join(differing[:_MOST_NAMED])
