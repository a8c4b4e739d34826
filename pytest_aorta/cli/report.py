"""``aorta report``: a page about the results that pytest has kept."""

import argparse
import re
from argparse import ArgumentTypeError
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
        type=_labelled,
        help="a result.json, or a folder that contains such files (--aorta-results); the second label is compared with "
        "the first, and each may be repeated",
    )
    parser.add_argument(
        "-o", "--output", type=file_ending_in(".html"), default=Path("report.html"), help="file (default: report.html)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and its files; return 1 if results were left out.

    Raises:
        UsageError: There are not two labels.
    """
    paths: dict[str, list[Path]] = {}
    for label, path in arguments.results:
        paths.setdefault(label, []).append(path)
    if len(paths) != 2:
        raise UsageError(f"LABEL=PATH: got {[*paths]}, allowed are two labels, e.g. old=results-a new=results-b")
    require_packages()
    reference, candidate = paths
    report = dataset_report(paths, candidate, reference)
    with raised_as(AortaError, f"{arguments.output}: not written: "):
        written = write_report(report, arguments.output)
    emit([*(f"WARNING: {warning}" for warning in report.warnings), *map(str, written)])
    return ExitCode.PROBLEM if report.warnings else ExitCode.OK


def _labelled(text: str) -> tuple[str, Path]:
    label, _, path = text.partition("=")
    if not path or not _LABEL.fullmatch(label):
        raise ArgumentTypeError(f"got {text!r}; a label has up to 64 letters, digits, '.', '_', '+', '-'")
    if not Path(path).exists():
        raise ArgumentTypeError(f"{text}: {path} does not exist")
    return label, Path(path)
