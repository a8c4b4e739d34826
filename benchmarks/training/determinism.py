"""The cost of determinism: steps of blocks of Llama 3 8B, and attention alone, by kernel of attention.

Run: python -m benchmarks.training.determinism [--out FOLDER] [--budget 230] [--tiny]
One process trains ``llama_fsdp2`` in a world of one GPU: 8 blocks of the 8B, 1 x 8192, AdamW, no activation
checkpointing. Variants of one model take turns, round by round, and each is divided by the variant of the same round
that is not deterministic. The variants that are deterministic train the same steps twice and compare all weights.
determinism.md and determinism.json in --out are rewritten after each part; a part that fails leaves its error in them.
No part begins once --budget seconds are over. --tiny makes sizes that a CPU runs.

cuDNN's deterministic backward pass needs the package nvidia-cudnn-frontend, which then serves cuDNN's kernels in both
modes; without it the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

# cuBLAS reads the variable with its first handle, so all variants have the deterministic setting.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from aorta_workloads.llama_fsdp2 import LlamaFsdp2Workload
from aorta_workloads.models.common import flex
from aorta_workloads.models.common.attention import SDPA, has_deterministic_cudnn

from pytest_aorta.plan.workloads import find_workload, resolve_config
from pytest_aorta.worker import hash_local

BLOCKS_OF_8B = {"size": "8b", "n_layers": 8, "activation_checkpointing": "none"}
TINY = {"size": "debug", "n_layers": 2, "seq_len": 64}
Options = dict[str, int | bool]
# torch's own choice of block sizes and flags
TORCHS: Options = {}
CAUSAL: Options = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}


def blocks(direction: str, names: str, sizes: Sequence[int], num_stages: int, num_warps: int) -> Options:
    """Return the options of one direction's kernel, ``fwd`` or ``bwd``."""
    given = dict(zip(names.split(), sizes, strict=True)) | {"num_stages": num_stages, "num_warps": num_warps}
    return CAUSAL | {f"{direction}_{name}": value for name, value in given.items()}


FORWARD, BACKWARD = "BLOCK_M BLOCK_N", "BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2"
# Each has a forward and a backward part, measured separately.
FLEX_OPTIONS: dict[str, Options] = {
    "torch's": TORCHS,
    "causal": CAUSAL,
    "blocks a": blocks("fwd", FORWARD, (128, 128), 2, 8) | blocks("bwd", BACKWARD, (64, 128, 128, 64), 2, 8),
    "blocks b": blocks("fwd", FORWARD, (128, 64), 2, 4) | blocks("bwd", BACKWARD, (64, 64, 64, 64), 3, 4),
    "blocks c": blocks("fwd", FORWARD, (128, 64), 3, 4) | blocks("bwd", BACKWARD, (32, 128, 128, 32), 3, 8),
    "blocks d": blocks("fwd", FORWARD, (128, 128), 3, 8) | blocks("bwd", BACKWARD, (64, 128, 128, 64), 3, 4),
    "blocks e": blocks("fwd", FORWARD, (64, 128), 3, 4) | blocks("bwd", BACKWARD, (64, 64, 64, 64), 4, 4),
    "prescaled": CAUSAL | {"PRESCALE_QK": True},
    "tma": CAUSAL | {"fwd_USE_TMA": True},
}
# These options round differently, so they are measured but not chosen.
NOT_CHOSEN = ("prescaled",)


@dataclass(frozen=True)
class Variant:
    """A way to run the same step."""

    name: str
    kernel: str
    deterministic: bool = True
    options: str = "causal"
    filled: bool = False


@dataclass
class Report:
    """The measurements so far, written after each part."""

    folder: Path | None
    budget_s: float
    began_s: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)
    attention: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.began_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run one part, keep its error if it fails, and write the report."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other parts are to be measured whatever happens in this one
            self.errors[name] = f"{type(error).__name__}: {str(error)[:2000]}"
            traceback.print_exc()
        self.facts[f"seconds at the end of {name}"] = round(self.elapsed_s, 1)
        self.write()

    def is_over(self, name: str, needed_s: float) -> bool:
        """Return whether fewer than ``needed_s`` seconds are left, and if so, note that in the report."""
        if self.elapsed_s + needed_s <= self.budget_s:
            return False
        self.errors[name] = (
            f"left out: {self.elapsed_s:.0f} s of {self.budget_s:.0f} s are over, it needs {needed_s:.0f}"
        )
        return True

    def write(self) -> None:
        """Rewrite both files."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {key: value for key, value in asdict(self).items() if key not in ("folder", "began_s")}
        (self.folder / "determinism.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
        (self.folder / "determinism.md").write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Return everything as Markdown."""
        parts = ["\n".join(f"- {key}: {value}" for key, value in self.facts.items())]
        parts += [table(rows) for rows in (self.attention, self.steps, self.kernels) if rows]
        parts += [f"{name} failed: {error.splitlines()[0]}" for name, error in self.errors.items()]
        return "\n\n".join(parts) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with the same keys as a Markdown table."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Clock:
    """Milliseconds of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def ms(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Return the time of each repetition; on CUDA the host does not wait between them."""
        if not self._is_cuda:
            return [self._host_ms(work) for _ in range(repeats)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        return [one.elapsed_time(other) for one, other in pairwise(events)]

    @staticmethod
    def _host_ms(work: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began_s)


# --- attention alone


@dataclass
class Passes:
    """A kernel's two passes over fixed tensors; ``backward`` returns the gradients."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[], Sequence[torch.Tensor]]
    deterministic: bool
    options: Options = field(default_factory=dict)


def attention_tensors(device: torch.device, *, tiny: bool) -> list[torch.Tensor]:
    """Return queries, keys, values and the output's gradient of one layer."""
    heads, kv_heads, length, width = (4, 2, 64, 16) if tiny else (32, 8, 8192, 128)
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16
    return [
        torch.randn(1, number, length, width, device=device, dtype=dtype, generator=generator)
        for number in (heads, kv_heads, kv_heads, heads)
    ]


def torch_passes(kernel: str, tensors: Sequence[torch.Tensor], *, deterministic: bool) -> Passes:
    """Return the passes of one of torch's kernels."""
    *given, grad = tensors
    inputs = [tensor.detach().requires_grad_() for tensor in given]
    out = SDPA(kernel)(*inputs)
    return Passes(
        forward=lambda: SDPA(kernel)(*inputs),
        backward=lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
        deterministic=deterministic,
    )


def flex_passes(options: Options, tensors: Sequence[torch.Tensor]) -> Passes:
    """Return the passes of FlexAttention; the caller sets the options before each call."""
    q, k, v, grad = tensors
    with kernel_options(options):
        out, logsumexp = flex.flex_attention(q, k, v)
    return Passes(
        forward=lambda: flex.flex_attention(q, k, v)[0],
        backward=lambda: flex.flex_attention_backward(grad, q, k, v, out, logsumexp),
        deterministic=True,
        options=options,
    )


@contextmanager
def kernel_options(options: Options) -> Iterator[None]:
    """Compile FlexAttention with ``options``, or reuse an earlier compilation with these options."""
    before = dict(flex.KERNEL_OPTIONS)
    try:
        flex.KERNEL_OPTIONS.clear()
        flex.KERNEL_OPTIONS.update(options)
        yield
    finally:
        flex.KERNEL_OPTIONS.clear()
        flex.KERNEL_OPTIONS.update(before)


@contextmanager
def determinism(*, enabled: bool, filled: bool = False) -> Iterator[None]:
    """Switch deterministic algorithms on or off."""
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def attention_variants(device: torch.device) -> dict[str, Callable[[Sequence[torch.Tensor]], Passes]]:
    """Return a function for the passes of each variant."""
    variants: dict[str, Callable[[Sequence[torch.Tensor]], Passes]] = {}
    if device.type == "cuda":
        variants["cudnn"] = lambda tensors: torch_passes("cudnn", tensors, deterministic=False)
        if has_deterministic_cudnn():
            variants["cudnn, deterministic"] = lambda tensors: torch_passes("cudnn", tensors, deterministic=True)
    variants["flash"] = lambda tensors: torch_passes("flash", tensors, deterministic=False)
    variants["flash, deterministic"] = lambda tensors: torch_passes("flash", tensors, deterministic=True)
    for name, options in FLEX_OPTIONS.items():
        variants[f"flex, {name}"] = lambda tensors, options=options: flex_passes(options, tensors)  # type: ignore[misc]
    return variants


def measure_attention(report: Report, device: torch.device, *, tiny: bool) -> None:
    """Time forward and backward of every variant in turn, and compare the gradients of three runs."""
    tensors = attention_tensors(device, tiny=tiny)
    passes: dict[str, Passes] = {}
    for name, make in attention_variants(device).items():
        try:
            with determinism(enabled="deterministic" in name or name.startswith("flex")):
                passes[name] = make(tensors)
                warm(passes[name])
        except Exception as error:  # noqa: BLE001 - a variant that this machine lacks
            passes.pop(name, None)
            report.errors[f"attention, {name}"] = f"{type(error).__name__}: {str(error)[:500]}"
    known = torch_passes("flash", tensors, deterministic=False).backward()
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in passes}
    clock, repeats = Clock(device), 5
    for number in range(4):
        for name in list(passes)[:: 1 if number % 2 else -1]:
            one = passes[name]
            with determinism(enabled=one.deterministic), kernel_options(one.options), torch.no_grad():
                times[name][0].extend(clock.ms(one.forward, repeats))
            with determinism(enabled=one.deterministic), kernel_options(one.options):
                times[name][1].extend(clock.ms(one.backward, repeats))
    for name, one in passes.items():
        forward, backward = times[name]
        with determinism(enabled=one.deterministic), kernel_options(one.options):
            gradients = [[tensor.clone() for tensor in one.backward()] for _ in range(3)]
        error = max(float((a.float() - b.float()).abs().max()) for a, b in zip(gradients[0], known, strict=True))
        report.attention.append(
            {
                "attention": name,
                "forward, ms": round(median(forward), 3),
                "backward, ms": round(median(backward), 3),
                "sum, ms": round(median(forward) + median(backward), 3),
                "backward range, ms": f"{min(backward):.3f} to {max(backward):.3f}",
                "equal gradients in 3 runs": all(
                    torch.equal(a, b) for run in gradients[1:] for a, b in zip(gradients[0], run, strict=True)
                ),
                "largest difference to flash": f"{error:.3g}",
            }
        )


def warm(passes: Passes) -> None:
    """Run both passes once."""
    with kernel_options(passes.options):
        passes.forward()
        passes.backward()


def compile_only(name: str, *, tiny: bool) -> None:
    """Compile one variant of FlexAttention into torch's caches, for the main process."""
    options = FLEX_OPTIONS[name]
    warm(flex_passes(options, attention_tensors(the_device(), tiny=tiny)))


def compile_beforehand(*, tiny: bool) -> None:
    """Compile all variants of FlexAttention in processes side by side."""
    given = ["--tiny"] if tiny else []
    command = [sys.executable, "-m", "benchmarks.training.determinism", *given, "--compile"]
    processes = [subprocess.Popen([*command, name]) for name in FLEX_OPTIONS]
    for process in processes:
        # A variant that does not compile fails again in this process, which reports the cause.
        process.wait(timeout=120)


def best_options(report: Report) -> Options:
    """Return the fastest forward and the fastest backward options of FlexAttention, by attention alone."""
    rows = {row["attention"].removeprefix("flex, "): row for row in report.attention if row["attention"][:4] == "flex"}
    allowed = [name for name, row in rows.items() if row["equal gradients in 3 runs"] and name not in NOT_CHOSEN]
    if not allowed:
        return CAUSAL
    chosen: Options = {}
    for direction, key in (("fwd", "forward, ms"), ("bwd", "backward, ms")):
        name = min(allowed, key=lambda name: rows[name][key])
        report.facts[f"fastest flex options, {direction}"] = name
        for option, value in FLEX_OPTIONS[name].items():
            if option.startswith(direction):
                chosen[option] = value
            elif not option.startswith(("fwd", "bwd")):
                chosen[f"{direction}_{option}"] = value
    return chosen


# --- whole steps


class OneGpu(LlamaFsdp2Workload):
    """The workload in a world of one rank; its attention can be exchanged between steps."""

    def start(self) -> None:
        """Keep the only batch, and the initial weights, to which :meth:`restart` returns."""
        self._batch = next(self.batches)
        self._initial = [parameter.detach().clone() for parameter in self.model.parameters()]

    def use(self, kernel: str) -> None:
        """Make all blocks use ``kernel`` for attention."""
        for layer in self.model.layers:
            layer.attention.attend = SDPA(kernel)  # type: ignore[union-attr]

    def compile_all(self) -> None:
        """Compile blocks and loss from now on."""
        for layer in self.model.layers:
            layer.compile(fullgraph=True)
        self._loss = torch.compile(self._loss, fullgraph=True, dynamic=False)

    def step(self) -> None:
        """Train one step."""
        self.train_step(self._batch)

    @torch.no_grad()
    def restart(self) -> None:
        """Return to the initial weights and an optimizer without state."""
        for parameter, value in zip(self.model.parameters(), self._initial, strict=True):
            parameter.copy_(value)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def digest(self) -> list[str]:
        """Return hashes of all weights."""
        parameters = self.model.named_parameters()
        return [hash_local(name, parameter.to_local()) for name, parameter in parameters]  # type: ignore[operator]

    @property
    def kernel(self) -> str:
        """Return the kernel that the workload chose."""
        return self.settings.model.attention


def make_workload(*, tiny: bool) -> OneGpu:
    """Build the model in a world of one."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
    }
    config = resolve_config(find_workload("llama_fsdp2", ()), {**(TINY if tiny else BLOCKS_OF_8B), "steps": 1})
    workload = OneGpu(config)
    workload.setup()
    workload.start()
    return workload


def step_variants(kernel: str, *, filled: bool) -> list[Variant]:
    """Return the variants of a whole step; the others are divided by the first."""
    variants = [
        Variant(f"not deterministic, {kernel}", kernel, deterministic=False),
        Variant("deterministic, flash", "flash"),
        Variant("deterministic, flex, torch's options", "flex", options="torch's"),
        Variant("deterministic, flex, fastest options", "flex", options="fastest"),
    ]
    if torch.cuda.is_available() and has_deterministic_cudnn():
        variants.append(Variant("deterministic, cudnn", "cudnn"))
    if filled:
        variants.append(Variant("deterministic, flex, fastest options, filled", "flex", options="fastest", filled=True))
    return variants


def measure_steps(
    report: Report, workload: OneGpu, mode: str, variants: Sequence[Variant], options: dict[str, Options], rounds: int
) -> None:
    """Time steps of all variants in turn, then train the deterministic variants twice from the same weights."""
    clock = Clock(workload.device)
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(-1, rounds):
        for variant in variants[:: 1 if number % 2 else -1]:
            with running(workload, variant, options):
                # In the first step of a turn, caches hold other kernels' data; in round -1, that step compiles.
                clock.ms(workload.step, 2)
                if number >= 0:
                    times[variant.name].append(median(clock.ms(workload.step, 3)))
    base = times[variants[0].name]
    for variant in variants:
        with running(workload, variant, options):
            digests = [trained(workload, steps=3) for _ in range(2)] if variant.deterministic else []
        ratios = sorted(one / other for one, other in zip(times[variant.name], base, strict=True))
        report.steps.append(
            {
                "blocks": mode,
                "variant": variant.name,
                "step, ms": round(median(times[variant.name]), 2),
                "range, ms": f"{min(times[variant.name]):.2f} to {max(times[variant.name]):.2f}",
                "ratio": round(median(ratios), 4),
                "range of ratios": f"{ratios[0]:.4f} to {ratios[-1]:.4f}",
                "equal weights in 2 runs": digests[0] == digests[1] if digests else "not compared",
            }
        )


@contextmanager
def running(workload: OneGpu, variant: Variant, options: dict[str, Options]) -> Iterator[None]:
    """Have the workload train as ``variant``."""
    workload.use(variant.kernel)
    with determinism(enabled=variant.deterministic, filled=variant.filled), kernel_options(options[variant.options]):
        yield


def trained(workload: OneGpu, steps: int) -> list[str]:
    """Return hashes of the weights after ``steps`` steps from the start."""
    workload.restart()
    for _ in range(steps):
        workload.step()
    return workload.digest()


def compare_kernels(report: Report, workload: OneGpu, variants: Sequence[Variant], options: dict[str, Options]) -> None:
    """Write the kernels whose time differs most between the first and the last variant."""
    totals: list[dict[str, float]] = []
    for variant in (variants[0], variants[-1]):
        with running(workload, variant, options):
            workload.step()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                workload.step()
                torch.cuda.synchronize()
        totals.append({row.key: row.self_device_time_total / 1e3 for row in profile.key_averages()})
    names = sorted(totals[0] | totals[1], key=lambda name: -abs(totals[1].get(name, 0) - totals[0].get(name, 0)))
    for name in names[:16]:
        before, after = (total.get(name, 0.0) for total in totals)
        report.kernels.append(
            {
                "kernel": name[:100].replace("|", "/"),
                f"{variants[0].name}, ms": round(before, 2),
                f"{variants[-1].name}, ms": round(after, 2),
                "difference": round(after - before, 2),
            }
        )


def the_device() -> torch.device:
    """Return the first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def facts_of(device: torch.device) -> dict[str, Any]:
    """Return the facts that the figures depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "torch": torch.__version__,
        "device": name,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia-cudnn-frontend": "present" if has_deterministic_cudnn() else "absent: not measured",
    }


def main(arguments: Sequence[str]) -> int:
    """Measure all parts; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=230.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", choices=FLEX_OPTIONS, help="only compile one variant of FlexAttention")
    given = parser.parse_args(arguments)
    if given.compile:
        compile_only(given.compile, tiny=given.tiny)
        return 0
    device = the_device()
    report = Report(given.out, given.budget, facts=facts_of(device))
    with report.part("compilation"):
        if device.type == "cuda":
            compile_beforehand(tiny=given.tiny)
    with report.part("attention"):
        measure_attention(report, device, tiny=given.tiny)
    with report.part("steps"):
        measure_all_steps(report, tiny=given.tiny)
    print(report.text())
    return int("steps" in report.errors or "attention" in report.errors)


def measure_all_steps(report: Report, *, tiny: bool) -> None:
    """Measure eager blocks, then the same blocks compiled."""
    workload = make_workload(tiny=tiny)
    options = FLEX_OPTIONS | {"fastest": best_options(report)}
    report.facts["fastest flex options"] = options["fastest"]
    eager = step_variants(workload.kernel, filled=True)
    with report.part("eager steps"):
        measure_steps(report, workload, "eager", eager, options, rounds=4)
    with report.part("kernels"):
        if workload.device.type == "cuda":
            compare_kernels(report, workload, eager[:-1], options)
    if not report.is_over("compiled steps", 0 if tiny else 60):
        with report.part("compiled steps"):
            # Each kernel and mode compiles the block anew.
            torch._dynamo.config.recompile_limit = 64
            workload.compile_all()
            measure_steps(report, workload, "compiled", step_variants(workload.kernel, filled=False), options, rounds=4)
    workload.cleanup()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
