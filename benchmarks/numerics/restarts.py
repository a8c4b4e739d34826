"""Faults of a script's restart, and what a test with ``workload.compare_restart`` says of each.

Run: python -m benchmarks.numerics.restarts [NAME...]

Each fault is an edit of a script in resumable/, launched on 2 CPU ranks straight on and with two restarts. The exit
status is 1 if a fault is not named, or an unedited script fails. Scripts of accelerate, transformers and lightning are
left out by name where these are not installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

SCRIPTS = Path(__file__).with_name("resumable")
LOOP, ACCELERATE, TRAINER, LIGHTNING, DCP = "loop", "accelerate_loop", "hf_trainer", "lightning_fit", "checkpoint"
# Script -> the packages that it needs beside torch.
NEEDS = {ACCELERATE: ["accelerate"], TRAINER: ["transformers", "accelerate"], LIGHTNING: ["lightning"]}
TEST = """\
import json
from pathlib import Path

import pytest

CASES = json.loads(Path("cases.json").read_text())


@pytest.mark.world(size=2, device="cpu")
@pytest.mark.parametrize("name", CASES)
def test_restart(workload, name):
    Path("train.py").write_text(CASES[name])
    args = ["--steps=11"]
    workload.compare_restart("train.py", args, [*args, "--resume=checkpoints"], after=3, restarts=2)
"""


@dataclass(frozen=True)
class Fault:
    """A script with texts that others replace, and what the failure has to say; nothing of a correct script."""

    name: str
    script: str = LOOP
    edits: Mapping[str, str] = field(default_factory=dict)
    says: str = ""

    @property
    def lacks(self) -> list[str]:
        """The packages that the script needs and that are not installed."""
        return [name for name in NEEDS.get(self.script, ()) if importlib.util.find_spec(name) is None]

    def planted(self) -> str:
        """Return the script with the fault.

        Raises:
            ValueError: A text to replace is not in the script exactly once.
        """
        source = (SCRIPTS / f"{self.script}.py").read_text(encoding="utf-8")
        for old, new in self.edits.items():
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} is {source.count(old)} times in {self.script}, expected once")
            source = source.replace(old, new)
        return source


def _not_loaded(name: str) -> dict[str, str]:
    load = "        part.load_state_dict(state[name])\n"
    return {load: f"        if name != {name!r}:\n    {load}"}


_BY_GENERATOR = {'if arguments.order == "epoch":': "if False:"}
FAULTS = {
    fault.name: fault
    for fault in (
        *(
            Fault(f"correct {script}{again}", script)
            for script in (LOOP, ACCELERATE, TRAINER, LIGHTNING, DCP)
            for again in ("", ", again")
        ),
        Fault("correct, loader's generator", LOOP, _BY_GENERATOR),
        Fault("correct, loader's generator, again", LOOP, _BY_GENERATOR),
        Fault(
            "sampler begins the epoch again",
            LOOP,
            {"range(position)": "range(0)"},
            "order of data: .* as in step 1 of the run",
        ),
        Fault(
            "no set_epoch after a restart",
            LOOP,
            {"manual_seed(7 + epoch)": "manual_seed(7 + epoch * (arguments.resume is None))"},
            "restart 1 of 2: order of data: .* in step 5 on all ranks, as in step 1",
        ),
        Fault(
            "loader's generator not restored",
            LOOP,
            {**_BY_GENERATOR, 'generator.set_state(state["generator"])': "pass"},
            "order of data: the same samples|order of data: other samples",
        ),
        Fault(
            "random state not restored on rank 1",
            LOOP,
            {'torch.set_rng_state(state["random"])': 'torch.set_rng_state(state["random"]) if rank == 0 else None'},
            "random state: torch's generator differs in step 4 on rank 1;",
        ),
        Fault(
            "seed of dropout by start",
            LOOP,
            {'torch.set_rng_state(state["random"])': "torch.manual_seed(1000 + step + rank)"},
            "random state: torch's generator differs in step 4 on ranks 0, 1;",
        ),
        Fault(
            "scheduler not restored",
            LOOP,
            _not_loaded("scheduler"),
            "the learning rate is .* in step 5, as in step 2 of the run",
        ),
        Fault(
            "scheduler stepped twice",
            LOOP,
            {"while step < arguments.steps:": "if state:\n    scheduler.step()\nwhile step < arguments.steps:"},
            "the learning rate is .* in step 4, as in step 5 of the run",
        ),
        Fault(
            "gradient scaler not restored",
            LOOP,
            _not_loaded("scaler"),
            "the gradient scale is 1024 in step 4, as in step 2",
        ),
        Fault("momentum not restored", LOOP, _not_loaded("optimizer"), "optimizer state: step 4 begins with none"),
        Fault(
            "step counter off by one",
            LOOP,
            {'{"step": step,': '{"step": step - 1,'},
            "number of steps: 15 when restarted, 4 steps more",
        ),
        Fault(
            "buffers of BatchNorm not saved",
            LOOP,
            {
                "saved |= ": 'saved["model"] |= torch.nn.BatchNorm1d(16, affine=False).state_dict(prefix="1.")\n'
                "            saved |= "
            },
            "buffers: step 4 ends with others on all ranks: .*1.running_mean",
        ),
        Fault(
            "averaged model not restored",
            LOOP,
            _not_loaded("average"),
            "averaged model: step 4 begins .*AveragedModel",
        ),
        Fault(
            "second restart loads the first checkpoint",
            LOOP,
            {"max(arguments.resume": "min(arguments.resume"},
            "restart 2 of 2: weights: step 7 begins with others on all ranks.* as in step 3 of the run",
        ),
        Fault(
            "samples of uneven shards lost",
            LOOP,
            {
                "shard = data[rank::size]": "shard = data[: len(data) // size * size if arguments.resume else None]"
                "[rank::size]"
            },
            "order of data: .* in step 4 on rank 0",
        ),
        Fault(
            "accelerate: skip_first_batches left out",
            ACCELERATE,
            {"accelerator.skip_first_batches(loader, position)": "loader"},
            "restart 1 of 2: order of data: .* in step 4 on all ranks, as in step 1",
        ),
        Fault(
            "accelerate: order drawn when an epoch begins, its default",
            ACCELERATE,
            {"use_seedable_sampler=True": "use_seedable_sampler=False"},
            "order of data: other samples in step .* on all ranks",
        ),
        Fault(
            "accelerate: scheduler not prepared",
            ACCELERATE,
            {
                "model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)": (
                    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
                )
            },
            "restart 1 of 2: the learning rate is 0.009 in step 5, as in step 2",
        ),
        Fault(
            "Trainer: ignore_data_skip",
            TRAINER,
            {"    save_steps=3,": "    save_steps=3,\n    ignore_data_skip=True,"},
            "restart 1 of 2: order of data: .* in step 4 on all ranks, as in step 1",
        ),
        Fault(
            "Trainer: save_only_model",
            TRAINER,
            {"    save_steps=3,": "    save_steps=3,\n    save_only_model=True,"},
            "restart 1 of 2: optimizer state: step 4 begins with none",
        ),
        Fault(
            "Lightning 2.6.6: the sampler's epoch after a second restart",
            LIGHTNING,
            {"        epoch = trainer.global_step // len(loader)\n": ""},
            "restart 2 of 2: order of data: .* in step 7 on all ranks, as in step 4",
        ),
        Fault(
            "Lightning: saved within an epoch",
            LIGHTNING,
            {"torch.randn(24, 8), torch.randn(24, 1)": "torch.randn(40, 8), torch.randn(40, 1)"},
            "restart 1 of 2: order of data: .* in step 4 on all ranks, as in step 1",
        ),
        Fault(
            "DCP: ranks save random states by one name",
            DCP,
            {'f"random {dist.get_rank()}"': '"random"'},
            "restart 1 of 2: random state: torch's generator differs in step 4 on rank [01];",
        ),
        Fault(
            # What is loaded in place is the optimizer's state, without the values of its groups.
            "DCP: optimizer's groups not set",
            DCP,
            {
                "set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)": (
                    "dcp.state_dict.set_model_state_dict(model, weights)"
                )
            },
            "restart 1 of 2: the learning rate is 0.1 in step 4, as in step 1",
        ),
        Fault(
            "DCP: stream of data begins again",
            DCP,
            {
                "while state.step <": "begin = state.step\nwhile state.step <",
                "2 * state.step": "2 * (state.step - begin)",
            },
            "restart 1 of 2: order of data: .* in step 4 on all ranks, as in step 1",
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
    planted = {name: FAULTS[name].planted() for name in names}
    (folder / "cases.json").write_text(json.dumps(planted), encoding="utf-8")
    (folder / "train.py").touch()
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
    asked = sys.argv[1:] or [*FAULTS]
    names = [name for name in asked if not FAULTS[name].lacks]
    for name in (name for name in asked if name not in names):
        print(f"left out, since {' and '.join(FAULTS[name].lacks)} is not installed: {name}")
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
