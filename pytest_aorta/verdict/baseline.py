"""Stored baselines: one strict JSON file per case and platform, written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, parse_json, read_json
from pytest_aorta.common.errors import BaselineError
from pytest_aorta.common.files import locked, slug, write_json
from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.common.schema import violation
from pytest_aorta.result.facts import LaunchFacts

SCHEMA = "baseline.schema.json"
SCHEMA_VERSION = 4
MAX_BYTES = 4 << 20
MAX_LAUNCHES = 100
LOCK_FILE = ".lock"
# The keys of a launch that schema version 2 named differently.
_RENAMED_SINCE_2 = {"sitting": "block", "epoch": "revision", "anchor": "center"}
# Metrics of launches on devices that until schema version 3 counted waits for late ranks as communication.
_REDEFINED_SINCE_3 = ("overlap_ratio", "exposed_comm_ms")


@dataclass(frozen=True)
class StoredLaunch:
    """A launch of a baseline.

    Attributes:
        revision: number of the baseline's revision that the launch belongs to, counted from 1.
        center: True if the launch counts for the baseline center; other launches count for the variance only.
    """

    facts: LaunchFacts
    revision: int = 1
    center: bool = True


@dataclass(frozen=True)
class Baseline:
    """The launches that one case is compared with.

    Attributes:
        case: the test's node id and the comparison's label.
        test: the node id alone, which shows whether the test was deleted.
        config: the workload's full config; a candidate with another config is not compared.
        launches: in the order of recording; only the last revision has center launches.
        forced: revision -> the reason that was given for recording launches that were too noisy.
    """

    case: str
    test: str
    platform: str
    workload: str
    config: dict[str, Any]
    launches: tuple[StoredLaunch, ...]
    forced: dict[str, str] = field(default_factory=dict)

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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of the baseline's file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "case": self.case,
            "test": self.test,
            "platform": self.platform,
            "workload": self.workload,
            "config": self.config,
            "launches": [
                {"revision": stored.revision, "center": stored.center} | to_builtins(stored.facts)
                for stored in self.launches
            ],
            "forced": self.forced,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Baseline:
        """Build a baseline from a validated document of the current schema version."""
        return cls(
            case=document["case"],
            test=document["test"],
            platform=document["platform"],
            workload=document["workload"],
            config=document["config"],
            launches=tuple(
                StoredLaunch(_facts(entry, document["case"]), entry["revision"], entry["center"])
                for entry in document["launches"]
            ),
            forced=document["forced"],
        )


def _facts(entry: dict[str, Any], name: str) -> LaunchFacts:
    """Return the facts of a launch entry, which has two more keys."""
    return convert({key: entry[key] for key in entry.keys() - {"revision", "center"}}, LaunchFacts, name)


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
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BaselineError(f"{path}: can't be read: {error.strerror or error}") from None
    baseline = read_baseline_file(path)
    if (baseline.case, baseline.platform) != (case, platform):
        raise BaselineError(
            f"{path}: contains case {baseline.case!r} of platform {baseline.platform!r}, "
            f"but its name belongs to {case!r} of {platform!r}; was it copied or renamed by hand?"
        )
    return baseline


def read_baseline_file(path: Path) -> Baseline:
    """Read one file and check it against its schema.

    Raises:
        BaselineError: The file is invalid. The message names the file, the JSON path, the value and the allowed values.
    """
    try:
        document = read_json(path, max_bytes=MAX_BYTES)
    except UnreadableFile as error:
        raise BaselineError(str(error)) from None
    return _from_document(document, str(path))


def parse_baseline(text: str, name: str) -> Baseline:
    """Parse a baseline from text, such as that of a file in a commit.

    ``name`` is the source of the text, for error messages.

    Raises:
        BaselineError: The text is invalid, as in :func:`read_baseline_file`.
    """
    try:
        return _from_document(parse_json(text, name), name)
    except UnreadableFile as error:
        raise BaselineError(str(error)) from None


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """Convert a document of schema version 2 or 3 to version 4; return any other document unchanged.

    Version 3 renames the keys ``sitting``, ``epoch`` and ``anchor`` of a launch; their values are the same. Version 4
    defines the overlap metrics of devices without waits for late ranks. Their older values are left out, so that
    nothing is compared with them.
    """
    version, launches = document.get("schema_version"), document.get("launches")
    if version not in (2, 3) or not isinstance(launches, list):
        return document
    if version == 2:
        launches = [
            {_RENAMED_SINCE_2.get(key, key): value for key, value in entry.items()}
            if isinstance(entry, dict)
            else entry
            for entry in launches
        ]
    return document | {"schema_version": SCHEMA_VERSION, "launches": list(map(_without_redefined, launches))}


def _without_redefined(launch: Any) -> Any:
    """Return a launch of schema version 3 without the metrics that version 4 redefines; CPU ranks keep theirs."""
    metrics, environment = (launch.get(key) if isinstance(launch, dict) else None for key in ("metrics", "environment"))
    if not isinstance(metrics, dict) or not isinstance(environment, dict) or environment.get("device") == "cpu":
        return launch
    kept = {name: value for name, value in metrics.items() if name not in _REDEFINED_SINCE_3}
    return {key: value for key, value in launch.items() if key != "exposed_ms"} | {"metrics": kept}


def _from_document(document: Any, name: str) -> Baseline:
    if isinstance(document, dict):
        document = upgraded(document)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise BaselineError(
            f"{name}: schema_version is {version!r}, but this pytest-aorta reads versions 2 to {SCHEMA_VERSION}; "
            f"delete the file and record the baseline again with --update-baselines, or use the version that wrote it"
        )
    if problem := violation(document, SCHEMA) or _impossible_center(document):
        raise BaselineError(f"{name}: {problem}")
    try:
        return Baseline.from_json(document)
    except UnreadableFile as error:
        raise BaselineError(f"{name}: {error}") from None


@contextmanager
def locked_baselines(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of baselines, so that no other session writes between reading a file and writing it.

    Raises:
        BaselineError: The folder can't be written, or another session has held the lock for a minute.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        lock.enter_context(locked(folder / LOCK_FILE))
    except OSError as error:
        raise BaselineError(f"{folder}: can't be locked: {error.strerror or error}") from None
    with lock:
        yield


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write a baseline atomically and return its path.

    An unreadable file at that path is not overwritten, and no file outside of ``folder`` is written.

    Raises:
        BaselineError: The existing file is unreadable, the new file is too large, or the platform's folder can't be
            written or is a link out of ``folder``.
    """
    path = baseline_path(folder, baseline.platform, baseline.case)
    read_baseline(folder, baseline.platform, baseline.case)
    document = baseline.to_json()
    if problem := violation(document, SCHEMA):
        raise BaselineError(f"{path}: not written: the new baseline violates its own schema: {problem}")
    if problem := outside(folder, path.parent):
        raise BaselineError(f"{path}: not written: {problem}")
    try:
        if len(json.dumps(document, allow_nan=False, indent=2)) >= MAX_BYTES:
            raise ValueError(f"the new baseline is larger than the {MAX_BYTES:,} bytes allowed; measure fewer steps")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document)
    except OSError as error:
        raise BaselineError(f"{path}: not written: {error.strerror or error}") from None
    except ValueError as error:
        raise BaselineError(f"{path}: not written: {error}") from None
    return path


def outside(folder: Path, platform_folder: Path) -> str | None:
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
        file = baseline.test.split("::", 1)[0]
        gone = file in collected_files and baseline.test not in collected
        if gone or not has_test_file(baseline, rootdir):
            found.append(
                f"{path}: unused: the test {baseline.test} does not exist; delete the file, or if the test was "
                f"moved, run aorta baselines rename"
            )
        elif _is_no_longer_compared(baseline, used_cases, platforms):
            found.append(f"{path}: unused: the test {baseline.test} does not compare this case; delete the file")
        elif path != baseline_path(folder, baseline.platform, baseline.case):
            found.append(f"{path}: the file name is not that of its case {baseline.case!r}; delete or rename the file")
    return found


def _is_no_longer_compared(
    baseline: Baseline, used_cases: Mapping[str, Collection[str]], platforms: Mapping[str, str]
) -> bool:
    # A test may compare other cases on another platform.
    ran_on = platforms.get(baseline.test, baseline.platform)
    cases = used_cases.get(baseline.test, {baseline.case})
    return ran_on == baseline.platform and baseline.case not in cases


def has_test_file(baseline: Baseline, rootdir: Path) -> bool:
    """Return True if the file of the baseline's test exists."""
    return os.path.exists(rootdir / baseline.test.split("::", 1)[0])  # noqa: PTH110 - False for text that is no path


def _impossible_center(document: dict[str, Any]) -> str | None:
    launches = document["launches"]
    revisions = [entry["revision"] for entry in launches]
    if revisions != sorted(revisions):
        return f"$.launches: revisions are {revisions}, allowed is ascending order"
    if {entry["revision"] for entry in launches if entry["center"]} != {revisions[-1]}:
        return f"$.launches: center launches are allowed and required in the last revision only, {revisions[-1]}"
    return None
