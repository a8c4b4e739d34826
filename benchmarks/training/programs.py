"""Programs of the Llama benchmarks: a workload with config keys, or torchtitan's trainer with its options."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pytest_aorta import DistributedWorld
from pytest_aorta.result.measurements import WorkloadResult

# Tokens of a GPU's step, and of a rank's step of the debug model.
SEQ_LEN, TINY_TOKENS = 8192, 64
SIMPLE, FSDP2, TORCHTITAN = "llama_simple_fsdp", "llama_fsdp2", "torchtitan"
# The newest torchtitan that torch 2.11 runs; 0.3 imports names that torch 2.11 lacks.
TORCHTITAN_VERSION = "0.2.2"
# torchtitan logs in its first step and in every tenth.
_LOG_FREQ = 10


@dataclass(frozen=True)
class Length:
    """The steps of a launch; steps of the warm-up are not measured."""

    warmup: int
    steps: int


@dataclass(frozen=True)
class Program:
    """Something to launch.

    Attributes:
        workload: a workload, or ``torchtitan``.
        config: config keys of the workload.
        options: options of torchtitan; the last of several values of an option counts.
    """

    name: str
    workload: str
    config: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def with_keys(self, name: str, **config: Any) -> Program:
        """Return the program with further config keys, named ``<this name>, <name>``."""
        return Program(f"{self.name}, {name}", self.workload, self.config | config, self.options)


# The `llama3_8b.toml` of torchtitan 0.2.2.
_TITAN_8B = (
    *("--model.name=synthetic.llama3", "--model.flavor=8B", "--optimizer.lr=3e-4", "--lr_scheduler.warmup_steps=200"),
    *("--training.local_batch_size=1", f"--training.seq_len={SEQ_LEN}"),
    *("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
    *(f"--metrics.log_freq={_LOG_FREQ}", "--metrics.disable_color_printing"),
)
COMPILE = ("--compile.enable",)
TITAN_SIMPLE = (
    *("--model.name=synthetic.simple_fsdp.llama3", *COMPILE, "--compile.backend=inductor"),
    *("--job.custom_config_module=torchtitan.experiments.simple_fsdp.job_config",),
    *("--compile.graph_passes=transformer_block_bucketing",),
)


def torchtitan_refusal() -> str | None:
    """Return why torchtitan's trainer can't run here, or None if it can."""
    if importlib.util.find_spec("torchtitan") is None:
        return f"torchtitan is not installed (pip install torchtitan=={TORCHTITAN_VERSION})"
    installed = importlib.metadata.version("torchtitan")
    if installed != TORCHTITAN_VERSION:
        return f"torchtitan is {installed}, and benchmarks/training/torchtitan_llama.py calls {TORCHTITAN_VERSION}"
    return None


def launch_8b(world: DistributedWorld, program: Program, n_layers: int, length: Length) -> WorkloadResult:
    """Launch a program for blocks of Llama 3 8B, each GPU with batch 1 x 8192."""
    if program.workload != TORCHTITAN:
        size = {"size": "8b", "n_layers": n_layers, "warmup": length.warmup, "steps": length.steps}
        return world.run(program.workload, **size, **program.config)
    # The last measured step is one that torchtitan logs.
    steps = math.ceil((length.warmup + length.steps) / _LOG_FREQ) * _LOG_FREQ
    arguments = (str(steps - length.steps), str(n_layers), *_TITAN_8B, f"--training.steps={steps}", *program.options)
    # As torchtitan's run_train.sh.
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return world.run_script("benchmarks/training/torchtitan_llama.py", arguments, environment=environment)


def launch_tiny(world: DistributedWorld, program: Program) -> WorkloadResult:
    """Launch a workload of ours with the debug model, to try a benchmark on CPU ranks."""
    size = {"size": "debug", "warmup": 1, "steps": 3}
    return world.run(program.workload, **size, **program.config)


@dataclass(frozen=True)
class Measured:
    """The measurements of one launch; memory of CPU ranks is None, and so is a loss that was not recorded.

    Attributes:
        logged_tokens_per_s: the throughput per GPU that torchtitan itself logged.
    """

    step_times_ms: list[float]
    step_p50_ms: float
    tokens_per_s: float
    allocated_gib: float | None
    reserved_gib: float | None
    first_loss: float | None
    last_loss: float
    logged_tokens_per_s: float | None = None


def measured(result: WorkloadResult, tokens: float) -> Measured:
    """Return the measurements of a launch in which each GPU trains on ``tokens`` per step."""
    metrics = result.rank_metrics
    times_ms = [float(value) for value in result.step_times_ms]
    step_ms = median(times_ms)
    speed = (times_ms, step_ms, tokens / step_ms * 1e3)
    if "torchtitan_tokens_per_s" in metrics:
        allocated, reserved = (max(metrics[f"torchtitan_memory_{kind}_gib"]) for kind in ("active", "reserved"))
        loss, logged = median(metrics["torchtitan_loss"]), median(metrics["torchtitan_tokens_per_s"])
        return Measured(*speed, allocated, reserved, None, loss, logged)
    kinds = ("peak_memory_bytes", "peak_memory_reserved_bytes")
    peaks = [max(metrics[kind]) / 2**30 if kind in metrics else None for kind in kinds]
    return Measured(*speed, peaks[0], peaks[1], float(result.loss[0]), float(result.loss[-1]))
