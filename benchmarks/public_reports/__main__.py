"""What pytest says of faults that were reported in public, beside what it has to say.

Run: python -m benchmarks.public_reports [NAME...]

For each case of cases.yaml, in a new git repository: ``aorta init``, ``pytest --update-baselines``, ``pytest`` in what
git has tracked, and then ``pytest`` with each fault. The exit status is 1 if an outcome is not as
expected.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.scripts.matrix import run

HERE = Path(__file__).parent
SCRIPT = "train.py"
# What the first two commands write.
WRITTEN = ("test_train.py", "pytest.ini", "baselines")
# A rank that waits for one that is done is given half of it.
LIMIT = "--aorta-timeout=120"


@dataclass(frozen=True)
class Fault:
    """A later commit: a few words, its edits as text -> other text, and a regular expression of what pytest says."""

    change: str
    edits: dict[str, str]
    finds: str

    def planted(self, source: str) -> str:
        """Return the script with the fault.

        Raises:
            ValueError: A text to replace is not in the script exactly once.
        """
        for old, new in self.edits.items():
            if source.count(old) != 1:
                raise ValueError(f"{self.change}: {old!r} is in the script {source.count(old)} times, expected once")
            source = source.replace(old, new)
        return source


@dataclass(frozen=True)
class Case:
    """A row of cases.yaml; the file describes the keys."""

    name: str
    source: str
    faults: tuple[Fault, ...] = ()
    left: str = ""
    bare: str = ""
    never: str = ""

    def allows(self, output: str) -> bool:
        """Return whether an output has nothing that it may never contain."""
        return not (self.never and re.search(self.never, output))


@dataclass(frozen=True)
class Row:
    """The outcome of a script, beside the expected one."""

    case: Case
    change: str
    seconds: float
    outcome: str
    expected: str
    is_expected: bool

    def __str__(self) -> str:
        """Return the row of a Markdown table."""
        expected = self.expected + (f", never `{self.case.never}`" if self.case.never else "")
        verdict = "yes" if self.is_expected else "NO"
        cells = (self.case.name, self.change, f"{self.seconds:.0f}", self.outcome.partition("\n")[0], expected, verdict)
        return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    documents = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))
    return {
        name: Case(name, **document | {"faults": tuple(Fault(**fault) for fault in document.get("faults", ()))})
        for name, document in documents.items()
    }


def rows(case: Case, folder: Path) -> Iterator[Row]:
    """Yield the row of the sound script, and one for each fault if the sound script passes."""
    script = folder / SCRIPT
    shutil.copy(HERE / "scripts" / f"{case.name}.py", script)
    source = script.read_text(encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    commit(folder, SCRIPT)
    sound = sound_row(case, folder)
    yield sound
    for fault in case.faults if sound.outcome == "passes" else ():
        script.write_text(fault.planted(source), encoding="utf-8")
        _, output, seconds = run(folder, "pytest", LIMIT)
        found = findings(output)
        is_expected = re.search(fault.finds, found) is not None and case.allows(output)
        yield Row(case, fault.change, seconds, found, f"`{fault.finds}`", is_expected)


def sound_row(case: Case, folder: Path) -> Row:
    """Return the row of the sound script, whose outcome is ``passes`` or the first command that fails."""
    init_says = case.left or case.bare
    expected = ("not measured" if case.bare else "passes") + (f", init says `{init_says}`" if init_says else "")
    if case.left:
        run(folder, "torch.distributed.run", "--nproc-per-node=2", SCRIPT)
    code, said, seconds = run(folder, "pytest_aorta.cli", "init", LIMIT, SCRIPT)
    if code:
        is_expected = bool(case.bare) and re.search(case.bare, said) is not None
        ended = said.strip().splitlines()[-1]
        return Row(case, "none", seconds, f"init: exit code {code}: {ended}", expected, is_expected)
    outputs = ""
    # With -v, a test that passes shows its notes.
    for options in (["--update-baselines"], ["-v"]):
        code, output, added_s = run(folder, "pytest", LIMIT, *options)
        seconds += added_s
        outputs += output
        if code:
            return Row(case, "none", seconds, " ".join(["pytest", *options, findings(output)]), expected, False)
        commit(folder, *WRITTEN)
        # As in a clean clone.
        subprocess.run(["git", "clean", "-fdxq"], cwd=folder, check=True)
    is_expected = not case.bare and re.search(case.left, said) is not None and case.allows(outputs)
    return Row(case, "none", seconds, "passes", expected, is_expected)


def commit(folder: Path, *names: str) -> None:
    """Commit files."""
    subprocess.run(["git", "add", *names], cwd=folder, check=True)
    author = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "change"], cwd=folder, check=True)


def findings(output: str) -> str:
    """Return the lines of the failure, or the plugin's lines of the summary if nothing failed."""
    failure = [line[1:].strip() for line in output.splitlines() if line.startswith("E ")]
    return "\n".join(failure or re.findall(r"^aorta: .*test.*", output, re.MULTILINE) or output.splitlines()[-1:])


def main() -> int:
    """Print a row for each script of the cases that are named, all by default."""
    known = cases()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public_reports", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    names = parser.parse_args().names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"NAME: got {unknown[0]!r}, allowed are {', '.join(known)}")
    print("| case | change | seconds | outcome | expected | as expected |\n| --- | --- | --- | --- | --- | --- |")
    all_expected = True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="aorta-report-") as folder:
            for row in rows(known[name], Path(folder)):
                print(row, flush=True)
                all_expected &= row.is_expected
    return not all_expected


if __name__ == "__main__":
    sys.exit(main())
