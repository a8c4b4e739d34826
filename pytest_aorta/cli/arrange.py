"""``aorta arrange``: compares the gradients of a script with those of the same samples, arranged otherwise."""

import argparse

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.target import ScriptTarget, add_ranks, add_results, add_shared, given_options, launching, opened
from pytest_aorta.common.text import emit
from pytest_aorta.plan.options import LauncherKind, shell_words
from pytest_aorta.plan.world import ALL_DEVICES, WorldSpec
from pytest_aorta.session.runner import WorkloadRunner

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
        type=shell_words,
        help="further arguments of an arrangement with the same samples, such as --other='--tp 2'; may be repeated",
    )
    parser.add_argument(
        "--fresh",
        metavar="PATH",
        action="append",
        default=[],
        help="what earlier runs have written here, such as a checkpoint, and launches must not find; may be repeated",
    )
    add_ranks(parser, least=2)
    add_results(parser)
    add_shared(parser, SHARED)


def run(arguments: argparse.Namespace) -> int:
    """Launch each arrangement, and print what was compared.

    Raises:
        SpecError: An argument is not allowed.
        AortaError: A launch failed, or gradients differ.
    """
    options = given_options(arguments, launcher=LauncherKind.FORKSERVER)
    script, args = arguments.script, arguments.args
    folder = arguments.results / ScriptTarget(script, args).slug / "launches"
    with (
        opened(options) as session,
        launching(session, WorldSpec(arguments.nproc or ALL_DEVICES), folder, timed=False) as launcher,
    ):
        found = WorkloadRunner(launcher).compare_arrangements(
            script,
            args,
            batch_arg=arguments.batch_arg,
            accumulate_arg=arguments.accumulate_arg,
            others=arguments.other,
            fresh=arguments.fresh,
        )
    for verdicts in found:
        emit([verdicts.case.rpartition("::")[2], *(f"  {row.metric}: {row.detail}" for row in verdicts.rows)])
    return ExitCode.OK
