"""Stored baselines: one strict JSON file a case and platform, written whole or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.common.files import UnreadableFile, parse_json, read_json, slug, write_json
from pytest_aorta.common.schema import violation
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.provenance import UTC_FORMAT

SCHEMA = "baseline.schema.json"
SCHEMA_VERSION = 2
MAX_BYTES = 4 << 20
MAX_LAUNCHES = 100


@dataclass(frozen=True)
class StoredLaunch:
    """A launch of a baseline.

    Attributes:
        epoch: counts the times the baseline was replaced, from 1.
        anchor: whether it is part of the centre; the others tell the spread alone.
    """

    facts: LaunchFacts
    epoch: int = 1
    anchor: bool = True


@dataclass(frozen=True)
class Baseline:
    """The launches one case is compared with.

    Attributes:
        case: what is compared: the test's node id and the comparison's label.
        test: the node id alone, to find baselines that no test uses.
        config: the workload's full config; a baseline of another config is no baseline.
        launches: in order of recording; the last epoch has the anchor.
        forced: epoch -> why a noisy set was taken all the same.
    """

    case: str
    test: str
    platform: str
    workload: str
    config: dict[str, Any]
    launches: tuple[StoredLaunch, ...]
    forced: dict[str, str] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The present one."""
        return self.launches[-1].epoch

    @property
    def anchor(self) -> tuple[LaunchFacts, ...]:
        """The launches that give the centre; there is one at least."""
        return tuple(stored.facts for stored in self.launches if stored.anchor)

    @property
    def epochs(self) -> list[tuple[LaunchFacts, ...]]:
        """All launches, by epoch."""
        numbers = sorted({stored.epoch for stored in self.launches})
        return [tuple(stored.facts for stored in self.launches if stored.epoch == number) for number in numbers]

    def to_json(self) -> dict[str, Any]:
        """The file's document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "case": self.case,
            "test": self.test,
            "platform": self.platform,
            "workload": self.workload,
            "config": self.config,
            "launches": [
                {"epoch": stored.epoch, "anchor": stored.anchor} | stored.facts.to_json() for stored in self.launches
            ],
            "forced": self.forced,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Baseline:
        """Build from a validated document."""
        return cls(
            case=document["case"],
            test=document["test"],
            platform=document["platform"],
            workload=document["workload"],
            config=document["config"],
            launches=tuple(
                StoredLaunch(LaunchFacts.from_json(entry), entry["epoch"], entry["anchor"])
                for entry in document["launches"]
            ),
            forced=document["forced"],
        )


def baseline_path(folder: Path, platform: str, case: str) -> Path:
    """The file of a case; its name is a slug, so no case can leave the folder."""
    return folder / platform / f"{slug(case)}.json"


def read_baseline(folder: Path, platform: str, case: str) -> Baseline | None:
    """The baseline of a case, None where no file is there.

    Raises:
        BaselineError: the file is unreadable, of another version, doesn't fit its schema or holds another case.
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
            f"{path}: holds case {baseline.case!r} of platform {baseline.platform!r}, "
            f"but its name belongs to {case!r} of {platform!r}; was it copied or renamed by hand?"
        )
    return baseline


def read_baseline_file(path: Path) -> Baseline:
    """Read one file strictly.

    Raises:
        BaselineError: naming the file, the JSON path, what was found and what is allowed.
    """
    try:
        document = read_json(path, max_bytes=MAX_BYTES)
    except UnreadableFile as error:
        raise BaselineError(str(error)) from None
    return _from_document(document, str(path))


def parse_baseline(text: str, name: str) -> Baseline:
    """:func:`read_baseline_file` of what was read from elsewhere, e.g. a commit; ``name`` says from where.

    Raises:
        BaselineError: as there.
    """
    try:
        return _from_document(parse_json(text, name), name)
    except UnreadableFile as error:
        raise BaselineError(str(error)) from None


def _from_document(document: Any, name: str) -> Baseline:
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise BaselineError(
            f"{name}: schema_version is {version!r}, this pytest-aorta reads {SCHEMA_VERSION}; "
            f"delete the file and record it again with --update-baselines, or use the version that wrote it"
        )
    if problem := violation(document, SCHEMA) or _impossible_moment(document) or _impossible_anchor(document):
        raise BaselineError(f"{name}: {problem}")
    return Baseline.from_json(document)


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write a baseline atomically; an unreadable file in its place is never overwritten, nor anything outside.

    Raises:
        BaselineError: the present file is unreadable, the new one is too large, or the folder can't be written or
            leads out of ``folder``.
    """
    path = baseline_path(folder, baseline.platform, baseline.case)
    read_baseline(folder, baseline.platform, baseline.case)
    document = baseline.to_json()
    if problem := violation(document, SCHEMA):
        raise BaselineError(f"{path}: not written, the new baseline does not fit its own schema: {problem}")
    real = Path(os.path.realpath(path.parent))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise BaselineError(f"{path}: not written: the platform's folder leads out of {folder}, to {real}")
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


def orphans(folder: Path, collected: set[str], used_cases: Mapping[str, Collection[str]], rootdir: Path) -> list[str]:
    """Baseline files that no test uses, with the reason.

    ``collected`` are node ids of whole test files, ``used_cases`` what each test that passed compared: a baseline is
    unused if its test's file is gone, was collected without the test, or the test passed and compared other cases.
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
            found.append(f"{path}: no test uses it: {baseline.test} is gone; delete it")
        elif baseline.test in used_cases and baseline.case not in used_cases[baseline.test]:
            found.append(f"{path}: no test uses it: {baseline.test} no longer compares it; delete it")
        elif path != baseline_path(folder, baseline.platform, baseline.case):
            found.append(f"{path}: not the file name of its case {baseline.case!r}; delete or rename it")
    return found


def has_test_file(baseline: Baseline, rootdir: Path) -> bool:
    """Whether the file of the baseline's test is there."""
    return os.path.exists(rootdir / baseline.test.split("::", 1)[0])  # noqa: PTH110 - False for what can be no path


def _impossible_moment(document: dict[str, Any]) -> str | None:
    """What a schema's pattern can't tell: a thirteenth month."""
    for number, entry in enumerate(document["launches"]):
        try:
            time.strptime(entry["recorded_at"], UTC_FORMAT)
        except ValueError:
            return f"$.launches[{number}].recorded_at: got {entry['recorded_at']!r}, allowed is a moment in UTC"
    return None


def _impossible_anchor(document: dict[str, Any]) -> str | None:
    launches = document["launches"]
    epochs = [entry["epoch"] for entry in launches]
    if epochs != sorted(epochs):
        return f"$.launches: their epochs are {epochs}; they have to ascend"
    if {entry["epoch"] for entry in launches if entry["anchor"]} != {epochs[-1]}:
        return f"$.launches: the last epoch, {epochs[-1]}, has to have every anchor and one at least"
    return None
