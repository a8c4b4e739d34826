"""What the first line of a failure says of edits of ordinary training scripts.

Run: python -m benchmarks.scripts.edits [--resume] [--clean N] [SCRIPT...]

For each script of edits.yaml: ``aorta init``, ``pytest --update-baselines``, and ``pytest`` with each edit. A name that
is no script is a workload, whose package is copied and edited. A sentence is right if the regular expression of the
file finds it, silent if there is none, and else wrong. The exit status is 1 if one is wrong, or fewer than 85% are
right. Scripts named after a library need it.

The rows of a script are written into docs/edits.csv when it has ended; ``--resume`` leaves out scripts that have rows.
With ``--clean``, nothing is edited or written: the code runs N times as it is, by warm launches, and the exit status is
1 if one of these tests fails.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import aorta_workloads
import yaml

from benchmarks.public_reports.__main__ import Fault
from benchmarks.scripts.matrix import HERE, SCRIPTS, run

TABLE = HERE.parents[1] / "docs/edits.csv"
_RIGHT, _SILENT, _WRONG = "right", "silent", "WRONG"
_PASSES = "passes"
# A restart that goes on otherwise is a finding of its own.
_PYTEST = ("pytest", "-k", "not restart")
_WARM = "--aorta-launcher=forkserver"
_LEAST_RIGHT = 0.85
_TEST = """
import pytest

@pytest.mark.numerics
@pytest.mark.world(size=2)
def test_workload(workload):
    workload.check(workload.run({!r}, steps=6, deterministic=True, max_grad_norm=1.0))
"""


@dataclass(frozen=True)
class Row:
    """The first line of the failure of an edited script, and whether that is a sentence that is right."""

    script: str
    edit: str
    line: str
    seconds: str
    sentence: str


def prepare(name: str, folder: Path, *options: str) -> None:
    """Write the script or a copy of the workloads, its test and its baseline, which is recorded with ``options``.

    Raises:
        RuntimeError: A command fails.
    """
    commands: list[tuple[str, ...]] = [(*_PYTEST, "--update-baselines", *options)]
    if name in SCRIPTS:
        shutil.copy(HERE / "unedited" / f"{name}.py", folder)
        commands = [("pytest_aorta.cli", "init", *SCRIPTS[name].words), *commands]
    else:
        shutil.copytree(Path(aorta_workloads.__file__).parent, folder / "aorta_workloads")
        (folder / "test_workload.py").write_text(_TEST.format(name), encoding="utf-8")
    for words in commands:
        code, output, _ = run(folder, *words)
        if code:
            raise RuntimeError(f"{name}: {' '.join(words)}: exit code {code}: {output[-2000:]}")


def tried(name: str, edit: str, says: str, folder: Path) -> Row:
    """Run the test, and compare the first line of its failure with the regular expression ``says``.

    Raises:
        RuntimeError: pytest ends otherwise than by a test that passes or fails.
    """
    code, output, seconds = run(folder, *_PYTEST)
    if code > 1:
        raise RuntimeError(f"{name}: {edit}: exit code {code}: {output[-2000:]}")
    # Training that goes on from a file would begin where the run before has ended.
    (folder / "snapshot.pt").unlink(missing_ok=True)
    first = next((line[1:].strip() for line in output.splitlines() if line.startswith("E ")), _PASSES)
    line = first.removeprefix("pytest_aorta.ComparisonFailed: ")
    is_sentence = not re.match(rf"({_PASSES}|Regression|Missing|Inconclusive|Improved|Not applicable)\b", line)
    sentence = (_RIGHT if says and re.search(says, line) else _WRONG) if is_sentence else _SILENT
    return Row(name, edit, line, f"{seconds:.0f}", sentence)


def clean_launches(name: str, count: int, folder: Path) -> int:
    """Run the test so many times as the code is, by warm launches; return how many have passed, and print the rest."""
    prepare(name, folder, _WARM)
    tests = [path.name for path in folder.glob("test_*.py")] * count
    _, output, seconds = run(folder, *_PYTEST, "-p", "no:randomly", "--keep-duplicates", _WARM, *tests)
    passed = re.search(r"(\d+) passed", output)
    print(name, passed and passed[0], f"{seconds:.0f} s", sep=" | ", flush=True)
    print(*(line for line in output.splitlines() if line.startswith("E ")), sep="\n", end="", flush=True)
    return int(passed[1]) if passed else 0


def rows(name: str, edits: Mapping[str, Mapping[str, object]], folder: Path) -> Iterator[Row]:
    """Yield the row of each edit."""
    for change, edit in edits.items():
        fault = Fault(change, edit["edits"], str(edit["says"]))  # type: ignore[arg-type]
        file = folder / str(edit.get("file", f"{name}.py"))
        source = file.read_text(encoding="utf-8")
        file.write_text(fault.planted(source), encoding="utf-8")
        yield tried(name, change, fault.finds, folder)
        file.write_text(source, encoding="utf-8")


def stored() -> list[Row]:
    """Return the rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def write(found: Sequence[Row], order: Sequence[str]) -> None:
    """Write the rows of a script into the table, whose scripts are in an ``order``."""
    others = [row for row in stored() if row.script != found[0].script]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in sorted([*others, *found], key=lambda row: order.index(row.script)))


def main() -> int:
    """Print a row for each edit of the scripts that are named, all by default."""
    known = yaml.safe_load((HERE / "edits.yaml").read_text(encoding="utf-8"))
    os.environ["PYTHONPATH"] = "."  # a copy of the workloads in the working folder comes first
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts.edits", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help=f"one of {', '.join(known)}")
    parser.add_argument("--resume", action="store_true", help="leave out scripts that have rows in docs/edits.csv")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="run each script N times as it is")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"SCRIPT: got {unknown[0]!r}, allowed are {', '.join(known)}")
    done = {row.script for row in stored()} if arguments.resume else set()
    found: Counter[str] = Counter()
    for name in (name for name in arguments.names or known if name not in done):
        with tempfile.TemporaryDirectory(prefix="aorta-edits-") as kept:
            folder, own = Path(kept), []
            if arguments.clean:
                passed = clean_launches(name, arguments.clean, folder)
                found.update({_PASSES: passed, "fails": arguments.clean - passed})
                continue
            prepare(name, folder)
            for row in rows(name, known[name], folder):
                own.append(row)
                print(*astuple(row), sep=" | ", flush=True)
            found.update(row.sentence for row in own)
            write(own, [*known])
    print(dict(found))
    if arguments.clean:
        return bool(found["fails"])
    return bool(found[_WRONG] or found[_RIGHT] < _LEAST_RIGHT * found.total())


if __name__ == "__main__":
    sys.exit(main())
