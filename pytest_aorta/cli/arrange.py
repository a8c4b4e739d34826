"""``aorta arrange``: compares the gradients of a script with those of the same samples, arranged otherwise."""

import argparse
import shlex
from contextlib import closing

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.target import ScriptTarget, add_results, add_shared, given_options
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.text import emit
from pytest_aorta.launch.guarded import require_torch
from pytest_aorta.launch.watch import SpokenState
from pytest_aorta.plan.options import LauncherKind, integer_from
from pytest_aorta.plan.world import ALL_DEVICES, MAX_WORLD_SIZE, WorldSpec, resolve_world
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.session.session import Session, TestSpec

OWNER = "aorta arrange"
SHARED = ("gpus", "timeout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.usage = "aorta arrange [options] SCRIPT [-- ARG ...]"
    parser.add_argument("script", metavar="SCRIPT", help="training script (.py) or dotted module")
    parser.add_argument("--batch-arg", metavar="NAME", help="the script's argument for the batch of a rank")
    parser.add_argument("--accumulate-arg", metavar="NAME", help="its argument for the number of accumulated batches")
    parser.add_argument(
        "--other",
        metavar="ARGS",
        action="append",
        default=[],
        type=shlex.split,
        help="further arguments of an arrangement with the same samples, such as --other='--tp 2'; may be repeated",
    )
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=integer_from(2, MAX_WORLD_SIZE),
        help="ranks (default: the GPUs of this run, or 2 CPU ranks)",
    )
    add_results(parser)
    add_shared(parser, SHARED)
    parser.epilog = "After -- come arguments of the script."
    parser.set_defaults(run=run, args=())


def run(arguments: argparse.Namespace) -> int:
    """Launch each arrangement, and print what was compared.

    Raises:
        SpecError: An argument is not allowed.
        AortaError: A launch failed, or gradients differ.
    """
    options = given_options(arguments, launcher=LauncherKind.FORKSERVER)
    script, args = arguments.script, arguments.args
    folder = (arguments.results / ScriptTarget(script, args).slug / "launches").absolute()
    spec = TestSpec(WorldSpec(ALL_DEVICES if arguments.nproc is None else arguments.nproc))
    require_torch()
    with closing(Session(options, line=SpokenState())) as session, terminable():
        world = resolve_world(spec.world, options, session.devices)
        with session.launcher(world, spec, RunningTest(OWNER), folder, timed=False) as launcher:
            found = WorkloadRunner(launcher).compare_arrangements(
                script,
                args,
                batch_arg=arguments.batch_arg,
                accumulate_arg=arguments.accumulate_arg,
                others=arguments.other,
            )
    for verdicts in found:
        emit([verdicts.case.rpartition("::")[2], *(f"  {row.metric}: {row.detail}" for row in verdicts.rows)])
    return ExitCode.OK
