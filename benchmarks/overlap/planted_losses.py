"""Lost overlap in programs of many kinds, found by the step's graph of streams in one launch on CPU ranks.

Run: python -m benchmarks.overlap.planted_losses [--losses "one bucket,a host wait"] [PROGRAM...]

Each program is recorded unchanged and compared with each loss that it can have, by the test below, in a simulated world
of 8 ranks or, for pipelines, by two ranks. Programs are those of ``graphs.py`` as training scripts that know nothing of
pytest-aorta, a script of ``benchmarks/scripts``, and built-in workloads. The table has each failure's first line of a
metric of the graph.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.overlap.graphs import PROGRAMS, planted
from benchmarks.overlap.summary import TestRun, read_junit
from pytest_aorta import WorkloadRunner
from pytest_aorta.worker import Workload

HERE = Path(__file__).parent
UNEDITED = HERE.parent / "scripts" / "unedited" / "fsdp2.py"
# Each loss, with the words by which a failure names its cause.
LOSSES = {
    "no prefetch in forward": "all_gather.* waits for",
    "no prefetch in backward": "all_gather.* (waits for|is awaited by)",
    "gathers on the compute stream": "all_gather.* on the compute stream",
    "reduce-scatters on the compute stream": "reduce_scatter.* on the compute stream",
    "one bucket": "of [1-9] collectives?.*(all_gather|reduce_scatter)",
    "an extra wait": "(reduce_scatter|all_reduce|all_gather).* (is awaited by|on the compute stream)",
    "an all-reduce in each layer": "all_reduce.* is new",
    "a host wait": "waits for|is awaited by",
    "reshard after forward": "all_gather.* is new",
    "broken order of registration": "(all_gather|all_reduce).* (is new|waits for|is awaited by)",
    "buckets too large": "all_reduce",
    "reduced after backward": "all_reduce.* (waits for|on the compute stream)",
    "TP without async": "all_gather.* on the compute stream",
    "PP by GPipe": "send_recv|send|recv",
    "PP without interleaving": "send_recv.* waits for",
    "EP exchange in line": "all_to_all.* on the compute stream",
    "no bucketing": "(all_gather|reduce_scatter).* is new",
    "no reorder": "(all_gather|reduce_scatter).* (waits for|is awaited by)",
}
METRICS = ("serialized_collectives", "scheduled_overlap_ratio", "scheduled_exposed_comm_ms", "scheduled_step_ms")
IN_FSDP2 = (*LOSSES,)[:4] + (*LOSSES,)[5:8]
SMALL = {"steps": 1, "warmup": 2, "profile_steps": 0}
LLAMA = SMALL | {"n_layers": 4}
RESHARDED = {"reshard after forward": {"reshard_after_forward": True}}
# The config of each workload, and what each loss changes of it, besides what graphs.py plants.
WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "fsdp": (
        SMALL | {"verify": 0},
        {
            "gathers on the compute stream": {"comm_stream": False},
            "an extra wait": {"fault": {"kind": "in_line", "layer": None}},
        },
    ),
    "ranking": (
        SMALL,
        {loss: {} for loss in IN_FSDP2}
        | {
            "no prefetch in forward": {"forward_prefetch": 0},
            "no prefetch in backward": {"backward_prefetch": 0},
            "gathers on the compute stream": {"one_stream": True},
        },
    ),
    "ranking, no reshard": (SMALL | {"reshard_after_forward": False}, RESHARDED),
    "ddp_overlap": (
        SMALL | {"bucket_cap_mb": 0.2},
        {
            "buckets too large": {"bucket_cap_mb": 25},
            "reduced after backward": {"enable_overlap": False},
            "an all-reduce in each layer": {},
            "a host wait": {},
        },
    ),
    "llama_fsdp2": (LLAMA, {loss: {} for loss in IN_FSDP2} | {"one bucket": {"blocks_per_bucket": 4}}),
    "llama_fsdp2, no reshard": (LLAMA | {"reshard_after_forward": False}, RESHARDED),
    "llama_fsdp2, pipeline": (
        LLAMA
        | {"pipeline_parallel_degree": 2, "gradient_accumulation": 4}
        | {"pipeline_parallel_schedule": "Interleaved1F1B"},
        {"PP without interleaving": {"pipeline_parallel_schedule": "1F1B"}},
    ),
    "llama_simple_fsdp": (
        LLAMA,
        {
            "one bucket": {"blocks_per_bucket": 4},
            "no bucketing": {"bucketing": "none", "overlap_reorder": True},
            "no reorder": {"overlap_reorder": False},
        },
    ),
    "llama_simple_fsdp, no reshard": (LLAMA | {"reshard_after_forward": False}, RESHARDED),
}
# Each program with its losses.
LOST = {
    **{name: [one for one in LOSSES if one in changes] for name, changes in PROGRAMS.items()},
    "unedited fsdp2.py": [*IN_FSDP2],
    **{name: [*changes] for name, (_, changes) in WORKLOADS.items()},
}
# Ranks are forks of a server, which begins with a loss.
_PLANTS = """
import os, sys
if os.environ.get("LOSS") and any(word.endswith(".forkserver") for word in sys.orig_argv):
    from benchmarks.overlap.planted_losses import plant
    kept = plant(os.environ["LOSS"])
"""


def plant(loss: str) -> AbstractContextManager[None]:
    """Plant a loss in this process: in FSDP, in each layer, or in configs, as if a workload had another default."""
    in_place = planted(loss, torch.device("cpu"))
    in_place.__enter__()
    original = Workload.__init__

    def changed(self: Workload, config: Mapping[str, Any]) -> None:
        cases = [changes for name, (_, changes) in WORKLOADS.items() if name.partition(",")[0] == own_name(self)]
        original(self, dict(config) | next((one[loss] for one in cases if loss in one), {}))

    Workload.__init__ = changed  # type: ignore[method-assign]
    return in_place


def own_name(workload: Workload) -> str:
    """Return the name of a built-in workload."""
    return type(workload).__module__.split(".")[1]


def _cases() -> Iterator[Any]:
    for name in LOST:
        world = {"size": 2} if name in ("PP", "llama_fsdp2, pipeline") else {"size": 8, "simulated": (0,)}
        yield pytest.param(name, marks=pytest.mark.world(**world, device="cpu", warm=True))


@pytest.mark.launch_timeout(300)
@pytest.mark.parametrize("name", [*_cases()])
def test_overlap(workload: WorkloadRunner, name: str) -> None:
    """Compare a program, with the loss that LOSS names, with its baseline."""
    if name in WORKLOADS:
        result = workload.run(name.partition(",")[0], **WORKLOADS[name][0])
    elif name in PROGRAMS:
        result = workload.run_script(HERE / "graphs.py", ["--train", name])
    else:
        result = workload.run_script(UNEDITED)
    workload.check(result)


def compare(folder: Path, names: Sequence[str], *options: str, loss: str = "") -> dict[str, TestRun]:
    """Run the test of some programs, and return its results by program."""
    junit = folder / "junit.xml"
    environ = os.environ | {"PYTHONPATH": f"{folder}:{HERE.parents[1]}", "LOSS": loss}
    cases = [f"{__file__}::test_overlap[{name}]" for name in names]
    kept = [f"--aorta-baselines={folder / 'baselines'}", f"--aorta-results={folder / 'results'}", f"--junitxml={junit}"]
    run = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *cases, *kept, "-p", "no:cacheprovider", *options]
    done = subprocess.run(run, env=environ, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return {test.name.partition("[")[2][:-1]: test for test in read_junit(junit)}


def row(name: str, loss: str, test: TestRun) -> str:
    """Return the row of the table."""
    by = [metric for metric in METRICS if metric in test.regressed]
    found = re.search(rf"Regression: ({by[0]} .*)", test.report) if by else None
    causes = re.findall(r"(\d+ of \d+ collectives? ha(?:s|ve) nothing to hide under.*)", test.report)
    shown, cause = found[1] if found else "", causes[0] if causes else ""
    is_right = bool(re.search(LOSSES[loss], cause))
    # The graph decides in the first launch; another metric may ask for more.
    caught = ("yes" if by else "no") + (f", {test.launches} launches" if test.launches > 1 else "")
    cells = [
        name,
        loss,
        caught,
        ", ".join(by) or "-",
        "yes" if is_right else "no",
        f"{shown}: {cause}" if by else test.failure[:200],
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Record the programs, and print a row for each loss of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("programs", nargs="*", default=[*LOST], metavar="PROGRAM")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aorta-losses-") as scratch:
        folder = Path(scratch)
        (folder / "sitecustomize.py").write_text(_PLANTS, encoding="utf-8")
        recorded = compare(folder, given.programs, "--update-baselines", "--aorta-launches=1")
        for name, test in recorded.items():
            if test.failure:
                print(f"{name} was not recorded: {test.failure[:300]}")
        print(
            "| program | loss | caught | by | right cause | failure |\n| --- | --- | --- | --- | --- | --- |",
            flush=True,
        )
        for loss in given.losses.split(","):
            names = [name for name in given.programs if loss in LOST[name]]
            for name, test in (compare(folder, names, loss=loss) if names else {}).items():
                print(row(name, loss, test), flush=True)


if __name__ == "__main__":
    main()
