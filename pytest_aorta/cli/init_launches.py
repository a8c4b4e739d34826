"""The launches by which ``aorta init`` finds out what of a script repeats, and which files it depends on."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import all_suffixes
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from pytest_aorta.cli.target import ScriptTarget
from pytest_aorta.common.errors import AortaError, LaunchError, ResultError, SpecError
from pytest_aorta.common.text import counted
from pytest_aorta.launch.launchers import RankLauncher, make_launcher
from pytest_aorta.launch.work_folder import changed, files_of, outermost, reads
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.reference import git
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.series import first_other_weights
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.bitwise import first_difference, locate_first

# What Python and its packages read by themselves: sources, extension modules, and the metadata of packages.
_SOURCES = tuple(all_suffixes())
_METADATA = (".egg-info/", ".dist-info/")
# Launches that try what a script does without a file.
_MOST_TRIALS = 4
_NO_WEIGHTS = "the launches recorded no weights, as by recorder.weights(model)"
# A launch, or why it failed.
Launched: TypeAlias = WorkloadResult | AortaError


@dataclass(frozen=True)
class Pair:
    """Two launches of the same code with the same settings.

    Attributes:
        settings: Keywords of the launches.
        one, other: The launches.
        varies: How they differ; empty if they computed the same bits.
    """

    settings: Mapping[str, Any]
    one: Launched
    other: Launched
    varies: str

    @property
    def repeats(self) -> bool:
        """Return whether weights were recorded, and were the same."""
        return not self.varies and isinstance(self.one, WorkloadResult) and bool(self.one.weight_hashes)

    def results(self) -> list[WorkloadResult]:
        """Return the results of both launches.

        Raises:
            AortaError: A launch failed.
        """
        found = []
        for launch in (self.one, self.other):
            if isinstance(launch, AortaError):
                raise launch
            found.append(launch)
        return found


@dataclass(frozen=True)
class _Use:
    """The files that a launch has read and written, as paths from its folder, without tracked files and sources."""

    read: Collection[str]
    written: Sequence[str]


class Watch:
    """The launchers of a session that notes which files each launch reads and writes, in a folder or a copy of it."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self.root = Path.cwd()
        self.uses: list[_Use] = []
        self.before = self.files(self.root)
        self.known = {name for name in self.before if name.endswith(_SOURCES)}
        with suppress(SpecError):  # no repository
            self.known.update(git(self.root, "ls-files", "-z", "--recurse-submodules").split("\0"))

    def make_launcher(self, kind: LauncherKind) -> RankLauncher:
        """Return this package's launcher of a kind, watched."""
        return _WatchedLauncher(make_launcher(kind), self)

    def files(self, folder: Path) -> dict[str, tuple[int, int]]:
        """Return the files below ``folder`` that are no results."""
        return files_of(folder, [str(self._results)])


@dataclass(frozen=True)
class _WatchedLauncher:
    launcher: RankLauncher
    watch: Watch

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        before = self.watch.files(plan.folder)
        # Checkpoints are newer than data, and not every file may be watched.
        newest = sorted(before.keys() - self.watch.known, key=lambda name: before[name][1], reverse=True)
        with reads(plan.folder, [name for name in newest if not any(part in name for part in _METADATA)]) as read:
            outcome = self.launcher.launch(plan)
        self.watch.uses.append(_Use(read, changed(before, self.watch.files(plan.folder))))
        return outcome

    def close(self) -> None:
        self.launcher.close()


class Trial:
    """The launches of a script, and what they show.

    A script that resumes from a checkpoint, or appends to a file, computes something else in its second launch, or in
    a clean clone. If it reads what it has written, the test launches it in copies of the folder that lack these files.

    Attributes:
        notes: What the launches have shown, in sentences.
    """

    def __init__(self, target: ScriptTarget, world: DistributedWorld, watch: Watch) -> None:
        self.notes: list[str] = []
        self._target = target
        self._world = world
        self._watch = watch

    def settled(self) -> Pair:
        """Launch until it is known whether launches repeat, and under which settings."""
        pair = self._settled([])
        before = pair.settings.get("fresh", [])
        fresh, lacking = self._without(before, pair)
        if fresh != before:
            pair = self._settled(fresh)
        self.notes += lacking
        if left := outermost(changed(self._watch.before, self._watch.files(self._watch.root)), self._watch.before):
            self.notes.append(f"these launches left {', '.join(left)} in this folder")
        return pair

    def _settled(self, fresh: Sequence[str]) -> Pair:
        """Return two launches that repeat, if they do under any settings.

        ``fresh`` are files of the script that earlier runs have left.
        """
        settings: dict[str, Any] = {"record": {"hash_weights": True}} | ({"fresh": [*fresh]} if fresh else {})
        self.notes = [_copied(fresh)] if fresh else []
        begun = len(self._watch.uses)
        pair = self._twice(settings)
        uses = self._watch.uses[begun:]
        written = [name for use in uses for name in use.written]
        carried = written if pair.varies else [name for name in written if any(name in use.read for use in uses)]
        if not isinstance(pair.one, AortaError) and (pair.varies or pair.repeats) and carried and not fresh:
            own = sorted(outermost(carried, self._watch.before))
            copies = self._twice(settings | {"fresh": own})
            # A file that is written and read within each launch needs no copy.
            if pair.varies or _varies(pair.other, copies.one):
                resumed = f"; else {pair.varies}" if pair.varies and not copies.varies else ""
                self.notes.append(_copied(own) + resumed)
                pair = copies
        if pair.repeats:
            self.notes.append("weights are compared bit by bit: two launches computed the same")
        elif not pair.varies:
            self.notes.append(f"weights are not compared: {_NO_WEIGHTS}")
            return replace(pair, settings={**pair.settings, "record": {}})
        elif not isinstance(pair.one, AortaError):
            return self._made_deterministic(pair)
        return pair

    def _without(self, fresh: list[str], pair: Pair) -> tuple[list[str], list[str]]:
        """Return ``fresh`` with the files that earlier runs of the script have left, and notes on others that it reads.

        A launch without such a file writes it again, and computes something else.
        """
        read = {name: None for use in self._watch.uses[-2:] for name in use.read}
        groups, notes = outermost(read, self._watch.known), []
        for name in groups[:_MOST_TRIALS]:
            without = self._launched({**pair.settings, "fresh": [*fresh, name]})
            if not (differs := _varies(pair.one, without, in_bits=not pair.varies)):
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

    def _made_deterministic(self, pair: Pair) -> Pair:
        """Return two launches with seeds, or without weights if launches still differ."""
        seeded = self._twice({**pair.settings, "record": {"hash_weights": True, "deterministic": True}})
        if seeded.repeats:
            self.notes.append(
                "the recorder sets seeds and torch.use_deterministic_algorithms in the test's launches, because "
                f"without them {pair.varies}"
            )
            return seeded
        self.notes.append(
            f"weights are not compared: {pair.varies}; with seeds and deterministic algorithms: "
            f"{seeded.varies or _NO_WEIGHTS}"
        )
        return self._twice({**pair.settings, "record": {}})

    def _twice(self, settings: Mapping[str, Any]) -> Pair:
        one = self._launched(settings)
        other = one if isinstance(one, AortaError) else self._launched(settings)
        return Pair(settings, one, other, _varies(one, other))

    def _launched(self, settings: Mapping[str, Any]) -> Launched:
        """Return the result of a launch, or why it failed, such as at the end of a training that it resumed."""
        try:
            return self._target.launch(self._world, **settings)
        except (LaunchError, ResultError, SpecError) as error:
            return error


def _copied(fresh: Sequence[str]) -> str:
    return f"each launch runs in a copy of this folder without {', '.join(fresh)}, which the script writes"


def _varies(one: Launched, other: Launched, *, in_bits: bool = True) -> str:
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
        return ""
    if found := first_other_weights(one.facts.series, other.facts.series):
        return f"in two launches {found}"
    located = locate_first(one, other, first, (), None, lambda _: None)
    return " ".join([f"two launches differ in step {first.step}:", *map(str.strip, located)])
