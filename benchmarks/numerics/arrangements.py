"""Faults that were reported in public, found without a baseline: the same samples in other arrangements.

Run: python -m benchmarks.numerics.arrangements [NAME...]
     python -m benchmarks.numerics.arrangements layouts

Each row is a script of one training loop on two CPU ranks, given to ``workload.compare_arrangements``. The exit status
is 1 if one row does not say what is expected. ``layouts`` compares layouts of the Llama workloads, which are right.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_aorta.cli.target import launching, opened
from pytest_aorta.common.errors import AortaError
from pytest_aorta.plan.options import OPTIONS, LauncherKind, make_options
from pytest_aorta.plan.world import WorldSpec
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.verdict.verdicts import Verdicts

SCRIPT = Path(__file__).with_name("arranged.py")
BY_RANK, BY_BATCH = "weighted by rank", "weighted by micro-batch"
# What the script is given -> the public report, and what has to be said; an empty sentence: nothing.
CASES = {
    "": ("", ""),
    "tokens": ("", ""),
    "ddp": ("", ""),
    "ddp_on_several_ranks": ("", ""),
    "fsdp2": ("", ""),
    "fsdp2_bfloat16": ("", ""),
    "fsdp2_norm": ("", ""),
    "fsdp2_reduced_in_bfloat16": ("", ""),
    "ddp_reduced_in_bfloat16": ("", ""),
    "tied": ("", ""),
    "frozen": ("", ""),
    "epochs": ("", ""),
    "recorded": ("", ""),
    "dropout_seeded": ("", "not judged: the forward pass draws random numbers"),
    "times_ranks": ("NeMo Automodel#3830", r"all 11 x 2\.000; loss x 2\.000; number of ranks: summed"),
    "fsdp2_reduced_in_bfloat16_times_ranks": ("NeMo Automodel#3830", r"all 11 x 2\.00; .*number of ranks: summed"),
    "ddp_reduced_in_bfloat16_times_ranks": ("NeMo Automodel#3830", r"all 11 x 2\.00; .*number of ranks: summed"),
    "accumulation_not_divided": (
        "transformers#34191, torchtune#2172",
        r"all 11 x 2\.000; loss x 2\.000; number of micro-batches: the loss is not divided",
    ),
    "tokens_by_micro_batch": ("transformers#34191", BY_BATCH),
    "tokens_by_rank": ("prime-rl#1960, torchtitan#2206", BY_RANK),
    "tokens_masked_after_mean": ("loss masked after averaging", BY_RANK),
    "last_token_lost": ("context parallel without the last label", BY_RANK),
    "rank_lost": ("torchtitan#4167", "rank 1's samples do not reach any gradient: what it computes is lost"),
    "rank_lost_compiled": ("torchtitan#4167", "what ranks add to .* is not known, as in compiled modules"),
    "expert_lost": ("torchtitan#4167", "rank 1's samples do not reach expert.bias, expert.weight: what it comp.* lost"),
    "ddp_branch_lost": ("branch skipped on a rank", "rank 1's samples do not reach expert.*: it computes no gradient"),
    "fsdp2_branch_lost": ("branch skipped on a rank", "rank 1's samples do not reach expert.*: it computes no grad"),
    "ddp_ignored": ("parameters that DDP ignores", "expert.weight, expert.bias differ between ranks, so they are not"),
    "norm_reduced_twice": ("Megatron-LM#7452", r"2 of 11 \(norm.weight, norm.bias\) x 2\.000; .*reduced twice"),
    "norm_not_reduced": ("Megatron-LM#7452", "norm.weight, norm.bias differ between ranks, so they are not reduced"),
    "fsdp2_norm_twice": ("norm reduced twice", "used: parts that ranks share count more than once"),
    "fsdp2_norm_of_shard": ("norm not reduced", "used: other ranks' parts are left out"),
    "mean_twice": ("mean over ranks taken twice", r"all 11 x 0\.500; .*1 / number of ranks: the mean .* taken twice"),
    "no_sync": ("DDP under no_sync", "differ between ranks, so they are not reduced"),
    "tied_reduced_twice": ("tied weights sharded twice", r"1 of 10 \(embedding.weight\) x 2\.000; .*reduced twice"),
    "frozen_reduced": ("frozen part reduced", "only one arrangement has gradients of embedding.weight"),
    "experts_by_degree": ("experts scaled by EP degree", r"2 of 11 \(expert.weight, expert.bias\) x 2\.000"),
    "seed_by_rank": ("mlcommons/training#844", "before the first step, .* differ between ranks"),
    "seed_by_ranks": ("seed by world size", "before the first step, .* differ: set the same seed"),
    "same_data": ("no DistributedSampler", "other samples: 4 of 8; 4 are given twice"),
    "padded": ("sampler that pads", "other samples: .* given twice"),
    "epochs_alike": ("no set_epoch", "the same order in two epochs: call set_epoch"),
    "batch_norm": ("SyncBatchNorm missing", "BatchNorm takes the statistics of one rank's micro-batch"),
    "dropout": ("equal dropout on all ranks", "all ranks draw the same random numbers"),
    "load_by_rank": ("experts' load of one rank", "buffers .*load differ between ranks"),
    "recorded_sum": ("loss reported as a sum", r"the loss is reported as .*: x 2\.000"),
    "rate_by_ranks": ("rate scaled by ranks", "learning rate 0.02 against 0.01 for the same samples"),
    "schedule_by_rank": (
        "scheduler stepped by each rank",
        "learning rate .* for the same samples",
    ),
    "decay_by_shard": ("decay by the shape of shards", "the optimizer's step is not"),
    "no_gradient": ("cross entropy over one class", "no parameter had a gradient other than 0"),
    "steps_by_rank": ("steps counted by rank", "optimizers made 4 against 2 steps"),
}


_DEEPSEEK = {"size": "deepseek_debug", "n_layers": 2}
_TP, _CP = {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}
_PP, _EP = {"pipeline_parallel_degree": 2, "gradient_accumulation": 2}, {"expert_parallel_degree": 2}
_HSDP, _TWICE, _FULL = {"data_parallel_replicate_degree": 2}, {"batch_size": 4}, {"activation_checkpointing": "full"}
# Ranks and config of a workload -> the keys of layouts with the same samples, beside those of other ranks and batches.
LAYOUTS: list[tuple[int, dict[str, Any], list[dict[str, Any]]]] = [
    (
        2,
        {"workload": "llama_fsdp2"},
        [
            *(_TP | _TWICE, _CP | _TWICE, _PP, _HSDP, _FULL),
            *({"activation_checkpointing": "selective"}, {"activation_checkpointing": "elementwise"}),
            *({"reshard_after_forward": False}, {"blocks_per_bucket": 2}, {"loss_chunks": 2}, {"compile_loss": True}),
            {"compile_blocks": True},
        ],
    ),
    (2, {"workload": "llama_fsdp2", "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, [_TP | _TWICE, _HSDP]),
    (2, {"workload": "llama_fsdp2", "num_experts": 4}, [_EP, _EP | _FULL, _TP | _TWICE]),
    (2, {"workload": "llama_fsdp2", **_DEEPSEEK}, [_EP, _TP | _TWICE, _CP | _TWICE]),
    (2, {"workload": "llama_simple_fsdp"}, [{"bucketing": "none"}, {"backend": "inductor"}, _TP | _TWICE]),
    (
        4,
        {"workload": "llama_fsdp2", "num_experts": 4},
        [_HSDP, _TP | _TWICE, _CP | _TWICE, _PP, _EP, _EP | _HSDP, _EP | _TP | _TWICE, _PP | _TP | _TWICE],
    ),
]


def arguments(fault: str) -> dict[str, object]:
    """Return the arguments of ``compare_arrangements`` for a fault."""
    args = ["--batch-size=4", "--accumulate=1", f"--fault={fault}"]
    return {"args": args, "batch_arg": "--batch-size", "accumulate_arg": "--accumulate"}


def said(given: list[tuple[int, Any, dict[str, Any]]]) -> Iterator[tuple[list[Verdicts], str, float]]:
    """Yield the verdicts on what is given to ranks, or what fails, and the seconds that this took."""
    with tempfile.TemporaryDirectory() as folder:
        values = {option.name: option.default for option in OPTIONS} | {"launcher": LauncherKind.FORKSERVER}
        options = make_options(values, Path.cwd(), command=("arrangements",))
        with opened(options) as session:
            for number, (ranks, target, keywords) in enumerate(given):
                spec, launches = WorldSpec(ranks, device="cpu"), Path(folder) / str(number)
                began_s, found, text = time.perf_counter(), list[Verdicts](), ""
                with launching(session, spec, launches, timed=False) as launcher:
                    try:
                        found = WorkloadRunner(launcher).compare_arrangements(target, **keywords)
                    except AortaError as error:
                        text = str(error)
                yield found, text, time.perf_counter() - began_s


def main(names: list[str]) -> int:
    """Print a row for each fault, or for each layout, and return whether one is not as expected."""
    is_wrong = False
    if names == ["layouts"]:
        given = [(ranks, config, {"others": others}) for ranks, config, others in LAYOUTS]
        for (_, config, _), (found, text, seconds) in zip(given, said(given), strict=True):
            print(f"{config}: {len(found)} equal, {seconds:.0f} s", text, flush=True)
            is_wrong = is_wrong or bool(text)
        return is_wrong
    faults = names or [*CASES]
    for fault, (_, text, seconds) in zip(faults, said([(2, SCRIPT, arguments(one)) for one in faults]), strict=True):
        report, finds = CASES[fault]
        is_right = re.search(finds, text) is not None if finds else not text
        is_wrong = is_wrong or not is_right
        # The first line of each arrangement says what differs.
        causes = dict.fromkeys(line for line in text.splitlines() if line[:1].strip())
        word = "as expected" if is_right else "WRONG"
        print(f"{word:<12}{fault or 'by hand':<38} {report:<40}{seconds:5.1f} s  {' | '.join(causes)}", flush=True)
        if not is_right:
            print(text)
    return is_wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
