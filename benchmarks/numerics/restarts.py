"""Faults of a script's restart, and what a test with ``workload.compare_restart`` says of each.

Run: python -m benchmarks.numerics.restarts [NAME...]

Each fault is an edit of resumable.py, launched on 2 CPU ranks straight on and with two restarts. The exit status is 1
if a fault is not named, or an unedited script fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

SCRIPT = Path(__file__).with_name("resumable.py")
TEST = """\
import json
from pathlib import Path

import pytest

CASES = json.loads(Path("cases.json").read_text())


@pytest.mark.world(size=2, device="cpu")
@pytest.mark.parametrize("name", CASES)
def test_restart(workload, name):
    order, source = CASES[name]
    Path("train.py").write_text(source)
    args = ["--steps=11", f"--order={order}"]
    workload.compare_restart("train.py", args, [*args, "--resume=checkpoints"], after=3, restarts=2)
"""


@dataclass(frozen=True)
class Fault:
    """An edit of the script: a text and another one, what the failure has to say, and the order of data."""

    name: str
    old: str = ""
    new: str = ""
    says: str = ""
    order: str = "epoch"

    def planted(self, source: str) -> str:
        """Return the script with the fault.

        Raises:
            ValueError: The text to replace is not in the script exactly once.
        """
        if self.old and source.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} is in the script {source.count(self.old)} times, expected once"
            )
        return source.replace(self.old, self.new) if self.old else source


_LOAD = "        part.load_state_dict(state[name])\n"


def _not_loaded(name: str) -> tuple[str, str]:
    return _LOAD, f"        if name != {name!r}:\n    {_LOAD}"


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("correct"),
        Fault("correct again"),
        Fault("correct, loader's generator", order="generator"),
        Fault("correct, loader's generator again", order="generator"),
        Fault(
            "sampler begins the epoch again", "range(position)", "range(0)", "order of data: .* as in step 1 of the run"
        ),
        Fault(
            "no set_epoch after a restart",
            "manual_seed(7 + epoch)",
            "manual_seed(7 + epoch * (arguments.resume is None))",
            "restart 1 of 2: order of data: .* in step 5 on all ranks, as in step 1",
        ),
        Fault(
            "loader's generator not restored",
            'generator.set_state(state["generator"])',
            "pass",
            "order of data: the same samples|order of data: other samples",
            "generator",
        ),
        Fault(
            "random state not restored on rank 1",
            'torch.set_rng_state(state["random"])',
            'torch.set_rng_state(state["random"]) if rank == 0 else None',
            "random state: torch's generator differs in step 4 on rank 1;",
        ),
        Fault(
            "seed of dropout by start",
            'torch.set_rng_state(state["random"])',
            "torch.manual_seed(1000 + step + rank)",
            "random state: torch's generator differs in step 4 on ranks 0, 1;",
        ),
        Fault(
            "scheduler not restored",
            *_not_loaded("scheduler"),
            "the learning rate is .* in step 5, as in step 2 of the run",
        ),
        Fault(
            "scheduler stepped twice",
            "while step < arguments.steps:",
            "if state:\n    scheduler.step()\nwhile step < arguments.steps:",
            "the learning rate is .* in step 4, as in step 5 of the run",
        ),
        Fault(
            "gradient scaler not restored", *_not_loaded("scaler"), "the gradient scale is 1024 in step 4, as in step 2"
        ),
        Fault(
            "momentum not restored",
            *_not_loaded("optimizer"),
            "optimizer state: step 4 begins with none",
        ),
        Fault(
            "step counter off by one",
            '{"step": step,',
            '{"step": step - 1,',
            "number of steps: 15 when restarted, 4 steps more",
        ),
        Fault(
            "buffers of BatchNorm not saved",
            "saved |= ",
            'saved["model"] |= torch.nn.BatchNorm1d(16, affine=False).state_dict(prefix="1.")\n            saved |= ',
            "buffers: step 4 ends with others on all ranks: .*1.running_mean",
        ),
        Fault("averaged model not restored", *_not_loaded("average"), "averaged model: step 4 begins .*AveragedModel"),
        Fault(
            "second restart loads the first checkpoint",
            "max(arguments.resume",
            "min(arguments.resume",
            "restart 2 of 2: weights: step 7 begins with others on all ranks.* as in step 3 of the run",
        ),
        Fault(
            "samples of uneven shards lost",
            "shard = data[rank::size]",
            "shard = data[: len(data) // size * size if arguments.resume else None][rank::size]",
            "order of data: .* in step 4 on rank 0",
        ),
    )
}


@dataclass(frozen=True)
class Cell:
    """What a test said of a fault."""

    name: str
    line: str
    seconds: float

    @property
    def is_named(self) -> bool:
        """Whether the first line says what the fault is; of a correct script, whether nothing was said."""
        says = FAULTS[self.name].says
        return bool(re.search(says, self.line)) if says else not self.line


def tried(names: list[str], folder: Path) -> list[Cell]:
    """Run one test for each name in ``folder``.

    Raises:
        RuntimeError: pytest itself failed.
    """
    source = SCRIPT.read_text(encoding="utf-8")
    planted = {name: (FAULTS[name].order, FAULTS[name].planted(source)) for name in names}
    (folder / "cases.json").write_text(json.dumps(planted), encoding="utf-8")
    (folder / "train.py").write_text(source, encoding="utf-8")
    (folder / "test_restart.py").write_text(TEST, encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "--aorta-launcher=forkserver", "--aorta-gpus=0", "--junitxml=found.xml"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=folder, capture_output=True, text=True)
    if done.returncode > 1:
        raise RuntimeError(done.stdout + done.stderr)
    found = []
    cases = {case.get("name"): case for case in ElementTree.parse(folder / "found.xml").iter("testcase")}
    for name in names:
        case = cases[f"test_restart[{name}]"]
        failure = case.find("failure")
        lines = (failure.get("message") or "").splitlines() if failure is not None else []
        found.append(Cell(name, "".join(lines[:1]), float(case.get("time", 0))))
    return found


def main() -> None:
    """Try the faults that are asked for, and print the table."""
    names = sys.argv[1:] or [*FAULTS]
    with tempfile.TemporaryDirectory() as folder:
        cells = tried(names, Path(folder))
    print("| fault | first line | seconds |\n| --- | --- | --- |")
    for cell in cells:
        print(
            f"| {cell.name} | {cell.line or 'passes'}{'' if cell.is_named else ' (NOT NAMED)'} | {cell.seconds:.1f} |"
        )
    print(f"\n{sum(cell.is_named for cell in cells)} of {len(cells)} as expected")
    sys.exit(not all(cell.is_named for cell in cells))


if __name__ == "__main__":
    main()
