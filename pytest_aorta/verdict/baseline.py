"""Stored baselines: one strict JSON file per case and platform, written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.common.files import locked, raised_as, read_json, slug, write_text
from pytest_aorta.common.model import Model, Platform, Positive, Text, convert, to_builtins
from pytest_aorta.common.text import counted
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.result.facts import LaunchDescription, Launches, LaunchFacts
from pytest_aorta.result.provenance import Provenance
from pytest_aorta.verdict.metrics import METRICS, metric_of, own_metrics

SCHEMA_VERSION = 6
# The earlier version that `aorta baselines upgrade` rewrites.
_OLDER_VERSION = 5
MAX_BYTES = 4 << 20
MAX_LAUNCHES = 100
LOCK_FILE = ".lock"
# The levels of a file whose values have lines of their own: the baseline, its launches, a launch, and its facts.
_LEVELS = 4

RevisionText: TypeAlias = Annotated[str, Meta(pattern="^[1-9][0-9]{0,5}$")]


class StoredLaunch(Model, frozen=True):
    """A launch of a baseline.

    Attributes:
        facts: values, spread and provenance of the launch.
        revision: number of the baseline's revision that the launch belongs to, counted from 1.
        center: True if the launch counts for the baseline center; other launches count for the variance only.
    """

    facts: LaunchFacts
    revision: Positive = 1
    center: bool = True


class Baseline(Model, frozen=True):
    """The launches that one case is compared with.

    Attributes:
        schema_version: version of this schema.
        case: the test's node id and the comparison's label.
        test: the node id alone, which shows whether the test was deleted.
        platform: accelerator model, number of ranks and backend.
        workload: name of the workload or script.
        config: the workload's full config; a candidate with another config is not compared.
        launches: in the order of recording; only the last revision has center launches.
        forced: revision -> the reason that was given for recording launches that were too noisy.
        left_out: metrics that are not compared, because the center launches are too noisy for them -> the reason.
        measured: metrics that every center launch had when it was written -> the least number of their values.
    """

    case: Text
    test: Text
    platform: Platform
    workload: Text
    config: dict[str, Any]
    launches: Annotated[tuple[StoredLaunch, ...], Meta(min_length=1, max_length=MAX_LAUNCHES)]
    forced: dict[RevisionText, Text] = {}
    left_out: dict[Text, Text] = {}
    measured: dict[Text, Positive] = {}
    schema_version: Literal[6] = 6

    def path(self, folder: Path) -> Path:
        """Return the file of the baseline in a folder of baselines."""
        return baseline_path(folder, self.platform, self.case)

    @property
    def revision(self) -> int:
        """Return the number of the current revision."""
        return self.launches[-1].revision

    @property
    def center_launches(self) -> tuple[LaunchFacts, ...]:
        """Return the launches that determine the baseline center, at least one."""
        return tuple(stored.facts for stored in self.launches if stored.center)

    @property
    def revisions(self) -> list[tuple[LaunchFacts, ...]]:
        """Return all launches, grouped by revision."""
        numbers = sorted({stored.revision for stored in self.launches})
        return [tuple(stored.facts for stored in self.launches if stored.revision == number) for number in numbers]

    def condensed(self) -> Baseline:
        """Return the baseline as it is stored: the first center launch alone has names of tensors and places of costs.

        The values of metrics are counted.
        """
        named = next(stored for stored in self.launches if stored.center)
        launches = (stored.replace(facts=stored.facts.condensed(has_names=stored is named)) for stored in self.launches)
        return self.replace(launches=tuple(launches), measured=_num_measured(self.center_launches))


def baseline_path(folder: Path, platform: str, case: str) -> Path:
    """Return the file of a case. The file name is a slug, so a case cannot name a path outside of ``folder``."""
    return folder / platform / f"{slug(case)}.json"


def read_baseline(folder: Path, platform: str, case: str) -> Baseline | None:
    """Return the baseline of a case, or None if the case has no file.

    Raises:
        BaselineError: The file is unreadable, has an unknown version, violates its schema, or contains another case or
            platform.
    """
    path = baseline_path(folder, platform, case)
    with raised_as(BaselineError, f"{path}: can't be read: "):
        if not path.exists():
            return None
    baseline = read_baseline_file(path)
    if (baseline.case, baseline.platform) != (case, platform):
        raise BaselineError(
            f"{path}: contains case {baseline.case!r} of platform {baseline.platform!r}, "
            f"but its name belongs to {case!r} of {platform!r}; was it copied or renamed by hand?"
        )
    return baseline


def read_baseline_file(path: Path, *, upgrades: bool = False) -> Baseline:
    """Read one file and check it against its schema; with ``upgrades``, the file may be of the version before.

    Raises:
        BaselineError: The file is invalid. The message names the file, the JSON path, the value and the allowed values.
    """
    with raised_as(BaselineError, after="; restore the file, or delete it and record the baseline again"):
        document = read_json(path, max_bytes=MAX_BYTES)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version == _OLDER_VERSION and upgrades:
        wrong, remedy = f"{path}: can't be upgraded: ", "; delete the file and record the baseline again"
        with raised_as(BaselineError, wrong, (LookupError, TypeError, AttributeError), remedy):
            document = _upgraded(document)
    elif version != SCHEMA_VERSION:
        remedy = (
            "delete the file and record the baseline again with --update-baselines, or use the version that wrote it"
        )
        if version == _OLDER_VERSION:
            remedy = f"rewrite it with: aorta baselines upgrade --folder {path.parent.parent}"
        raise BaselineError(
            f"{path}: schema_version is {version!r}, but this pytest-aorta reads version {SCHEMA_VERSION}; {remedy}"
        )
    with raised_as(BaselineError):
        baseline = convert(document, Baseline, str(path))
    _check(baseline, path)
    return baseline


def _upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of version 5, which had all facts of a launch in one object, as one of this version."""
    for stored in document["launches"]:
        facts = stored["facts"]
        facts["measured_at"] = facts.pop("recorded_at")
        for gone in ("canary_ms", "step_time_sample_ms"):
            facts.pop(gone, None)
        for name, kind in (("provenance", Provenance), ("description", LaunchDescription)):
            facts[name] = {key: facts.pop(key) for key in kind.__struct_fields__ if key in facts}
    return {**document, "schema_version": SCHEMA_VERSION}


def _check(baseline: Baseline, name: Path) -> None:
    """Refuse what the types of a baseline allow, and no program has written."""
    launches = baseline.launches
    revisions = [stored.revision for stored in launches]
    if revisions != sorted(revisions):
        raise BaselineError(f"{name}: $.launches: revisions are {revisions}, allowed is ascending order")
    if {stored.revision for stored in launches if stored.center} != {revisions[-1]}:
        problem = f"center launches are allowed and required in the last revision only, {revisions[-1]}"
        raise BaselineError(f"{name}: $.launches: {problem}")
    present = _num_measured(baseline.center_launches)
    for metric, recorded in baseline.measured.items():
        if (now := present.get(metric, 0)) < recorded:
            raise BaselineError(
                f"{name}: $.launches: {metric} has {counted(now, 'value')}, {recorded} were recorded, so a part of the "
                f"file is gone; restore the file, or delete it and record the baseline again"
            )
    for number, stored in enumerate(launches):
        place, facts = f"{name}: $.launches[{number}].facts", stored.facts
        if not facts.step_time_ms["p50"] > 0:
            raise BaselineError(f"{place}.step_time_ms.p50: got {facts.step_time_ms['p50']}, allowed is above 0")
        if facts.device not in (kinds := [kind.value for kind in DeviceKind]):
            raise BaselineError(f"{place}.environment.device: got {facts.device!r}, allowed is one of {kinds}")


def _num_measured(launches: Launches) -> dict[str, int]:
    """Return the metrics that every launch has -> the least number of their values over the launches."""
    names = [*METRICS, *own_metrics(launches[0])]
    found = {name: min(map(metric_of(name).num_values, launches)) for name in names}
    return {name: number for name, number in found.items() if number}


@contextmanager
def locked_baselines(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of baselines, so that no other session writes between reading a file and writing it.

    Raises:
        BaselineError: The folder can't be written, or another session has held the lock for a minute.
    """
    with raised_as(BaselineError, f"{folder}: can't be locked: "):
        folder.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        lock.enter_context(locked(folder / LOCK_FILE))
    with lock:
        yield


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write a baseline atomically and return its path.

    No file outside of ``folder`` is written.

    Raises:
        BaselineError: The new file is too large, or the platform's folder can't be written or is a link out of
            ``folder``.
    """
    path = baseline.path(folder)
    document = to_builtins(baseline)
    if problem := _outside(folder, path.parent):
        raise BaselineError(f"{path}: not written: {problem}")
    with raised_as(BaselineError, f"{path}: not written: ", (OSError, ValueError)):
        text = _lines_of(document, _LEVELS) + "\n"
        if len(text) >= MAX_BYTES:
            raise ValueError(f"the new baseline is larger than the {MAX_BYTES:,} bytes allowed; measure fewer steps")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def _lines_of(value: Any, levels: int, indent: str = "") -> str:
    """Return JSON with sorted keys, in which each value of the outer levels has a line, so that a diff is short."""
    if not levels or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, allow_nan=False, sort_keys=True)
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {_lines_of(value[key], levels - 1, inner)}" for key in sorted(value)]
    else:
        rows = [_lines_of(item, levels - 1, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}{end}"


def _outside(folder: Path, platform_folder: Path) -> str | None:
    """Return the problem if a platform's folder is a link out of the folder of baselines, or None."""
    real = Path(os.path.realpath(platform_folder))
    if real.is_relative_to(os.path.realpath(folder)):
        return None
    return f"the platform's folder is a link out of {folder}, to {real}"


def orphans(
    folder: Path,
    collected: set[str],
    used_cases: Mapping[str, Collection[str]],
    platforms: Mapping[str, str],
    rootdir: Path,
) -> list[str]:
    """Return a line for each baseline file that no test uses, with the reason.

    A baseline is unused if the file of its test is deleted, if that file was collected without the test, or if the
    test passed on its platform and compared other cases. Unreadable and misnamed files have a line, too.

    Args:
        folder: The folder of the baselines.
        collected: Node ids of all tests in the collected files.
        used_cases: The cases that each passed test compared, by node id.
        platforms: The platform that each test with a world ran on, by node id.
        rootdir: The folder that node ids are relative to.
    """
    collected_files = {node.split("::", 1)[0] for node in collected}
    found = []
    for path in sorted(folder.glob("*/*.json")):
        try:
            baseline = read_baseline_file(path)
        except BaselineError as error:
            found.append(str(error))
            continue
        test, file = baseline.test, baseline.test.split("::", 1)[0]
        is_gone = file in collected_files and test not in collected
        # False for text that is no path
        if is_gone or not os.path.exists(rootdir / file):  # noqa: PTH110
            found.append(
                f"{path}: unused: the test {test} does not exist; delete the file, or if the test was moved, write "
                f"its new node id into the file and run aorta baselines upgrade"
            )
        # A test may compare other cases on another platform.
        elif platforms.get(test, baseline.platform) == baseline.platform and baseline.case not in used_cases.get(
            test, {baseline.case}
        ):
            found.append(f"{path}: unused: the test {test} does not compare this case; delete the file")
        elif path != baseline.path(folder):
            found.append(f"{path}: the file name is not that of its case {baseline.case!r}; delete or rename the file")
    return found
