"""``aorta scale``: shows how the costs of a step on one rank grow with the number of ranks, in simulated worlds."""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.pytest_run import run_pytest, unfinished
from pytest_aorta.cli.target import ScriptTarget, WorkloadTarget, add_config, add_shared, given_options, given_target
from pytest_aorta.common.errors import ResultError, UsageError
from pytest_aorta.common.files import create_numbered_folder, slug
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.text import aligned, counted, emit
from pytest_aorta.launch.guarded import require_torch
from pytest_aorta.launch.watch import SpokenState
from pytest_aorta.plan.options import Options, integer_from
from pytest_aorta.plan.world import MAX_WORLD_SIZE, WorldSpec, resolve_world
from pytest_aorta.result.folder import RESULT_FILE
from pytest_aorta.result.measurements import PADDED, WorkloadResult
from pytest_aorta.result.reading import read_result
from pytest_aorta.result.trace.profiled_steps import Cost
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.session import Session, TestSpec
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import format_value

OWNER = "aorta scale"
SHARED = ("timeout", "workloads")
_COLUMNS = ("ranks", "collectives", "bytes", "operators", "FLOPs", "peak memory")
# A change of less than this is no growth.
_LEAST_GROWTH = 0.01


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
    rows, lines = list[tuple[str, ...]](), list[str]()
    before: WorkloadResult | None = None
    try:
        for result in results:
            rows.append(cells(result))
            lines += growth(before, result) if before else ()
            before = result
    finally:
        if rows:
            emit([*aligned([_COLUMNS, *rows], [""] * (len(rows) + 1)), *lines])
    return ExitCode.OK


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
