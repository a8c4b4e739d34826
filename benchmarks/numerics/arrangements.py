"""Faults that were reported in public, found without a baseline: the same samples in other arrangements.

Run: python -m benchmarks.numerics.arrangements [NAME...]

Each row is a run of ``aorta arrange`` on two CPU ranks; the exit status is 1 if one does not say what is expected.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    "rate_by_ranks": "the optimizer's step is not: all 11 x 2.000",
    "schedule_by_rank": "the optimizer's step is not: all 11 x",
    "last_token_lost": BY_RANK,
}


def said(fault: str, folder: Path) -> str:
    """Return what ``aorta arrange`` prints of a fault."""
    command = ["-m", "pytest_aorta.cli", "arrange", str(SCRIPT), "--gpus=0", "--batch-arg=--batch-size"]
    command += ["--accumulate-arg=--accumulate", "--", "--batch-size=4", "--accumulate=1", f"--fault={fault}"]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def main(names: list[str]) -> int:
    """Print a row for each fault, and return how many are not as expected."""
    wrong = 0
    for fault in names or EXPECTED:
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            text = said(fault, Path(folder))
        finds = EXPECTED[fault]
        is_right = re.search(finds, text) is not None if finds else "aorta: R" not in text and "update" in text
        wrong += not is_right
        causes = [line.split("cause")[-1].strip() for line in text.splitlines() if "  cause" in line]
        seconds = f"{time.perf_counter() - began_s:5.1f} s"
        print(f"{'as expected' if is_right else 'WRONG':<12}{fault or 'by hand':<26}{seconds}  {causes}", flush=True)
        if not is_right:
            print(text)
    print(f"{len(names or EXPECTED) - wrong} of {len(names or EXPECTED)} as expected")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
