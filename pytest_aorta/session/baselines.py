"""The end of a session: writing the baselines of passed tests, and reporting unused baselines."""

from __future__ import annotations

from collections.abc import Sequence, Set

from pytest_aorta.common.errors import AortaError
from pytest_aorta.plan.options.run import Options
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.text import change_lines
from pytest_aorta.verdict.baseline import locked_baselines, orphans, read_baseline, write_baseline


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
                notes.append(f"not recorded, because the test failed: {case}")
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
    return notes, good


def unused_baselines(
    records: Sequence[TestRecord], passed: Set[str], collected: set[str], options: Options
) -> list[str]:
    """Return a line for each baseline whose test does not exist, or passed without a comparison with the baseline.

    A test that can't launch has no record.
    """
    used: dict[str, set[str]] = {nodeid: set() for nodeid in passed}
    used |= {record.nodeid: set(record.used_cases) for record in records if record.nodeid in passed}
    return orphans(options.baselines_dir, collected, used, options.rootdir)
