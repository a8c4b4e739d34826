"""What the first line of a failure says of edits of ordinary training scripts.

Run: python -m benchmarks.scripts.edits [SCRIPT...]

For each script of edits.yaml: ``aorta init``, ``pytest --update-baselines``, and ``pytest`` of the same code, which has
to pass; then ``pytest`` with each edit. A sentence is right if the regular expression of the file finds it, silent if
there is none, and else wrong. The exit status is 1 if one is wrong, or fewer than 85% are right. Scripts named after a
library need it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.public_reports.__main__ import Fault
from benchmarks.scripts.matrix import HERE, SCRIPTS, run

_RIGHT, _SILENT, _WRONG = "right", "silent", "WRONG"
_LEAST_RIGHT = 0.85


def rows(name: str, edits: dict[str, dict[str, object]], folder: Path) -> Iterator[tuple[str, str, float, str]]:
    """Yield the edit, the first line of its failure, the seconds and the outcome; first of the script as it is.

    Raises:
        RuntimeError: A command fails for the script as it is.
    """
    source = (HERE / "unedited" / f"{name}.py").read_text(encoding="utf-8")
    script = folder / f"{name}.py"
    script.write_text(source, encoding="utf-8")
    for words in (("pytest_aorta.cli", "init", *SCRIPTS[name].words), ("pytest", "--update-baselines"), ("pytest",)):
        code, output, seconds = run(folder, *words)
        if code:
            raise RuntimeError(f"{name}: {' '.join(words)}: exit code {code}: {output[-2000:]}")
    yield "none", "passes", seconds, _RIGHT
    for change, edit in edits.items():
        fault = Fault(change, edit["edits"], str(edit["says"]))  # type: ignore[arg-type]
        script.write_text(fault.planted(source), encoding="utf-8")
        _, output, seconds = run(folder, "pytest")
        first = next((line[1:].strip() for line in output.splitlines() if line.startswith("E ")), "")
        says = first.removeprefix("pytest_aorta.ComparisonFailed: ")
        is_sentence = bool(says) and not re.match(r"(Regression|Missing|Inconclusive|Improved|Not applicable)\b", says)
        outcome = (_RIGHT if re.search(fault.finds, says) and fault.finds else _WRONG) if is_sentence else _SILENT
        yield change, says or "passes", seconds, outcome
        for left in ("snapshot.pt",):
            (folder / left).unlink(missing_ok=True)


def main() -> int:
    """Print a row for each edit of the scripts that are named, all by default."""
    known = yaml.safe_load((HERE / "edits.yaml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts.edits", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help=f"one of {', '.join(known)}")
    names = parser.parse_args().names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"SCRIPT: got {unknown[0]!r}, allowed are {', '.join(known)}")
    found: Counter[str] = Counter()
    print("| script | edit | first line | seconds | sentence |\n| --- | --- | --- | --- | --- |")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="aorta-edits-") as folder:
            for change, first, seconds, outcome in rows(name, known[name], Path(folder)):
                found[outcome] += change != "none"
                print(f"| {name} | {change} | {first.replace('|', ' ')} | {seconds:.0f} | {outcome} |", flush=True)
    print(dict(found))
    return bool(found[_WRONG] or found[_RIGHT] < _LEAST_RIGHT * found.total())


if __name__ == "__main__":
    sys.exit(main())
