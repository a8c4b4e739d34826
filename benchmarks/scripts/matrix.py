"""Faults that the three commands of ``aorta init`` find in ordinary training scripts that nobody edited.

Run: python -m benchmarks.scripts.matrix --out matrix.json [--scripts ddp,gan] [--faults raise,lost]
    [--markdown FILE.md] [--cuda]

For each script: ``aorta init``, ``pytest --update-baselines``, ``pytest`` twice, and then ``pytest`` with each fault
of benchmarks/scripts/faults.py before the script. A cell names what was expected and did not come. ``--out`` keeps
the cells of interrupted runs. ``--cuda`` rewrites the scripts for GPUs, as many as are visible, which fails for those
that load batches in other processes. Scripts named after a library need it: accelerate, transformers, lightning,
deepspeed, whose CPU ranks (DS_ACCELERATOR=cpu) compile an extension with g++, and torchrec with fbgemm-gpu-cpu; 1.8.0
of both load with torch 2.13.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 900.0
HANG_S = 60
# The step of a fault that is in one step only.
IN_STEP = 10


@dataclass(frozen=True)
class Script:
    """A script of the folder ``unedited``, its number of optimizer steps, and words that ``aorta init`` needs.

    ``moves_batches`` is whether a library gives ranks their device.
    """

    name: str
    steps: int = 30
    starts_ranks: bool = False
    has_second: bool = False
    moves_batches: bool = False

    @property
    def words(self) -> list[str]:
        """The arguments of ``aorta init``."""
        return ["--", "python", f"{self.name}.py"] if self.starts_ranks else [f"{self.name}.py"]


SCRIPTS = {
    script.name: script
    for script in (
        Script("ddp"),
        Script("fsdp2"),
        Script("fsdp1"),
        Script("zero"),
        Script("accumulation"),
        Script("mingpt"),
        Script("gan", has_second=True),
        Script("loader"),
        Script("decoder", steps=24),
        Script("gpt", steps=22),
        Script("contrastive"),
        Script("vision"),
        Script("spawn", starts_ranks=True),
        Script("accelerate_loop", moves_batches=True),
        Script("hf_trainer", moves_batches=True),
        Script("lightning_fit", starts_ranks=True, moves_batches=True),
        Script("deepspeed_zero"),
        Script("torchrec_dlrm"),
    )
}


@dataclass(frozen=True)
class Fault:
    """A fault, and what pytest has to print: the cause, the rank and the step; empty for what has none.

    A ``small`` one may be named without a failure, where it is within the limit of a cost.
    """

    name: str
    cause: str = ""
    rank: str = ""
    step: str = ""
    passes: bool = False
    small: bool = False


_NUMBERS = r"[Rr]egression|replica"
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("clean", passes=True),
        Fault("clean again", passes=True),
        # Times of CPU ranks are not compared with a baseline.
        Fault("slow", passes=True),
        Fault("scaled", _NUMBERS),
        Fault("lost", _NUMBERS, step=str(IN_STEP)),
        Fault("last step", _NUMBERS, step="last"),
        Fault("kernel", r"aten::sin|sin_kernel", small=True),
        Fault("second", _NUMBERS),
        Fault("all-gather", r"Regression: collectives|all_gather"),
        Fault("NaN", r"NaN or infinite|is nan", step=str(IN_STEP)),
        Fault("raise", "planted by a test", rank="1"),
        Fault("hang", r"hang in|hang elsewhere|time limit", rank="1"),
        Fault("killed", r"SIGKILL|signal 9", rank="1"),
        Fault("exit code", r"exit code 3", rank="1"),
    )
}


@dataclass(frozen=True)
class Cell:
    """Result of a script with a fault; ``absent`` are expectations that did not come true."""

    script: str
    fault: str
    seconds: float
    absent: list[str] = field(default_factory=list)
    shown: str = ""

    @property
    def text(self) -> str:
        """The cell in a table."""
        return f"{', '.join(f'no {name}' for name in self.absent) or 'yes'}, {self.seconds:.0f} s"


def run(folder: Path, *words: str) -> tuple[int, str, float]:
    """Run a module of this Python in ``folder``, and return its exit code, its output and its seconds."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - began_s


_ON_CUDA = {
    # A rank of mp.spawn has no LOCAL_RANK.
    "def train(rank, size):": "def train(rank, size):\n    torch.cuda.set_device(rank)",
    '"gloo"': '"nccl"',
    '"cpu"': '"cuda"',
    "torch.Generator()": 'torch.Generator("cuda")',
    "use_cpu=True": "use_cpu=False",
    "cpu=True": "cpu=False",
    "devices=2": "devices=-1",
}
_CUDA_TENSORS = """import os, torch
if "LOCAL_RANK" in os.environ:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_default_device("cuda")
"""


def source_of(script: Script, is_cuda: bool) -> str:
    """Return the script's text; for GPUs, with another device wherever it names one."""
    source = (HERE / "unedited" / f"{script.name}.py").read_text(encoding="utf-8")
    if not is_cuda:
        return source
    for text, other in _ON_CUDA.items():
        source = source.replace(text, other)
    return source if script.moves_batches else _CUDA_TENSORS + source


def prepared(folder: Path, script: Script, source: str) -> list[Cell]:
    """Write the script's test and baseline, by the first two commands; return cells only if a command fails."""
    (folder / f"{script.name}.py").write_text(source, encoding="utf-8")
    for name, words in {
        "init": ("pytest_aorta.cli", "init", *script.words),
        "record": ("pytest", "--update-baselines"),
    }.items():
        code, output, seconds = run(folder, *words)
        print(f"{script.name}: {name}: exit code {code}, {seconds:.0f} s", flush=True)
        if code:
            return [Cell(script.name, name, seconds, ["success"], output[-2000:])]
    return []


def tried(folder: Path, script: Script, source: str, fault: Fault) -> Cell:
    """Run the script's test with a fault."""
    shutil.copy(HERE / "faults.py", folder)
    planted = f"import faults\nfaults.plant({fault.name!r}, {IN_STEP}, {script.steps})\n"
    text = source if fault.passes and fault.name != "slow" else planted + source
    (folder / f"{script.name}.py").write_text(text, encoding="utf-8")
    limit = [f"--aorta-timeout={HANG_S}"] if fault.name == "hang" else []
    code, output, seconds = run(folder, "pytest", *limit)
    return Cell(script.name, fault.name, round(seconds, 1), list(absent(script, fault, code, output)), output[-4000:])


def absent(script: Script, fault: Fault, code: int, output: str) -> Sequence[str]:
    """Return what the output lacks of what was expected."""
    if fault.passes:
        compared = re.search(r"[1-9]\d* metrics? unchanged", output)
        return [name for name, is_there in {"pass": code == 0, "comparison": compared}.items() if not is_there]
    step = str(script.steps) if fault.step == "last" else fault.step
    wanted = {
        "failure": code == 1 or (fault.small and code == 0 and "within its limit" in output),
        "cause": not fault.cause or re.search(fault.cause, output),
        "rank": not fault.rank or re.search(rf"rank {fault.rank}\b", output),
        "step": not step or re.search(rf"step {step}\b", output),
    }
    return [name for name, is_there in wanted.items() if not is_there]


def table(cells: Sequence[Cell]) -> str:
    """Return the cells as Markdown: a row for each script, a column for each fault."""
    by_place = {(cell.script, cell.fault): cell for cell in cells}
    scripts = [name for name in SCRIPTS if any(cell.script == name for cell in cells)]
    names = ["init", "record", *FAULTS]
    shown = [name for name in names if any(cell.fault == name for cell in cells)]
    rows = [["script", *shown], ["---"] * (1 + len(shown))]
    for script in scripts:
        found = (by_place.get((script, name)) for name in shown)
        rows.append([script, *(cell.text if cell else "-" for cell in found)])
    good = sum(not cell.absent for cell in cells)
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", f"{good} of {len(cells)} cells as expected"])


def main() -> None:
    """Fill the cells that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--cuda", action="store_true")
    arguments = parser.parse_args()
    cells = [Cell(**cell) for cell in json.loads(arguments.out.read_text())] if arguments.out.exists() else []
    for script in (SCRIPTS[name] for name in arguments.scripts.split(",") if name):
        done = {cell.fault for cell in cells if cell.script == script.name}
        faults = [FAULTS[name] for name in arguments.faults.split(",") if name not in done]
        faults = [fault for fault in faults if fault.name != "second" or script.has_second]
        if not faults or done & {"init", "record"}:
            continue
        with tempfile.TemporaryDirectory(prefix="aorta-matrix-") as folder:
            source = source_of(script, arguments.cuda)
            failed = prepared(Path(folder), script, source)
            cells += failed
            for fault in [] if failed else faults:
                cells.append(tried(Path(folder), script, source, fault))
                print(f"{script.name}: {fault.name}: {cells[-1].text}", flush=True)
                arguments.out.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
        arguments.out.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    text = table(cells)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
