"""Recording of baselines: launches of an interrupted recording, the files of passed tests, and unused baselines."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.text import counted
from pytest_aorta.plan.options.run import Options
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.provenance import code_digest
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.text import change_lines
from pytest_aorta.verdict.applicability import other_setup
from pytest_aorta.verdict.baseline import (
    Baseline,
    StoredLaunch,
    baseline_path,
    locked_baselines,
    orphans,
    read_baseline,
    read_baseline_file,
    write_baseline,
)
from pytest_aorta.verdict.learning import other_setting
from pytest_aorta.verdict.noise import blocks

# pytest's word for the outcome of a test that neither passed nor failed -> the outcome in words.
_ENDS = {
    "skipped": "was skipped after its comparison",
    "xfailed": "failed, as its mark xfail expects",
    "xpassed": "passed in spite of its mark xfail",
}
# Begin of a line on an interrupted recording.
_UNUSED = "launches of an interrupted recording are not used"


class Recording:
    """The launches of one case that become a baseline, kept in a file until the test ends.

    An interruption leaves the file behind, and the next recording of the same code, config and session block continues
    with its launches. A launch or a test that fails leaves no file. Without ``options.unfinished``, or if git does not
    report the version of the code, no file is written.

    Attributes:
        note: A line on the launches of an interrupted recording, whether they are used or not; empty without any.
    """

    def __init__(self, options: Options, first: Baseline) -> None:
        """Start a recording with the launch of ``first``, a baseline of its own."""
        self.note = ""
        self._first = first
        self._options = options
        self._folder = _folder_of_code(options)

    def launches(self, wanted: int, again: Callable[[], LaunchFacts]) -> list[LaunchFacts]:
        """Return ``wanted`` launches: those of an interrupted recording, the first one, and further ones by ``again``.

        Raises:
            BaselineError: The file of an interrupted recording can't be read or written.
        """
        earlier = self._earlier()[1 - wanted :] if wanted > 1 else ()
        if earlier:
            self.note = f"{counted(len(earlier), 'launch')} of an interrupted recording among them"
        launches = [*earlier, *self._first.center_launches]
        try:
            while len(launches) < wanted:
                self.keep(launches)
                launches.append(again())
        except AortaError:
            drop_unfinished(self._options, self._first)
            raise
        drop_unfinished(self._options, self._first)
        return launches

    def keep(self, launches: Sequence[LaunchFacts]) -> None:
        """Keep launches until further ones are kept or the test ends."""
        if self._folder:
            write_baseline(self._folder, _with_launches(self._first, launches))

    def _earlier(self) -> Sequence[LaunchFacts]:
        """Return the launches of an interrupted recording that this recording continues, in order."""
        first = self._first
        kept = read_baseline(self._folder, first.platform, first.case) if self._folder else None
        if kept is None:
            self.note = f"{_UNUSED}: the code has changed since" if _unfinished_files(self._options, first) else ""
            return ()
        if problem := _difference(kept, first):
            self.note = f"{_UNUSED}: {problem}"
            return ()
        return kept.center_launches


def _unfinished_files(options: Options, baseline: Baseline) -> list[Path]:
    """Return the files of a case's unfinished recordings, of any version of the code."""
    pattern = baseline_path(Path("*"), baseline.platform, baseline.case)
    return sorted(options.unfinished.glob(str(pattern))) if options.unfinished else []


def drop_unfinished(options: Options, baseline: Baseline) -> None:
    """Remove the launches of ``baseline``'s case that were kept while they were recorded."""
    for path in _unfinished_files(options, baseline):
        path.unlink(missing_ok=True)


def _folder_of_code(options: Options) -> Path | None:
    """Return the folder of recordings of this version of the code; None if none are kept or git gives no version."""
    code = code_digest(options.rootdir, options.baselines_dir) if options.unfinished else None
    return options.unfinished / code if options.unfinished and code else None


def _with_launches(first: Baseline, launches: Sequence[LaunchFacts]) -> Baseline:
    return first.replace(launches=tuple(StoredLaunch(launch) for launch in launches))


def _difference(kept: Baseline, first: Baseline) -> str | None:
    """Return why launches of an interrupted recording differ from the first launch of this one, or None."""
    last, facts = kept.center_launches[-1], first.center_launches[0]
    if detail := other_setup(kept, first.workload, first.config, [facts]):
        return detail
    if settings := other_setting(last, [facts]):
        return settings[0]
    # The launches of a recording share the noise of one session block.
    return "they belong to another session block" if len(set(blocks([last, facts]))) > 1 else None


def unfinished_recordings(options: Options) -> list[str]:
    """Return a line for each recording without a baseline that the next recording of the same code continues."""
    folder = _folder_of_code(options)
    lines = []
    for path in sorted(folder.glob("*/*.json")) if folder else ():
        try:
            kept = read_baseline_file(path)
        except AortaError as error:
            lines.append(f"ERROR {error}")
            continue
        launches = counted(len(kept.launches), "launch")
        lines += [
            f"not recorded yet: {kept.case}; {launches} kept",
            f"  next: to continue, run pytest {shlex.quote(kept.test)} --update-baselines; --cache-clear starts over",
        ]
    return lines


def write_new_baselines(records: Sequence[TestRecord], passed: Set[str], options: Options) -> tuple[list[str], bool]:
    """Write the new baselines of passed tests; return lines for the summary, and True if every write succeeded.

    If a test was retried, only its last attempt counts.

    The launches are merged with the current files under a lock, so that sessions that update the same baseline at once
    do not lose each other's launches.
    """
    notes: list[str] = []
    good = True
    for record in records:
        for launches in () if record.is_retried else record.new_launches:
            platform, case = launches.baseline.platform, launches.baseline.case
            if record.nodeid not in passed:
                notes.append(f"not recorded, because the test {_ENDS.get(record.outcome, 'failed')}: {case}")
                continue
            try:
                with locked_baselines(options.baselines_dir):
                    old = read_baseline(options.baselines_dir, platform, case)
                    baseline = launches.merged(options.baselines_dir)
                    write_baseline(options.baselines_dir, baseline)
                notes += [*change_lines(old, baseline), *record.detection.get(case, ())]
            except AortaError as error:
                notes.append(f"ERROR {error}")
                good = False
                _keep_unwritten(options, launches.baseline)
    return notes, good


def _keep_unwritten(options: Options, new: Baseline) -> None:
    """Keep the launches of a baseline that can't be written, so that the next recording continues with them."""
    if folder := _folder_of_code(options):
        with suppress(AortaError):  # the disk of the baselines may be that of the cache
            write_baseline(folder, new)


def unused_baselines(
    records: Sequence[TestRecord], passed: Set[str], collected: set[str], options: Options
) -> list[str]:
    """Return a line for each baseline whose test does not exist, or passed without a comparison with the baseline.

    A test that can't launch has no record.
    """
    used: dict[str, set[str]] = {nodeid: set() for nodeid in passed}
    used |= {record.nodeid: set(record.used_cases) for record in records if record.nodeid in passed}
    platforms = {record.nodeid: record.platform for record in records}
    return orphans(options.baselines_dir, collected, used, platforms, options.rootdir)
