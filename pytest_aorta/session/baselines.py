"""The files of baselines at the end of a run: those of passed tests, and unused ones."""

from collections.abc import Sequence, Set

from pytest_aorta.common.errors import AortaError, BaselineError
from pytest_aorta.common.text import counted
from pytest_aorta.plan.options import Options
from pytest_aorta.result.series import digest
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.baseline import Baseline, locked_baselines, orphans, read_baseline, write_baseline
from pytest_aorta.verdict.metrics import METRICS, format_value, middle
from pytest_aorta.verdict.verdicts import ReferenceKind

# pytest's word for the outcome of a test that neither passed nor failed -> the outcome in words.
_ENDS = {
    "skipped": "was skipped after its comparison",
    "xfailed": "failed, as its mark xfail expects",
    "xpassed": "passed in spite of its mark xfail",
}


def write_new_baselines(records: Sequence[TestRecord], passed: Set[str], options: Options) -> tuple[list[str], bool]:
    """Write the new baselines of passed tests; return lines for the summary, and True if every write succeeded.

    If a test was retried, only its last attempt counts.

    A file that another session has written since a test merged its launches with it stays as it is.
    """
    notes: list[str] = []
    good = True
    folder = options.baselines
    final = [record for record in records if not record.is_retried]
    compared = [(record, comparison.new) for record in final for comparison in record.comparisons]
    for tested, new in compared:
        if new is None:
            continue
        baseline = new.baseline
        if tested.nodeid not in passed:
            notes.append(f"not recorded, because the test {_ENDS.get(tested.outcome, 'failed')}: {baseline.case}")
            continue
        try:
            with locked_baselines(folder):
                old = read_baseline(folder, baseline.platform, baseline.case)
                if digest(old) != new.before:
                    changed = "not recorded, because another run has changed the baseline meanwhile; record again"
                    raise BaselineError(f"{baseline.case}: {changed}")
                write_baseline(folder, baseline)
            notes += [*change_lines(old, baseline), *new.detection]
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
    for record in records:
        if record.nodeid in passed:
            used[record.nodeid] = {one.case for one in record.comparisons if one.kind is ReferenceKind.BASELINE}
    platforms = {record.nodeid: record.platform for record in records}
    found = orphans(options.baselines, collected, used, platforms, options.rootdir)
    return [line.removeprefix(f"{options.rootdir}/") for line in found]


def change_lines(old: Baseline | None, new: Baseline) -> list[str]:
    """Return the values of a written baseline, and those that it had before where they differ, metric by metric."""
    launches = counted(len(new.center_launches), "launch")
    count = f"baseline {new.revision}: {launches}, {len(new.launches)} in the file"
    lines = [f"{'updated' if old else 'recorded'} {new.platform}: {new.case} ({count})"]
    for metric in METRICS.values():
        after, before = middle(metric, new.center_launches), middle(metric, old.center_launches) if old else None
        if after == before:
            continue
        shown = [format_value(value, metric.unit, exact=not metric.has_noise) for value in (before, after)]
        text = f"  {metric.name}: {' -> '.join(shown[before is None :])}"
        if isinstance(before, float) and isinstance(after, float) and before:
            text += f" ({(after - before) / abs(before):+.1%})"
        lines.append(text)
    if reason := new.forced.get(str(new.revision)):
        lines.append(f"  recorded although it is noisy: {reason}")
    return lines
