"""``aorta init``: launches a script twice, and writes a test that fits what it measured, with settings of pytest."""

import argparse
import os
import re
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.init_launches import settled
from pytest_aorta.cli.init_markers import Fit, fitted
from pytest_aorta.cli.init_restart import restart_of
from pytest_aorta.cli.target import ScriptTarget, add_ranks, add_shared, given_options, launching, opened
from pytest_aorta.common.errors import AortaError, SpecError, UsageError
from pytest_aorta.common.files import raised_as, write_text
from pytest_aorta.common.text import emit
from pytest_aorta.launch.work_folder import files_of
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.reference import git
from pytest_aorta.plan.world import WorldSpec
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.session.world import DistributedWorld

# Options of pytest that this command shares.
SHARED = ("gpus", "timeout")
_RESULTS = Path("results")
_INI = """\
[pytest]
# Ranks are forked from a process that has torch imported, which saves seconds in each launch.
aorta_launcher = forkserver
# Plan, logs and result of each launch.
aorta_results = results
# A test whose marker names a metric fails if the launches do not decide it.
aorta_fail_on = missing,marked-inconclusive
"""
_TEST = '''\
"""Runs {shown} and compares it with the baseline."""

import pytest


{markers}
def test_{name}(workload):
{notes}    result = workload.{call}
    workload.check(result)
'''
_ARRANGED = """

@pytest.mark.numerics
@pytest.mark.world(size={size})
def test_{name}_arranged_otherwise(workload):
{note}    workload.compare_arrangements({words})
"""
_RESTART = """

@pytest.mark.numerics
@pytest.mark.world(size={size})
def test_{name}_restart(workload):
{notes}    workload.compare_restart({call})
"""
# Names of arguments that set the batch of a rank, and how many batches it accumulates.
_BATCH, _ACCUMULATED = re.compile(r"-+[\w-]*(batch|bs)[\w-]*"), re.compile(r"-+[\w-]*accum[\w-]*")
# Files that pytest reads its settings from, in its order; files of many tools have a section for them.
_SETTINGS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_SECTION = re.compile(r"^\[(tool[.:])?pytest[].]", re.MULTILINE)
_WORLD_SIZE = 2
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.usage = "aorta init [--nproc N] SCRIPT [-- ARG ...], or aorta init [--nproc N] -- COMMAND ..."
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="training script (.py) or dotted module to test")
    add_ranks(parser, default=f"{_WORLD_SIZE}, or 1 on a machine with one GPU")
    add_shared(parser, SHARED)


def run(arguments: argparse.Namespace) -> int:
    """Launch the script, write the files and lines that do not exist yet, and print what was written and why.

    Returns:
        0, or 1 if the test would compare nothing.

    Raises:
        UsageError: Nothing to launch is named, or the test exists.
        AortaError: The script fails, a file can't be written, or a driver does not list the GPUs; then nothing was
            written.
    """
    if not (arguments.script or arguments.args):
        raise UsageError("SCRIPT: none is given; give a script (.py), a dotted module, or a command after --")
    target = ScriptTarget(arguments.script, arguments.args)
    test = Path(f"test_{target.slug}.py")
    if os.path.lexists(test):
        raise UsageError(f"{test}: exists and is not overwritten; move it, or change it by hand")
    options = given_options(arguments, launcher=LauncherKind.FORKSERVER, results=_RESULTS)
    with opened(options) as session:
        spec = WorldSpec(arguments.nproc or min(_WORLD_SIZE, len(session.devices) or _WORLD_SIZE))
        with launching(session, spec, options.rootdir / _RESULTS / "aorta-init", timed=True) as launcher:
            launch = partial(target.launch, DistributedWorld(launcher))
            pair = settled(launch, lambda: files_of(Path.cwd(), [str(_RESULTS)]), _untracked())
            fit = fitted(pair, launcher.world)
            runner = WorkloadRunner(launcher)
            arranged, found = _arranged(target, runner, pair.settings.get("fresh"))
            restart = restart_of(runner, target, pair)
    with raised_as(AortaError, f"{_RESULTS}: can't be written: "):
        write_text(_RESULTS / ".gitignore", "*\n")  # baselines are committed, results are not
    with raised_as(AortaError, f"{test}: can't be written: "), test.open("x", encoding="utf-8") as new:
        new.write(_text(target, pair.settings, fit) + arranged)
        if restart.call:
            new.write(
                _RESTART.format(size=spec.size, name=target.slug, notes=_comment(restart.note), call=restart.call)
            )
    emit(
        [f"wrote {test}", _write_settings(), *(f"note: {note}" for note in (*fit.notes, *found, restart.note) if note)]
    )
    if not fit.compares:
        return ExitCode.PROBLEM
    emit(
        [
            f"next: record the baseline with pytest --update-baselines {test}, then commit it",
            f"then: aorta selftest {test} plants faults, and shows which ones the test finds",
        ]
    )
    return ExitCode.OK


def _text(target: ScriptTarget, settings: Mapping[str, Any], fit: Fit) -> str:
    """Return the test as Python."""
    args = [*target.args]
    method, given = ("script", [target.script, *([args] if args else [])]) if target.script else ("command", [args])
    words = [*map(repr, given), *(f"{key}={value!r}" for key, value in settings.items())]
    shown = target.script or " ".join(args)
    return _TEST.format(
        shown=repr(shown)[1:-1].replace('"', r"\""),
        markers="\n".join(f"@pytest.mark.{marker}" for marker in fit.markers),
        name=target.slug,
        notes="".join(map(_comment, fit.notes)),
        call=f"run_{method}({', '.join(words)})",
    )


def _arranged(target: ScriptTarget, runner: WorkloadRunner, fresh: list[str] | None) -> tuple[str, list[str]]:
    """Return the test of other arrangements of the same samples, if they compute the same, and what was found."""
    names = re.findall(r"(?:^|\s)(-[\w-]+)[=\s]\d+(?!\S)", " ".join(target.args))
    accumulate = next(filter(_ACCUMULATED.fullmatch, names), None)
    batch = next((name for name in names if _BATCH.fullmatch(name) and name != accumulate), None)
    if target.script is None or batch is None or runner.size == 1:
        return "", []
    args, given = [*target.args], {"batch_arg": batch, "accumulate_arg": accumulate, "fresh": fresh}
    keywords: dict[str, Any] = {name: value for name, value in given.items() if value}
    try:
        first = runner.compare_arrangements(target.script, args, **keywords)[0]
    except AortaError as error:
        why = str(error).partition("\n")[0]
        return "", [f"the script arranged otherwise was not found to compute the same, see aorta arrange: {why}"]
    details = [row.detail for row in first.rows if row.metric in ("samples", "gradients")]
    note = f"arranged otherwise, the script computes the same: {'; '.join(details)}"
    words = ", ".join([repr(target.script), repr(args), *(f"{name}={value!r}" for name, value in keywords.items())])
    return _ARRANGED.format(size=runner.size, name=target.slug, note=_comment(note), words=words), [note]


def _comment(note: str) -> str:
    """Return a note as a comment of one or more lines, in a function."""
    return (
        textwrap.fill(
            # The name of a metric keeps its letters.
            note if "_" in note.split()[0] else note[:1].upper() + note[1:],
            _WIDTH,
            initial_indent="    # ",
            subsequent_indent="    # ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def _untracked() -> set[str]:
    """Return the files below this folder that git does not track, ignored ones too; none without a repository."""
    try:
        return {*git(Path.cwd(), "ls-files", "-z", "--others").split("\0")}
    except SpecError:
        return set()


def _write_settings() -> str:
    """Write ``pytest.ini``, which would hide settings of pytest in another file, and return a line about it."""
    found = filter(Path.is_file, map(Path, _SETTINGS))
    if kept := next(
        (file for file in found if "pytest" in file.stem or _SECTION.search(file.read_text("utf-8", "replace"))), None
    ):
        return (
            f"kept {kept}, where pytest reads its settings: aorta_launcher (forkserver) starts ranks faster there, "
            "aorta_results (results) keeps logs, aorta_fail_on (missing,marked-inconclusive) fails undecided tests"
        )
    with raised_as(AortaError, "pytest.ini: can't be written: "):
        write_text(Path("pytest.ini"), _INI)
    return "wrote pytest.ini"
