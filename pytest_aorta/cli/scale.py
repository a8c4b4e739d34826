"""``aorta scale``: shows how the costs of a step on one rank grow with the number of ranks, in simulated worlds.

The step's graph of streams is played on the nominal machine too: on how many ranks communication hides no longer.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.target import (
    ScriptTarget,
    WorkloadTarget,
    add_config,
    add_drawing,
    add_shared,
    given_options,
    given_target,
    launching,
    opened,
    write_drawing,
)
from pytest_aorta.common.errors import ResultError, UsageError
from pytest_aorta.common.text import counted, emit, table
from pytest_aorta.plan.options import LauncherKind, Options, integer_from
from pytest_aorta.plan.reference import check_reference
from pytest_aorta.plan.world import MAX_WORLD_SIZE, WorldSpec
from pytest_aorta.report.timeline import BETWEEN_HOSTS, IN_HOST, Bars, Drawing, Row, drawn_schedules
from pytest_aorta.result.measurements import PADDED, WorkloadResult
from pytest_aorta.result.trace.overlap import Lane
from pytest_aorta.result.trace.profiled_steps import Cost
from pytest_aorta.result.trace.schedule import NOMINAL, Schedule, play
from pytest_aorta.result.trace.step_graph import StepGraph
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import format_value

SHARED = ("timeout", "workloads", "ab")
_COLUMNS = ("ranks", "collectives", "bytes", "operators", "FLOPs", "peak memory")
# A change of less than this is no growth.
_LEAST_GROWTH = 0.01
_SCHEDULED = ("ranks", "overlap", "exposed in a host", "between hosts", "step", "nothing to hide under")
# Communication hides no longer where this much more of the step is exposed than on the fewest ranks.
_MORE_EXPOSED = 0.05
# Multiples of a rank's FLOPs that are tried.
_WORKS = (2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand; those of ``aorta run`` have the same names."""
    parser.usage = "aorta scale [options] WORKLOAD|SCRIPT [-- ARG ...]"
    parser.add_argument("target", metavar="WORKLOAD|SCRIPT", help="a workload, or a training script (.py)")
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
    options, word = given_options(arguments, launcher=LauncherKind.FORKSERVER), arguments.target
    if options.ab:
        check_reference(options.ab, options.rootdir)
    workload, script = (None, word) if "." in word else (word, None)
    target = given_target(options, arguments, workload, script)
    kept = dict[str, list[WorkloadResult]]()
    try:
        for result in _launched(target, options, arguments):
            cells(result)  # raises before a result without costs is kept
            kept.setdefault(result.facts.provenance.side, []).append(result)
    finally:
        for side, results in kept.items():
            emit([*filter(None, [side and f"at {side}"]), *_tables(results)])
    if arguments.draw:
        write_drawing(arguments.draw, panels(_graphs(kept[""])))
    return ExitCode.OK


def _launched(
    target: WorkloadTarget | ScriptTarget, options: Options, arguments: argparse.Namespace
) -> Iterator[WorkloadResult]:
    """Launch a workload or a script at each size, and at the side of ``--aorta-ab``."""
    with opened(options) as session:
        for size in arguments.sizes:
            spec, folder = WorldSpec(size, simulated=(arguments.rank,)), arguments.results / target.slug / f"x{size}"
            with launching(session, spec, folder, timed=False) as launcher:
                world = DistributedWorld(launcher)
                yield (result := target.launch(world))
                if options.ab:
                    yield world.again(result, reference=True)


def _tables(results: Sequence[WorkloadResult]) -> list[str]:
    """Return the costs of each size and what explains them, then the schedules."""
    rows = [_COLUMNS, *map(cells, results)]
    grown = [line for pair in pairwise(results) for line in growth(*pair)]
    return [*table(rows), *grown, *scheduled(_graphs(results))]


def _graphs(results: Sequence[WorkloadResult]) -> dict[int, StepGraph]:
    """Return the graph of streams of each size that recorded one with a collective."""
    known = {one.world_size: one.costs[0].graph for one in results if one.facts.schedules and one.costs[0]}
    return {size: graph for size, graph in known.items() if graph}


def cells(result: WorkloadResult) -> tuple[str, ...]:
    """Return the costs of a step on the one simulated rank of a result, as a row of the table.

    Raises:
        ResultError: They were not counted.
    """
    costs = result.costs[0]
    if costs is None or costs.problem:
        problem = costs.problem if costs else "no step was recorded"
        raise ResultError(
            f"{result.workload} on {counted(result.world_size, 'rank')}: no costs were counted: {problem}"
        )
    sums = {cost: sum((costs.counts(cost) or {}).values()) for cost in Cost}
    return (
        f"{result.world_size:,}",
        f"{sums[Cost.COLLECTIVES]:,}",
        format_value(float(sums[Cost.COLLECTIVE_BYTES]), "B"),
        f"{sums[Cost.OPERATORS]:,}",
        f"{sums[Cost.FLOPS]:,}",
        format_value(result.metrics.get("peak_memory_bytes"), "B"),
    )


def growth(before: WorkloadResult, after: WorkloadResult) -> Iterator[str]:
    """Yield what grows from one size to the next although the work of a rank does not, and why."""
    sizes = f"{before.world_size:,} -> {after.world_size:,} ranks"
    (former, few), (now, many) = ((_bytes_by_kind(result), _num_steps(result)) for result in (before, after))
    if many < few:
        yield f"{sizes}: {counted(few, 'step')} -> {many}: the data are split; give the script a number of steps"
    padded = after.environment.get(PADDED)
    why = f": padding of parameters with fewer rows than ranks: {padded}" if padded else ""
    for kind, total in sorted(now.items()):
        if total > former[kind] * (1 + _LEAST_GROWTH) > 0:
            yield f"{sizes}: bytes of {kind} +{total / former[kind] - 1:.0%}{why}"


def _bytes_by_kind(result: WorkloadResult) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in result.costs[0].collectives if result.costs[0] else ():
        found[str(row.kind)] += row.bytes or 0
    return found


def _num_steps(result: WorkloadResult) -> int:
    return max((series.num_steps for series in result.ranks[0].series), default=result.total_iterations)


def scheduled(graphs: Mapping[int, StepGraph]) -> list[str]:
    """Return a line for each size on the nominal machine, where communication hides no longer, and what hides it."""
    known = {size: (graph, play(graph)) for size, graph in graphs.items()}
    if not known:
        return ["no graph of streams with a collective was recorded, so overlap is not scheduled"]
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
    lines = ["on the nominal machine:", *table([_SCHEDULED, *rows])]
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
            name = re.sub(r"\d+", "*", f"{one.name} of {one.of}" if one.of else one.name)
            grown[name] += sign * round(one.exposed_us)
    return grown.most_common(1)[0][0]


def _with_work(graph: StepGraph, factor: int) -> StepGraph:
    return graph.replace(nodes=[node.replace(flops=factor * node.flops) for node in graph.nodes])


def panels(graphs: Mapping[int, StepGraph]) -> list[tuple[str, Drawing]]:
    """Return a drawing of the parts of each size's step on the nominal machine, and one of each size's streams."""
    schedules = {counted(size, "rank"): play(graph) for size, graph in graphs.items()}
    drawn = [(name, drawing) for name, schedule in schedules.items() if (drawing := drawn_schedules([schedule]))]
    rows = [Row(name, _parts(schedule)) for name, schedule in schedules.items()]
    whole = max((drawing.end for _, drawing in drawn), default=0.0)
    return [("on the nominal machine", Drawing(rows, whole)), *drawn] if drawn else []


def _parts(schedule: Schedule) -> list[Bars]:
    within, between = exposed_ms(schedule)
    edges = pairwise(accumulate((schedule.step_ms - within - between, within, between), initial=0.0))
    kinds = (Lane.COMPUTE, IN_HOST, BETWEEN_HOSTS)
    return [Bars(kind, [span]) for kind, span in zip(kinds, edges, strict=True) if span[1] > span[0]]


def exposed_ms(schedule: Schedule) -> tuple[float, float]:
    """Return the exposed communication of groups within a host, and of those over several hosts."""
    total_us = sum(one.exposed_us for one in schedule.issued)
    between_us = sum(one.exposed_us for one in schedule.issued if one.group_size > NOMINAL.ranks_per_host)
    between = schedule.exposed_ms * between_us / (total_us or 1)
    return schedule.exposed_ms - between, between


def _exposed(schedule: Schedule) -> float:
    return schedule.exposed_ms / schedule.step_ms
