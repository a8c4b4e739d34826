"""Reads the dumps of torch's flight recorder to find the collective that hangs and the ranks missing from it.

NCCL ranks dump their last collectives when a collective times out. The dumps are pickles, so only torch's own analyzer
reads them, in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.files import write_text
from pytest_aorta.result.folder import FLIGHT_FOLDER, FLIGHT_PREFIX, FLIGHT_REPORT

ANALYZER = "torch.distributed.flight_recorder.fr_trace"
_LIMIT_S = 30.0
_MAX_REPORT = 1 << 20
_SEQUENCE = re.compile(r"Not all ranks joining collective, sequence number: (\d+)")
_COLLECTIVE = re.compile(r"collective: (\S+)")
_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")


@dataclass(frozen=True)
class FlightVerdict:
    """The first collective that not all ranks joined, and the ranks that are missing from it."""

    collective: str
    sequence: int
    missing_ranks: tuple[int, ...]


def flight_verdict(run_dir: Path) -> FlightVerdict | None:
    """Analyze the dumps of a launch and write the analyzer's report to the run folder; None without a finding."""
    folder = run_dir / FLIGHT_FOLDER
    if not any(folder.glob(f"{FLIGHT_PREFIX}*")):
        return None
    command = [sys.executable, "-m", ANALYZER, str(folder), "--prefix", FLIGHT_PREFIX, "--allow-incomplete-ranks"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False, cwd=run_dir
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        report = f"{ANALYZER} did not finish: {error}"
    else:
        report = ended.stdout + ended.stderr
    write_text(run_dir / FLIGHT_REPORT, report[:_MAX_REPORT])
    return read_report(report)


def read_report(report: str) -> FlightVerdict | None:
    """Return the first finding in the analyzer's text; None without a finding."""
    sequence = _SEQUENCE.search(report)
    if sequence is None:
        return None
    collective, missing = (pattern.search(report, sequence.end()) for pattern in (_COLLECTIVE, _MISSING))
    if collective is None or missing is None:
        return None
    ranks = tuple(sorted(int(rank) for rank in missing[1].split(",")))
    return FlightVerdict(collective[1], int(sequence[1]), ranks)
