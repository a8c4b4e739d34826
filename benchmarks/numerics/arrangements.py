"""Faults that were reported in public, found without a baseline: the same samples in other arrangements.

Run: python -m benchmarks.numerics.arrangements [NAME...]

Each row is a script of one training loop on two CPU ranks, given to ``workload.compare_arrangements``. The exit status
is 1 if one row does not say what is expected.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from pytest_aorta.common.errors import AortaError
from pytest_aorta.plan.options import OPTIONS, LauncherKind, make_options
from pytest_aorta.plan.world import WorldSpec, resolve_world
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.session.session import Session, TestSpec

SCRIPT = Path(__file__).with_name("arranged.py")
BY_RANK, BY_BATCH = "weighted by rank", "weighted by micro-batch"
# What the script is given -> what is said of it; empty: nothing.
EXPECTED = {
    "": "",
    "tokens": "",
    "ddp": "",
    "fsdp2": "",
    "fsdp2_bfloat16": "",
    "tied": "",
    "frozen": "",
    # NeMo Automodel#3830
    "times_ranks": r"all 11 x 2\.000; loss x 2\.000; number of ranks: summed",
    # transformers#34191
    "accumulation_not_divided": r"all 11 x 2\.000; loss x 2\.000; number of micro-batches: the loss is not divided",
    # prime-rl#1960, torchtitan#2206, torchtune#2172
    "tokens_by_rank": BY_RANK,
    "tokens_masked_after_mean": BY_RANK,
    # torchtitan#4167
    "rank_lost": BY_RANK,
    # Megatron-LM#7452
    "norm_reduced_twice": r"2 of 11 \(norm.weight, norm.bias\) x 2\.000; .*reduced twice",
    "norm_not_reduced": r"gradients of norm.weight, norm.bias differ between ranks, so they are not reduced",
    "mean_twice": r"all 11 x 0\.500; loss x 1\.000; 1 / number of ranks: the mean over ranks is taken twice",
    "no_sync": r"differ between ranks, so they are not reduced",
    "tied_reduced_twice": r"1 of 10 \(embedding.weight\) x 2\.000; .*reduced twice",
    "experts_by_degree": r"2 of 11 \(expert.weight, expert.bias\) x 2\.000",
    # mlcommons/training#844
    "seed_by_rank": "before the first step, .* differ between ranks",
    "seed_by_ranks": "before the first step, .* differ: set the same seed",
    "same_data": "other samples: 4 of 8; 4 are given twice",
    "padded": "other samples: .* given twice",
    "batch_norm": "BatchNorm takes the statistics of one rank's micro-batch",
    "dropout": "draws random numbers",
    "decay_by_shard": "the optimizer's step is not",
    "rate_by_ranks": "learning rates of parameter groups: 0.02, 0.02 against 0.01, 0.01, for the same samples",
    "schedule_by_rank": "learning rates of parameter groups: .*, for the same samples",
    "last_token_lost": BY_RANK,
}


def arguments(fault: str) -> dict[str, object]:
    """Return the arguments of ``compare_arrangements`` for a fault."""
    args = ["--batch-size=4", "--accumulate=1", f"--fault={fault}"]
    return {"args": args, "batch_arg": "--batch-size", "accumulate_arg": "--accumulate"}


def said(faults: list[str]) -> Iterator[tuple[str, str, float]]:
    """Yield each fault with what is said of it, and the seconds that this took."""
    spec = TestSpec(WorldSpec(2, device="cpu"))
    with tempfile.TemporaryDirectory() as folder:
        values = {option.name: option.default for option in OPTIONS} | {"launcher": LauncherKind.FORKSERVER}
        options = make_options(values, Path.cwd())
        with closing(Session(options)) as session:
            world = resolve_world(spec.world, options, session.devices)
            for fault in faults:
                began_s, text = time.perf_counter(), ""
                with session.launcher(world, spec, RunningTest(fault), Path(folder), timed=False) as launcher:
                    try:
                        WorkloadRunner(launcher).compare_arrangements(SCRIPT, **arguments(fault))
                    except AortaError as error:
                        text = str(error)
                yield fault, text, time.perf_counter() - began_s


def main(names: list[str]) -> int:
    """Print a row for each fault, and return how many are not as expected."""
    faults, wrong = names or [*EXPECTED], 0
    for fault, text, seconds in said(faults):
        finds = EXPECTED[fault]
        is_right = re.search(finds, text) is not None if finds else not text
        wrong += not is_right
        causes = [line.split("cause")[-1].strip() for line in text.splitlines() if "  cause" in line]
        word = "as expected" if is_right else "WRONG"
        print(f"{word:<12}{fault or 'by hand':<26}{seconds:5.1f} s  {' | '.join(causes)}", flush=True)
        if not is_right:
            print(text)
    print(f"{len(faults) - wrong} of {len(faults)} as expected")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
