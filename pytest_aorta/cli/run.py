"""``aorta run``: launches a workload or a script, and keeps and prints the result of each trial."""

import argparse
import sys
from itertools import count
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.target import (
    add_config,
    add_drawing,
    add_ranks,
    add_shared,
    given_options,
    given_target,
    launching,
    opened,
    write_drawing,
)
from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.files import raised_as, write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.common.text import counted, emit
from pytest_aorta.plan.options import integer_from
from pytest_aorta.plan.world import ALL_DEVICES, WorldSpec
from pytest_aorta.report.timeline import drawn_schedules
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.rounds import failed_checks_text
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.applicability import not_profiled
from pytest_aorta.verdict.metrics import METRICS, format_value, measured_values

# Options of pytest that this command shares.
SHARED = ("gpus", "timeout", "workloads", "launcher", "profiler")
MAX_TRIALS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand; options of pytest have the same names."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", metavar="NAME", help="workload to launch; an unknown name's error lists all")
    what.add_argument("--script", metavar="FILE", help="training script (.py) or dotted module that records steps")
    parser.add_argument(
        "--trials", metavar="N", type=integer_from(1, MAX_TRIALS), default=1, help="separate launches (default: 1)"
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        dest="assignments",
        action="append",
        default=[],
        type="steps={}".format,
        help="measured steps, as --set steps=N",
    )
    add_ranks(parser)
    add_config(parser)
    add_drawing(parser)
    add_shared(parser, SHARED)


def run(arguments: argparse.Namespace) -> int:
    """Launch, keep and print each trial.

    Raises:
        UsageError: The command line is wrong; nothing was launched.
        SpecError: The workload or its config is wrong; nothing was launched.
        AortaError: A launch failed; earlier trials are kept.
    """
    options, trials = given_options(arguments), arguments.trials
    target = given_target(options, arguments, arguments.workload, arguments.script)
    folder, results = arguments.results / target.slug, list[WorkloadResult]()
    spec = WorldSpec(arguments.nproc or ALL_DEVICES)
    with opened(options) as session, launching(session, spec, folder / "launches", timed=True) as launcher:
        for _ in range(trials):
            results.append(target.launch(DistributedWorld(launcher)))
            written = write_trial(folder, results[-1])
            emit([f"{written}:", *(f"  {line}" for line in summary_lines(results[-1]))])
            emit([f"  {note}" for note in launcher.test.record.launches[-1].traces])
            sys.stdout.flush()
    if arguments.draw:
        drawing = drawn_schedules([group.schedule for group in results[-1].facts.schedules[:1]])
        panels = [(f"{results[-1].workload} on {results[-1].platform}", drawing)] if drawing else []
        write_drawing(arguments.draw, panels, results[-1].facts.description.graph_problem)
    failed = sum(not result.passed for result in results)
    emit([f"{counted(trials, 'trial')}: " + (f"{failed} failed by their own checks" if failed else "ok")])
    return ExitCode.PROBLEM if failed else ExitCode.OK


def summary_lines(result: WorkloadResult) -> list[str]:
    """Return lines about what a result has measured, metric by metric, and about what it has not."""
    facts = result.facts
    lines = [f"{counted(facts.num_steps, 'step')} on {result.platform}"]
    own = {name: result.metrics[name] for name in result.rank_metrics}
    for name, value in (own | measured_values([facts])).items():
        row = METRICS.get(name)
        lines.append(
            f"{name}: {format_value(value, row.unit if row else '', exact=row is not None and not row.has_noise)}"
        )
    if note := facts.description.late_steps or not_profiled(METRICS["exposed_comm_ms"], facts):
        lines.append(f"overlap: {note}")
    lines += filter(None, (facts.description.optimizers, *map(str, facts.description.replicas[:1])))
    return lines if result.passed else [*lines, *failed_checks_text(result).splitlines()]


# Values of a result over its ranks, which AORTA's files have.
_AORTA_NAMES = (
    "passed",
    "failure_count",
    "first_failure_iteration",
    "failure_details",
    "configured_iterations",
    "total_iterations",
    "executed_iterations",
    "main_work_started",
    "elapsed_sec",
    "step_times_ms",
    "metrics",
    "weight_hashes",
    "loss",
    "grad_norm",
    "environment",
)


def write_trial(folder: Path, result: WorkloadResult) -> Path:
    """Write a result, with the values that AORTA's files have, under the next free number and return its file.

    Raises:
        ResultError: The file can't be written.
    """
    path = folder / "trial_0.json"
    with raised_as(ResultError, f"{path}: can't be written: "):
        folder.mkdir(parents=True, exist_ok=True)
        names = (folder / f"trial_{number}.json" for number in count())
        path = next(name for name in names if not name.exists())
        write_json(path, to_builtins(result) | {name: to_builtins(getattr(result, name)) for name in _AORTA_NAMES})
    return path
