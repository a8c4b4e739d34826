"""What the first line of a failure says of edits of ordinary training scripts.

Run: python -m benchmarks.scripts.edits [SCRIPT...]

For each script of edits.yaml: ``aorta init``, ``pytest --update-baselines``, and ``pytest`` of the same code, which has
to pass; then ``pytest`` with each edit. A name that is no script is a workload, whose package is copied and edited. A
sentence is right if the regular expression of the file finds it, silent if there is none, and else wrong. The exit
status is 1 if one is wrong, or fewer than 85% are right. Scripts named after a library need it. The sections of the
scripts in docs/edits.md are written anew.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aorta_workloads
import yaml

from benchmarks.public_reports.__main__ import Fault
from benchmarks.scripts.matrix import HERE, SCRIPTS, run
from pytest_aorta.common.text import brief

PAGE = HERE.parents[1] / "docs/edits.md"
_RIGHT, _SILENT, _WRONG = "right", "silent", "WRONG"
_LONGEST = 56
_LEAST_RIGHT = 0.85
_TEST = """
import pytest

@pytest.mark.numerics
@pytest.mark.world(size=2)
def test_workload(workload):
    workload.check(workload.run({!r}, steps=6, deterministic=True, max_grad_norm=1.0))
"""


def prepare(name: str, folder: Path) -> list[tuple[str, ...]]:
    """Write the script, or a copy of the workloads with a test, and return the commands before its first edit."""
    if name in SCRIPTS:
        shutil.copy(HERE / "unedited" / f"{name}.py", folder)
        return [("pytest_aorta.cli", "init", *SCRIPTS[name].words)]
    shutil.copytree(Path(aorta_workloads.__file__).parent, folder / "aorta_workloads")
    (folder / "test_workload.py").write_text(_TEST.format(name), encoding="utf-8")
    return []


def rows(name: str, edits: dict[str, dict[str, object]], folder: Path) -> Iterator[tuple[str, str, float, str]]:
    """Yield the edit, the first line of its failure, the seconds and the outcome; first of the script as it is.

    Raises:
        RuntimeError: A command fails for the script as it is.
    """
    for words in (*prepare(name, folder), ("pytest", "--update-baselines"), ("pytest",)):
        code, output, seconds = run(folder, *words)
        if code:
            raise RuntimeError(f"{name}: {' '.join(words)}: exit code {code}: {output[-2000:]}")
    yield "none", "passes", seconds, _RIGHT
    for change, edit in edits.items():
        fault = Fault(change, edit["edits"], str(edit["says"]))  # type: ignore[arg-type]
        file = folder / str(edit.get("file", f"{name}.py"))
        source = file.read_text(encoding="utf-8")
        file.write_text(fault.planted(source), encoding="utf-8")
        code, output, seconds = run(folder, "pytest")
        file.write_text(source, encoding="utf-8")
        if code > 1:
            raise RuntimeError(f"{name}: {change}: exit code {code}: {output[-2000:]}")
        first = next((line[1:].strip() for line in output.splitlines() if line.startswith("E ")), "")
        says = first.removeprefix("pytest_aorta.ComparisonFailed: ")
        is_sentence = bool(says) and not re.match(r"(Regression|Missing|Inconclusive|Improved|Not applicable)\b", says)
        outcome = (_RIGHT if re.search(fault.finds, says) and fault.finds else _WRONG) if is_sentence else _SILENT
        yield change, says or "passes", seconds, outcome
        for left in ("snapshot.pt",):
            (folder / left).unlink(missing_ok=True)


def write(name: str, found: list[tuple[str, str, float, str]]) -> None:
    """Write the section of a script into the page: a line for each edit."""
    lines = [f"## {name}\n\n"]
    for change, first, seconds, outcome in found[1:]:
        says = brief(first.split("; ")[0].replace("`", ""), _LONGEST) if outcome == _RIGHT else ""
        lines.append(f"- {change}, {seconds:.0f}s: {f'`{says}`' if says else '-'}\n")
    head, *sections = re.split(r"(?m)^(?=## )", PAGE.read_text(encoding="utf-8"))
    known = {section.split()[1]: section.strip() for section in sections} | {name: "".join(lines).strip()}
    PAGE.write_text("\n\n".join([head.strip(), *known.values()]) + "\n", encoding="utf-8")


def main() -> int:
    """Print a row for each edit of the scripts that are named, all by default."""
    known = yaml.safe_load((HERE / "edits.yaml").read_text(encoding="utf-8"))
    os.environ["PYTHONPATH"] = "."  # a copy of the workloads in the working folder comes first
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts.edits", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help=f"one of {', '.join(known)}")
    names = parser.parse_args().names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"SCRIPT: got {unknown[0]!r}, allowed are {', '.join(known)}")
    found: Counter[str] = Counter()
    print("| script | edit | first line | seconds | sentence |\n| --- | --- | --- | --- | --- |")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="aorta-edits-") as folder:
            tried = []
            for change, first, seconds, outcome in rows(name, known[name], Path(folder)):
                tried.append((change, first, seconds, outcome))
                found[outcome] += change != "none"
                print(f"| {name} | {change} | {first.replace('|', ' ')} | {seconds:.0f} | {outcome} |", flush=True)
            write(name, tried)
    print(dict(found))
    return bool(found[_WRONG] or found[_RIGHT] < _LEAST_RIGHT * found.total())


if __name__ == "__main__":
    sys.exit(main())
