"""Print a table of every reader: cases, defects and seconds. ``python -m tests.unit.fuzz [CASES [READER ...]]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.unit.fuzz.readers import READERS, run


def main() -> None:
    """Fuzz the readers whose names contain one of the given words, or all of them."""
    cases, words = int(sys.argv[1]) if len(sys.argv) > 1 else 300, sys.argv[2:]
    for reader in READERS:
        if not words or any(word in reader.name for word in words):
            with tempfile.TemporaryDirectory() as folder:
                survey = run(reader, cases, Path(folder), raises=False)
            print(f"| {reader.name} | {survey.cases:,} | {len(survey.defects)} | {survey.seconds:.0f} |", flush=True)
            for defect, count in survey.defects.most_common():
                print(f"    {count:6} {defect}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
