"""``aorta report``: a page about the results that pytest has kept."""

import argparse
import re
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.text import emit
from pytest_aorta.plan.options import file_ending_in
from pytest_aorta.report.data import dataset_report
from pytest_aorta.report.write import require_packages, write_report

# A label is part of a file's name.
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "results",
        nargs="+",
        metavar="LABEL=PATH",
        help="a result.json, or a folder that contains such files (--aorta-results); a label may be repeated",
    )
    parser.add_argument("--reference", metavar="LABEL", help="label to compare with (default: the first of two)")
    parser.add_argument("--candidate", metavar="LABEL", help="label to compare (default: the second of two)")
    parser.add_argument(
        "-o", "--output", type=file_ending_in(".html"), default=Path("report.html"), help="file (default: report.html)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and its files; return 1 if results were left out."""
    paths = labelled(arguments.results)
    reference, candidate = sides(list(paths), arguments.reference, arguments.candidate)
    require_packages()
    report = dataset_report(paths, candidate, reference)
    with raised_as(AortaError, f"{arguments.output}: not written: "):
        written = write_report(report, arguments.output)
    emit([*(f"WARNING: {warning}" for warning in report.warnings), *map(str, written)])
    return ExitCode.PROBLEM if report.warnings else ExitCode.OK


def labelled(given: list[str]) -> dict[str, list[Path]]:
    """Return each label -> its paths, in the given order.

    Raises:
        UsageError: A label is missing or can't be part of a file name, or a path does not exist.
    """
    found: dict[str, list[Path]] = {}
    for text in given:
        label, _, path = text.partition("=")
        if not path or not _LABEL.fullmatch(label):
            raise UsageError(f"LABEL=PATH: got {text!r}; a label has up to 64 letters, digits, '.', '_', '+', '-'")
        if not Path(path).exists():
            raise UsageError(f"{text}: {path} does not exist")
        found.setdefault(label, []).append(Path(path))
    return found


def sides(labels: list[str], reference: str | None, candidate: str | None) -> tuple[str, str]:
    """Return the labels of reference and candidate.

    Raises:
        UsageError: The options do not select two of the given labels.
    """
    if reference is None and candidate is None and len(labels) == 2:
        return labels[0], labels[1]
    if len(labels) == 1:
        raise UsageError(f"report takes two labels, e.g. old=results-a new=results-b; got {labels[0]!r} alone")
    left = [label for label in labels if label not in (reference, candidate)]
    if len(labels) == 2:
        reference, candidate = reference or left[-1], candidate or left[-1]
    for name, value in (("--reference", reference), ("--candidate", candidate)):
        if value not in labels:
            raise UsageError(f"{name}: got {value!r}, allowed is one of the labels {labels}")
    if reference == candidate:
        raise UsageError(f"--reference and --candidate are both {reference!r}; give two of the labels {labels}")
    return str(reference), str(candidate)
