"""``aorta init``: launches a script twice, and writes a test that fits what it measured, with settings of pytest."""

import argparse
import math
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.run import add_shared, given_options
from pytest_aorta.common.errors import AortaError, DevicesUnavailable, LaunchError, ResultError, SpecError, UsageError
from pytest_aorta.common.files import raised_as, read_regular, write_text
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.text import counted, did_you_mean, emit
from pytest_aorta.launch.guarded import require_torch
from pytest_aorta.launch.launchers import RankLauncher, make_launcher
from pytest_aorta.launch.watch import SpokenState
from pytest_aorta.launch.work_folder import changed, files_of, outermost, reads
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind, Options, integer_from
from pytest_aorta.plan.reference import git
from pytest_aorta.plan.workloads import pinned_cpu_kernels
from pytest_aorta.plan.world import MAX_WORLD_SIZE, WorldSpec, resolve_world
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.series import first_other_weights
from pytest_aorta.session.launcher import Session, TestSpec
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.bitwise import first_difference, locate_first
from pytest_aorta.verdict.by_rank import uncompared_notes
from pytest_aorta.verdict.metrics import METRICS, Value
from pytest_aorta.verdict.statistics.decision import CONFIDENCE, quantile_t
from pytest_aorta.verdict.statistics.variance import own_variance

# The name of the lease's holder, which tests that wait for the lease report.
OWNER = "aorta init"
# Options of pytest that this command shares.
SHARED = ("gpus", "timeout")
# Folders that runs write to; baselines are committed.
_IGNORED = ("results/",)
_RESULTS = Path("results")
_MAX_IGNORED_BYTES = 1 << 20
# What Python and its packages read by themselves: sources, extension modules, and the metadata of packages.
_SOURCES = tuple(all_suffixes())
_METADATA = re.compile(r"\.(egg|dist)-info/")
# Launches that try what a script does without a file.
_MOST_TRIALS = 4
_INI = """\
[pytest]
# Ranks are forked from a process that has torch imported, which saves seconds in each launch.
aorta_launcher = forkserver
# Plan, logs and result of each launch.
aorta_results = results
# A test whose marker names a metric fails if the launches do not decide it.
aorta_fail_on = missing,marked-inconclusive
"""
_NOT_COLLECTED = """\
# The script has the name of a test, and pytest would run it while it collects tests.
addopts = --ignore={script}
"""
_BUILT_IN_TEST = '''\
"""Trains a small Llama under FSDP2 and compares it with the baseline."""

import pytest


{markers}
def test_training(workload):
    result = workload.run("llama_fsdp2", size="debug", steps=10)
    workload.check(result)
'''
_SCRIPT_TEST = '''\
"""Runs {shown} and compares it with the baseline."""

import pytest


{markers}
def test_{name}(workload):
{notes}    result = workload.{call}
    workload.check(result)
'''
# Files with settings of pytest, in its order -> the beginning of their section's first line.
_SETTINGS = {
    **dict.fromkeys(("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"), ""),
    "pyproject.toml": "[tool.pytest",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
}
# Folders that contain packages, from the root.
_TOPS = (".", "src")
# Names that pytest collects by default, without the part that makes it so.
_COLLECTED = re.compile(r"^test_(?P<before>.+)$|^(?P<after>.+)_test$")
# The lanes of docs/ci.md: bits are compared on any machine, times only on GPUs.
_CPU_LANE, _GPU_LANE = "numerics", "overlap"
_WORLD_SIZE = 2
# The first of these metrics that launches can decide is marked, with the least of these tolerances.
_TIMES = ("kernel_ms", "step_time_p50")
_TOLERANCES = (0.02, 0.05, 0.1, 0.2)
_WIDTH = 100
_BARE = (
    "nothing is compared, so the test fails: have the script call recorder.start(warmup=2), recorder.step() and "
    "recorder.weights(model), with pytest_aorta.worker.recorder"
)
_PINNED = (
    "printed losses may differ from plain torchrun's in their last digits: launches that compare bits pin the kernels "
    "of the CPU, for equal bits on other CPUs"
)
_NO_WEIGHTS = "the launches recorded no weights, as by recorder.weights(model)"
# Two launches of the same code, or why they failed.
_Pair: TypeAlias = "tuple[WorkloadResult | AortaError, WorkloadResult | AortaError]"


@dataclass(frozen=True)
class _Target:
    """Launch of a test.

    Attributes:
        script: The script, a module, or empty for a command that starts its own ranks.
        args: The arguments, or the words of the command.
        shown: Its name in a docstring.
        name: The name of its test, after ``test_``.
        other_name: The name of its test if another test has that name.
        collected: The script's path if pytest would collect it as a test, else empty.
    """

    script: str
    args: tuple[str, ...]
    shown: str
    name: str
    other_name: str
    collected: str = ""

    def call(self, settings: Mapping[str, Any]) -> str:
        """Return the call that launches it, as Python."""
        given = [*([repr(self.script)] if self.script else []), *([repr(list(self.args))] if self.args else [])]
        words = ", ".join([*given, *(f"{key}={value!r}" for key, value in settings.items())])
        return f"run_{'script' if self.script else 'command'}({words})"

    def launch(self, world: DistributedWorld, settings: Mapping[str, Any]) -> WorkloadResult:
        """Launch it once."""
        if not self.script:
            return world.run_command(self.args, **settings)
        return world.run_script(self.script, self.args, **settings)


@dataclass(frozen=True)
class _Findings:
    """Findings of two launches.

    Attributes:
        settings: Arguments of the test's launches.
        markers: Markers of the test.
        notes: Lines that say why the test is as it is.
    """

    settings: Mapping[str, Any]
    markers: Sequence[str]
    notes: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.usage = "aorta init [--nproc N] [SCRIPT | -m MODULE] [-- ARG ...], or aorta init [--nproc N] -- COMMAND ..."
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="training script (.py) to test")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="module to test, which may be installed")
    parser.add_argument("args", nargs="*", metavar="ARG", help="arguments of the script in the test, after --")
    parser.add_argument(
        "--nproc", metavar="N", type=integer_from(1, MAX_WORLD_SIZE),
        help=f"ranks of the test (default: {_WORLD_SIZE}, or 1 on a machine with one GPU)",
    )  # fmt: skip
    add_shared(parser, SHARED)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Launch the script, write the files and lines that do not exist yet, and print what was written and why.

    Returns:
        0, or 1 if the test would compare nothing.

    Raises:
        UsageError: The script does not exist in this folder.
        AortaError: The script fails, a file can't be written, or a driver does not list the GPUs; then nothing was
            written.
    """
    root = Path.cwd()
    options = given_options(arguments, launcher=LauncherKind.FORKSERVER, results=_RESULTS)
    settings = _settings_of_pytest(root)
    tests = root / "tests" if (root / "tests").is_dir() else root
    target, notes = _target(root, arguments), []
    if target is None:
        on_gpus = options.gpus != 0 and bool(visible_devices())
        markers = (_GPU_LANE if on_gpus else _CPU_LANE, _world_marker(arguments.nproc or _WORLD_SIZE))
        path, text = tests / "test_training.py", _BUILT_IN_TEST.format(markers=_decorators(markers))
    else:
        found = _measured(options, target, arguments.nproc)
        path, text = _test(tests, target, found)
        notes = [f"note: {note}" for note in found.notes]
    ignored = _write_ignored(root)
    emit([_written(root, path, text), _write_settings(root, settings, target), ignored, *notes])
    if f"note: {_BARE}" in notes:
        return ExitCode.PROBLEM
    test = path.relative_to(root)
    record = f"next: record the baseline with pytest --update-baselines {test}, then commit it"
    emit([record, f"then: aorta selftest {test} plants faults, and shows which ones the test finds"])
    return ExitCode.OK


def _target(root: Path, arguments: argparse.Namespace) -> _Target | None:
    """Return what the command line names; None for the built-in workload.

    Raises:
        UsageError: There is no such script.
    """
    if arguments.module is not None:
        # argparse takes the first argument of a module for the script.
        given = [arguments.script, *arguments.args] if arguments.script is not None else []
        if not all(part.isidentifier() for part in arguments.module.split(".")):
            raise UsageError(f"-m: got {arguments.module!r}, allowed is a dotted module")
        name = arguments.module.removesuffix(".__main__").replace(".", "_")
        return _Target(arguments.module, tuple(given), arguments.module, name, name)
    if arguments.script is None:
        return None
    words = list(arguments.command_line)
    if "--" in words and arguments.script not in words[: words.index("--")]:
        command = (arguments.script, *arguments.args)
        name = next((Path(word).stem for word in command if word.endswith(".py")), Path(command[0]).name)
        name = re.sub(r"\W", "_", name.removeprefix("test_"))
        return _Target("", command, " ".join(map(_in_docstring, command)), name, f"{name}_by_{Path(command[0]).stem}")
    relative = _find(root, arguments.script).relative_to(root.resolve())
    module = _module(root, relative)
    collected = _COLLECTED.match(relative.stem)
    # A test with the script's own name would be in the script's place.
    stem = f"{collected['before'] or collected['after']}_script" if collected else relative.stem
    named, longer = (re.sub(r"\W", "_", name) for name in (stem, "_".join([*relative.parts[:-1], stem])))
    own = str(relative) if collected else ""
    return _Target(module or str(relative), tuple(arguments.args), _in_docstring(relative), named, longer, own)


def _find(root: Path, given: str) -> Path:
    """Return the absolute path of a script.

    Raises:
        UsageError: There is no such file in ``root`` or below it.
    """
    path = (root / given).resolve()
    if path.suffix == ".py" and not path.exists():
        similar = did_you_mean([path.name], sorted(found.name for found in path.parent.glob("*.py")))
        raise UsageError(f"script {given!r}: there is no file {path}{similar}")
    if path.suffix != ".py" or not path.is_file() or not path.is_relative_to(root.resolve()):
        raise UsageError(f"SCRIPT: got {given!r}, allowed is a .py file in this folder or below it; -m names a module")
    return path


def _module(root: Path, script: Path) -> str | None:
    """Return the module that a script below ``root`` is; None for a script outside of packages."""
    top = script.parent
    while top != Path() and (root / top / "__init__.py").is_file():
        top = top.parent
    parts = script.relative_to(top).with_suffix("").parts
    is_module = str(top) in _TOPS and len(parts) > 1 and all(part.isidentifier() for part in parts)
    return ".".join(parts) if is_module else None


def _measured(options: Options, target: _Target, given_size: int | None) -> _Findings:
    """Launch the script, as often as it takes to see what of it can be compared.

    Raises:
        AortaError: A launch failed.
    """
    watch = _Watch(options.rootdir)
    with closing(Session(options, watch.make_launcher, line=SpokenState())) as session, terminable():
        size = given_size or min(_WORLD_SIZE, len(session.devices) or _WORLD_SIZE)
        with raised_as(UsageError, "--nproc, --gpus: ", DevicesUnavailable):
            world = resolve_world(WorldSpec(size), options, session.devices)
        require_torch()
        folder = options.rootdir / _RESULTS / OWNER.replace(" ", "-")
        with session.launcher(world, TestSpec(WorldSpec(size)), RunningTest(OWNER), folder, timed=True) as launcher:
            return _Trial(target, DistributedWorld(launcher), watch).findings()


@dataclass(frozen=True)
class _Use:
    """The files that a launch has read and written, as paths from its folder, without tracked files and sources."""

    read: Collection[str]
    written: Sequence[str]


class _Watch:
    """The files of a folder, and the files that each launch in it, or in a copy of it, has read and written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uses: list[_Use] = []
        self.before = self.files(root)
        self.known = {name for name in self.before if name.endswith(_SOURCES)}
        with suppress(SpecError):  # no repository
            self.known.update(git(root, "ls-files", "-z", "--recurse-submodules").split("\0"))

    def files(self, folder: Path) -> dict[str, tuple[int, int]]:
        return files_of(folder, [str(_RESULTS)])

    def make_launcher(self, kind: LauncherKind) -> RankLauncher:
        return _WatchedLauncher(make_launcher(kind), self)


@dataclass(frozen=True)
class _WatchedLauncher:
    """A launcher that notes which files each launch uses."""

    launcher: RankLauncher
    watch: _Watch

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        before = self.watch.files(plan.folder)
        # Checkpoints are newer than data, and not every file may be watched.
        newest = sorted(before.keys() - self.watch.known, key=lambda name: before[name][1], reverse=True)
        with reads(plan.folder, [name for name in newest if not _METADATA.search(name)]) as read:
            outcome = self.launcher.launch(plan)
        self.watch.uses.append(_Use(read, changed(before, self.watch.files(plan.folder))))
        return outcome

    def close(self) -> None:
        self.launcher.close()


class _Trial:
    """The launches of a script, and what they show.

    A script that resumes from a checkpoint, or appends to a file, computes something else in its second launch, or in
    a clean clone. If it reads what it has written, the test launches it in copies of the folder that lack these files.
    """

    def __init__(self, target: _Target, world: DistributedWorld, watch: _Watch) -> None:
        self._target = target
        self._world = world
        self._watch = watch
        self._notes: list[str] = []

    def findings(self) -> _Findings:
        """Launch until it is known whether launches repeat, and return what the test should say."""
        settings, pair = self._settled([])
        fresh, lacking = self._without(settings.get("fresh", []), settings, pair)
        if fresh != settings.get("fresh", []):
            settings, pair = self._settled(fresh)
        self._notes += lacking
        if left := outermost(changed(self._watch.before, self._watch.files(self._watch.root)), self._watch.before):
            self._notes.append(f"these launches left {', '.join(left)} in this folder")
        return self._fitted(settings, *pair)

    def _settled(self, fresh: Sequence[str]) -> tuple[dict[str, Any], _Pair]:
        """Return the settings under which two launches repeat, if they do under any, and both launches.

        ``fresh`` are files of the script that earlier runs have left.
        """
        settings: dict[str, Any] = {"record": {"hash_weights": True}} | ({"fresh": [*fresh]} if fresh else {})
        self._notes = [_copied(fresh)] if fresh else []
        begun = len(self._watch.uses)
        first = self._tried(settings)
        if isinstance(first, AortaError):
            return settings, (first, first)
        pair: _Pair = first, self._tried(settings)
        varies = _varies(*pair)
        uses = self._watch.uses[begun:]
        written = [name for use in uses for name in use.written]
        carried = written if varies else [name for name in written if any(name in use.read for use in uses)]
        if varies != _NO_WEIGHTS and carried and not fresh:
            own = sorted(outermost(carried, self._watch.before))
            copied = settings | {"fresh": own}
            again = self._tried(copied), self._tried(copied)
            # A file that is written and read within each launch needs no copy.
            if varies or _varies(pair[1], again[0]):
                resumed, settings, pair = varies, copied, again
                varies = _varies(*pair)
                self._notes.append(_copied(own) + (f"; else {resumed}" if resumed and not varies else ""))
        if varies == _NO_WEIGHTS:
            self._notes.append(f"weights are not compared: {varies}")
            return settings | {"record": {}}, pair
        if not varies:
            self._notes.append("weights are compared bit by bit: two launches computed the same")
            return settings, pair
        return self._made_deterministic(settings, varies)

    def _without(self, fresh: list[str], settings: dict[str, Any], pair: _Pair) -> tuple[list[str], list[str]]:
        """Return ``fresh`` with the files that earlier runs of the script have left, and notes on others that it reads.

        A launch without such a file writes it again, and computes something else.
        """
        read = {name: None for use in self._watch.uses[-2:] for name in use.read}
        groups, notes = outermost(read, self._watch.known), []
        repeats = _varies(*pair) in ("", _NO_WEIGHTS)
        for name in groups[:_MOST_TRIALS]:
            without = self._tried(settings | {"fresh": [*fresh, name]})
            differs = _varies(pair[1], without, in_bits=repeats)
            if differs in ("", _NO_WEIGHTS):
                continue
            is_written = any(PurePath(path).is_relative_to(name) for path in self._watch.uses[-1].written)
            if is_written and not isinstance(without, AortaError):
                fresh = [*(path for path in fresh if not PurePath(path).is_relative_to(name)), name]
                notes.append(f"{name} was here before, from another run; with and without it, {differs}")
            else:
                notes.append(f"the script reads {name}, which is not tracked by git; with and without it, {differs}")
        if untried := groups[_MOST_TRIALS:]:
            notes.append(f"the script also reads {', '.join(untried)}, not tracked by git")
        return fresh, notes

    def _made_deterministic(self, settings: dict[str, Any], varies: str) -> tuple[dict[str, Any], _Pair]:
        """Return the settings and launches with seeds; without weights if launches still differ."""
        settings = settings | {"record": {"hash_weights": True, "deterministic": True}}
        pair = self._tried(settings), self._tried(settings)
        if still := _varies(*pair):
            self._notes.append(f"weights are not compared: {varies}; with seeds and deterministic algorithms: {still}")
            settings |= {"record": {}}
            return settings, (self._tried(settings), self._tried(settings))
        self._notes.append(
            f"the recorder sets seeds and torch.use_deterministic_algorithms in the test's launches, because "
            f"without them {varies}"
        )
        return settings, pair

    def _tried(self, settings: Mapping[str, Any]) -> WorkloadResult | AortaError:
        """Return the result of a launch, or why it failed, such as at the end of a training that it resumed."""
        try:
            return self._target.launch(self._world, settings)
        except (LaunchError, ResultError, SpecError) as error:
            return error

    def _fitted(
        self, settings: Mapping[str, Any], one: WorkloadResult | AortaError, other: WorkloadResult | AortaError
    ) -> _Findings:
        facts: list[LaunchFacts] = []
        for launch in (one, other):
            if isinstance(launch, AortaError):
                raise launch
            facts.append(launch.facts)
        markers = [_CPU_LANE if self._world.device == "cpu" else _GPU_LANE, _world_marker(self._world.size)]
        measured = f"measured {counted(facts[0].num_steps, 'step')} on {self._world.platform}"
        known = _known_costs(facts)
        notes = [measured, facts[0].description.optimizers, *self._notes, _of_costs(facts, known)]
        if facts[0].description.overlap_problem:
            notes.append(f"overlap is not compared: {facts[0].description.overlap_problem}")
        steps, other_steps = (launch.num_steps for launch in facts)
        if steps != other_steps:
            notes.append(
                f"a launch measured {steps} steps and the next {other_steps}, so the test fails: have the script make "
                "a fixed number of steps"
            )
        if self._world.device == "cpu":
            notes.append("step times are not compared, because those of CPU ranks are mostly noise of the machine")
            if settings["record"] and pinned_cpu_kernels():
                notes.append(_PINNED)
            if not (facts[0].weight_hashes or facts[0].series or known):
                notes.append(_BARE)
        else:
            marker, note = _of_times(facts)
            markers += [marker] if marker else []
            notes.append(note)
        return _Findings(settings, markers, [note for note in notes if note])


def _copied(fresh: Sequence[str]) -> str:
    return f"each launch runs in a copy of this folder without {', '.join(fresh)}, which the script writes"


def _varies(one: WorkloadResult | AortaError, other: WorkloadResult | AortaError, *, in_bits: bool = True) -> str:
    """Return how two launches of the same code differ; empty if they computed the same bits, or as many steps."""
    if isinstance(one, AortaError) or isinstance(other, AortaError):
        return f"a launch fails: {str(one if isinstance(one, AortaError) else other).splitlines()[0]}"
    if one.total_iterations != other.total_iterations:
        return f"one launch had {counted(one.total_iterations, 'step')}, the next {other.total_iterations}"
    if not in_bits:
        return ""
    if not one.environment.get("bitwise_reproducible", True):
        return "the script does not call torch.use_deterministic_algorithms(True)"
    last = max(map(int, one.weight_hashes), default=one.total_iterations)
    first = first_difference(one, other, last, ["loss", "grad_norm", "weight_hash"])
    if first is None:
        return "" if one.weight_hashes else _NO_WEIGHTS
    if found := first_other_weights(one.facts.series, other.facts.series):
        return f"in two launches {found}"
    located = locate_first(one, other, first, (), None, lambda _: None)
    return " ".join([f"two launches differ in step {first.step}:", *(line.strip() for line in located)])


def _known_costs(facts: Sequence[LaunchFacts]) -> dict[str, list[Value]]:
    rows = [row for row in METRICS.values() if row.cost is not None]
    values = {row.name: [row.measure(launch) for launch in facts] for row in rows}
    return {name: pair for name, pair in values.items() if None not in pair}


def _of_costs(facts: Sequence[LaunchFacts], known: Mapping[str, Sequence[Value]]) -> str:
    if not known:
        return next(iter(uncompared_notes(facts, facts, "")), "costs of a step are not compared")
    varying = [name for name, pair in known.items() if len(set(pair)) > 1]
    return f"costs of a step are compared{f', except what varies: {varying}' if varying else ''}"


def _of_times(facts: Sequence[LaunchFacts]) -> tuple[str, str]:
    """Return the marker of a tolerance that launches can decide, or none; and why.

    Time of kernels hardly depends on the host, whose delays change the times of steps from launch to launch.
    """
    notes = []
    for row in (METRICS[name] for name in _TIMES):
        values = [value for launch in facts if isinstance(value := row.measure(launch), float) and value > 0]
        if len(values) < len(facts):
            continue
        own = own_variance(list(map(math.log, values)))
        # Where a further launch is expected: two launches that are close may be so by chance.
        spread = quantile_t((1 + CONFIDENCE) / 2, own.df) * math.sqrt(own.value * (1 + 1 / len(values)))
        said = f"{row.name} of two launches differs by {100 * (max(values) / min(values) - 1):.2f}%"
        least = row.default.value or 0.0 if row.default else 0.0
        if fits := next((each for each in _TOLERANCES if each >= max(least, math.expm1(spread))), None):
            text = row.scale.text(fits)
            return f'tolerance({row.name}="{text}")', f"{row.name} is compared with a tolerance of {text}: {said}"
        notes.append(f"{said}, so a third may differ by {100 * math.expm1(spread):.0f}%")
    needed = METRICS[_TIMES[-1]].min_steps
    return "", f"times have no marker: {'; '.join(notes) or f'they need {needed} steps'}"


def _world_marker(size: int) -> str:
    return f"world(size={size})"


def _decorators(markers: Iterable[str]) -> str:
    return "\n".join(f"@pytest.mark.{marker}" for marker in markers)


def _test(tests: Path, target: _Target, found: _Findings) -> tuple[Path, str]:
    """Return the file of a test and its text; another test that has its name keeps it."""
    call = target.call(found.settings)
    path, name = tests / f"test_{target.name}.py", target.name
    if path.exists() and target.call({})[:-1] not in path.read_text(encoding="utf-8", errors="replace"):
        path, name = tests / f"test_{target.other_name}.py", target.other_name
    notes = "".join(_comment(note, "    ") for note in found.notes)
    values = {"shown": target.shown, "name": name, "call": call, "notes": notes}
    return path, _SCRIPT_TEST.format(**values, markers=_decorators(found.markers))


def _in_docstring(name: object) -> str:
    """Return a file's name as a docstring can contain it."""
    return repr(str(name))[1:-1].replace('"', r"\"")


def _comment(note: str, indent: str = "") -> str:
    """Return a note as a comment of one or more lines."""
    lines = textwrap.wrap(
        note[:1].upper() + note[1:], _WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{indent}# {line}\n" for line in lines)


def _written(root: Path, path: Path, text: str) -> str:
    """Write a file that does not exist, and return a line about it."""
    name = path.relative_to(root)
    if os.path.lexists(path):
        return f"kept {name}, which exists"
    with raised_as(AortaError, f"{name}: can't be written: "), path.open("x", encoding="utf-8") as new:
        new.write(text)
    return f"wrote {name}"


def _settings_of_pytest(root: Path) -> Path | None:
    """Return the file of this folder in which pytest finds its settings, or None."""
    for path in (root / name for name in _SETTINGS):
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if any(line.startswith(_SETTINGS[path.name]) for line in lines or [""]):
                return path
    return None


def _write_settings(root: Path, found: Path | None, target: _Target | None) -> str:
    collected = target.collected if target else ""
    if found is None:
        text = _INI + _NOT_COLLECTED.format(script=collected) * bool(collected)
        return _written(root, root / "pytest.ini", text)
    # TOML has no text without quotes.
    launcher, folder = ('"forkserver"', '"results"') if found.suffix == ".toml" else ("forkserver", "results")
    advice = {
        "aorta_launcher": f"add aorta_launcher = {launcher} there to start ranks faster",
        "aorta_results": f"add aorta_results = {folder} there to keep logs and results",
    }
    lines = found.read_text(encoding="utf-8", errors="replace").splitlines()
    lacking = [how for key, how in advice.items() if not any(line.startswith(key) for line in lines)]
    if collected:
        lacking.append(f"add --ignore={collected} to addopts, since pytest would collect the script")
    return "; ".join([f"kept {found.name}, which has settings of pytest", *lacking])


def _write_ignored(root: Path) -> str:
    """Append the output folders of runs to ``.gitignore``.

    Raises:
        AortaError: ``.gitignore`` is not a regular file, or can't be read or written.
    """
    path = root / ".gitignore"
    try:
        text = read_regular(path, _MAX_IGNORED_BYTES).decode("utf-8") if os.path.lexists(path) else ""
        missing = [name for name in _IGNORED if name not in text.splitlines()]
        if not missing:
            return "kept .gitignore, which has results/"
        begin = "" if not text or text.endswith("\n") else "\n"
        write_text(path, text + begin + "".join(f"{name}\n" for name in missing))
    except (OSError, UnicodeDecodeError) as error:
        raise AortaError(f".gitignore: can't be read or written: {error}; put a text file there") from None
    return f"{'added to' if text else 'wrote'} .gitignore: {', '.join(missing)}"
