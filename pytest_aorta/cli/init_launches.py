"""The launches by which ``aorta init`` finds out what of a script repeats, and which of its files have to go."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pytest_aorta.common.errors import AortaError, LaunchError, ResultError, SpecError
from pytest_aorta.common.text import counted
from pytest_aorta.launch.work_folder import changed, outermost
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.series import first_other_weights
from pytest_aorta.verdict.bitwise import first_difference, locate_first

_NO_WEIGHTS = "the launches recorded no weights, as by recorder.weights(model)"
# An earlier run of the script may have left them, and what resumes from one is not what a clean clone does.
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".metadata")
# A launch, or why it failed.
Launched: TypeAlias = WorkloadResult | AortaError
# Size and time of each file of a folder.
Files: TypeAlias = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Pair:
    """Two launches of the same code with the same settings.

    Attributes:
        settings: Keywords of the launches.
        one, other: The launches.
        notes: What the launches have shown, in sentences.
        written: The files and folders that the script has written.
    """

    settings: Mapping[str, Any]
    one: Launched
    other: Launched
    notes: Sequence[str] = ()
    written: Sequence[str] = ()

    @property
    def varies(self) -> str:
        """Return how the launches differ; empty if they computed the same bits."""
        return _varies(self.one, self.other)

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


def settled(launch: Callable[..., WorkloadResult], files: Callable[[], Files], untracked: set[str]) -> Pair:
    """Launch until it is known whether launches repeat, and under which settings.

    A script that resumes from a checkpoint, or appends to a file, computes something else in its second launch, or in a
    clean clone. If it does without the files that it has written, the test launches it in copies that lack these.

    Args:
        launch: Launches the script with the given settings.
        files: Returns the files of the working folder that are no results.
        untracked: Files that git knows of and does not track, so that a clean clone lacks them.
    """

    def launched(settings: Mapping[str, Any]) -> Launched:
        try:
            return launch(**settings)
        except (LaunchError, ResultError, SpecError) as error:  # such as at the end of a training that it resumed
            return error

    def twice(settings: Mapping[str, Any], one: Launched | None = None) -> Pair:
        one = one or launched(settings)
        return Pair(settings, one, one if isinstance(one, AortaError) else launched(settings))

    before, notes = files(), list[str]()
    pair = twice({"record": {"hash_weights": True}})
    written = outermost(changed(before, files()), before)
    earlier = sorted(name for name in before.keys() & untracked if name.endswith(_CHECKPOINTS))
    left = [name for name in outermost(earlier, before.keys() - {*earlier}) if name not in written]
    for names, what in ((written, "which the script writes"), (left, "which git does not track")):
        if not names or isinstance(pair.one, AortaError):
            continue
        settings = {**pair.settings, "fresh": sorted([*pair.settings.get("fresh", ()), *names])}
        alone, shown = launched(settings), ", ".join(names)
        if names is left and isinstance(alone, AortaError):
            notes.append(f"a launch fails without {shown}, {what}, so it fails in a clean clone")
        elif why := pair.varies or _varies(pair.other, alone):
            pair = twice(settings, alone)
            reason = "" if pair.varies else f"; else {why}"
            notes.append(f"each launch runs in a copy of this folder without {shown}, {what}{reason}")
        if names is written:
            notes.append(f"these launches left files in this folder: {shown}")
    written = list(dict.fromkeys([*written, *pair.settings.get("fresh", ())]))
    if pair.repeats:
        notes.append("weights are compared bit by bit: two launches computed the same")
    elif not pair.varies:
        notes.append(f"weights are not compared: {_NO_WEIGHTS}")
        pair = replace(pair, settings={**pair.settings, "record": {}})
    elif not isinstance(pair.one, AortaError):
        seeded = twice({**pair.settings, "record": {"hash_weights": True, "deterministic": True}})
        if seeded.repeats:
            notes.append(
                "the recorder sets seeds and torch.use_deterministic_algorithms in the test's launches, because "
                f"without them {pair.varies}"
            )
            pair = seeded
        else:
            why = f"{pair.varies}; with seeds and deterministic algorithms: {seeded.varies or _NO_WEIGHTS}"
            notes.append(f"weights are not compared: {why}")
            pair = twice({**pair.settings, "record": {}})
    return replace(pair, notes=notes, written=written)


def _varies(one: Launched, other: Launched) -> str:
    """Return how two launches of the same code differ; empty if they computed the same bits."""
    if isinstance(one, AortaError) or isinstance(other, AortaError):
        return f"a launch fails: {str(one if isinstance(one, AortaError) else other).splitlines()[0]}"
    if one.total_iterations != other.total_iterations:
        return f"one launch had {counted(one.total_iterations, 'step')}, the next {other.total_iterations}"
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
