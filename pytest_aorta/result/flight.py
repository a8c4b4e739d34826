"""What torch's flight recorder says about a hang: which collective, and which ranks are missing from it.

NCCL ranks dump their last collectives when one of them runs out of time. The dumps are pickles, which only torch's own
analyser reads, in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.files import write_text

ANALYSER = "torch.distributed.flight_recorder.fr_trace"
REPORT = "flight_recorder.txt"
_LIMIT_S = 30.0
_MAX_REPORT = 1 << 20
_SEQUENCE = re.compile(r"Not all ranks joining collective, sequence number: (\d+)")
_COLLECTIVE = re.compile(r"collective: (\S+)")
_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")


@dataclass(frozen=True)
class FlightVerdict:
    """The first collective that not all ranks joined, and who is missing."""

    collective: str
    sequence: int
    missing_ranks: tuple[int, ...]


def flight_verdict(run_dir: Path) -> FlightVerdict | None:
    """Analyse the dumps of a launch, and keep the analyser's whole report beside them; None without a finding."""
    folder = run_dir / "flight"
    if not any(folder.glob("rank_*")):
        return None
    command = [sys.executable, "-m", ANALYSER, str(folder), "--prefix", "rank_", "--allow-incomplete-ranks"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False, cwd=run_dir
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        report = f"the analyser did not end: {error}"
    else:
        report = ended.stdout + ended.stderr
    write_text(run_dir / REPORT, report[:_MAX_REPORT])
    return read_report(report)


def read_report(report: str) -> FlightVerdict | None:
    """The first finding in the analyser's text."""
    sequence = _SEQUENCE.search(report)
    if sequence is None:
        return None
    collective, missing = (pattern.search(report, sequence.end()) for pattern in (_COLLECTIVE, _MISSING))
    if collective is None or missing is None:
        return None
    ranks = tuple(sorted(int(rank) for rank in missing[1].split(",")))
    return FlightVerdict(collective[1], int(sequence[1]), ranks)
