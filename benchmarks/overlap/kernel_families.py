"""Variation of kernel families between launches of unchanged code, and how often a slower kernel is flagged.

Run: python -m pytest benchmarks/overlap/kernel_families.py -s --aorta-gpus=1

Takes about LIMIT_S seconds on one GPU, 140 by default. A script trains four blocks of a Transformer. Kernels get slower
in two ways. Separate launches do more work: a hypotenuse of tensors, a matrix product, or a new kernel. Arithmetic on
the facts of unchanged launches slows down one family at a time. Each launch profiles STEPS steps.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median, stdev
from textwrap import dedent

import pytest

from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.trace.profiled_steps import FamilyTime
from pytest_aorta.session.launcher import DistributedWorld
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.kernel_gate import MIN_FRACTION, REST, parts_of
from pytest_aorta.verdict.metrics import METRICS, parse_tolerances
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import Outcome

LIMIT_S = float(os.environ.get("LIMIT_S", "140"))
STEPS = int(os.environ.get("STEPS", "8"))
UNCHANGED, SLOWED, DRAWN = 10, 4, 60
CHANGES = (0.0025, 0.01)
TOLERANCE = os.environ.get("TOLERANCE", "2%")
METRIC = METRICS["kernel_ms"]
# Width and length of the Transformer, and elements of the hypotenuse.
SIZES = {"cuda": (2048, 4096, 1 << 26), "cpu": (128, 64, 1 << 18)}
SCRIPT = """
    import sys
    from statistics import median
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention, silu
    from pytest_aorta.worker import RankEnv, capture_overlap, recorder

    width, length, inner, elements, new_elements, profiled = map(int, sys.argv[1:])
    device = RankEnv.read().join("kernel_families")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            heads = self.qkv(self.norm(x)).view(1, length, 3, 16, width // 16).permute(2, 0, 3, 1, 4)
            x = x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape))
            gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
            return x + self.down(silu(gate) * value)

    model = nn.Sequential(*(Block() for _ in range(4))).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(1, length, width, device=device, dtype=dtype)
    long, wide = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((length, inner), (inner, width)))
    values, new_values = torch.randn(elements, device=device), torch.randn(new_elements, device=device)
    product = torch.empty_like(values)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.mm(long, wide)
        torch.hypot(values, values, out=product)
        if new_elements:
            new_values.erfinv_()

    recorder.start(device, warmup=10)
    for _ in range(30):
        with recorder.step():
            step()
    timed_ms = median(recorder.result().step_times_ms)
    recorder.overlap(capture_overlap(step, profiled, device, timed_ms=timed_ms))
"""
Launch = Callable[..., LaunchFacts]


def launcher(world: DistributedWorld, script: Path) -> Launch:
    """Return a function that launches the script, with more work on demand, and returns the facts."""
    width, length, elements = SIZES[world.device]

    def launch(inner: float = 1.0, longer: float = 1.0, new: float = 0.0) -> LaunchFacts:
        rows = round(inner * width / 64) * 64
        sizes = (width, length, rows, round(longer * elements), round(new * elements), STEPS)
        result = world.launch_script(str(script), tuple(map(str, sizes)))
        assert result.passed, result.failure_details
        return launch_facts(result)

    return launch


def flagged(candidates: Sequence[LaunchFacts], baseline: Sequence[LaunchFacts]) -> Outcome:
    """Return the outcome of ``kernel_ms`` for three launches against a baseline of the others."""
    stored = Baseline("case", "test", "platform", "kernels", {}, tuple(StoredLaunch(one) for one in baseline))
    device = baseline[0].device
    comparison = StoredComparison(
        "case", {}, stored, parse_tolerances({"kernel_ms": TOLERANCE}, "TOLERANCE"),
        lambda metric: default_variance(metric, device), 3,
    )  # fmt: skip
    return comparison.judge(candidates)["kernel_ms"].outcome


def rates(draws: Iterable[tuple[Sequence[LaunchFacts], Sequence[LaunchFacts]]]) -> str:
    """Return how many comparisons are flagged, passed, and neither."""
    outcomes = [flagged(candidates, baseline) for candidates, baseline in draws]
    counts = [outcomes.count(Outcome.REGRESSION), outcomes.count(Outcome.PASS)]
    return f"{counts[0]} of {len(outcomes)} | {counts[1]} | {len(outcomes) - sum(counts)}"


def threes(launches: Sequence[LaunchFacts]) -> list[tuple[list[LaunchFacts], list[LaunchFacts]]]:
    """Return some ways to take three launches, each with the launches that are left."""
    chosen = list(combinations(range(len(launches)), 3))
    return [
        ([launches[i] for i in rows], [one for i, one in enumerate(launches) if i not in rows])
        for rows in chosen[:: -(-len(chosen) // DRAWN)]
    ]


def slowed(launch: LaunchFacts, family: str, change: float) -> LaunchFacts:
    """Return facts in which ``family`` takes longer by a fraction of the step."""
    time_of = launch.kernels[family]
    longer = FamilyTime(time_of.ms + change * launch.step_time_ms["p50"], time_of.calls)
    return launch.replace(kernels=launch.kernels | {family: longer})


def show(name: str, launches: Sequence[LaunchFacts]) -> None:
    """Print each family's variation, and how often it is flagged, unchanged and slowed down by arithmetic."""
    step_ms = median(launch.step_time_ms["p50"] for launch in launches)
    print(
        f"\n{name}: {len(launches)} launches, timed p50 {step_ms:.2f} ms, families from {MIN_FRACTION:.1%} of the step"
    )
    print("| family | of step | calls | deviation of launches | range |\n| --- | --- | --- | --- | --- |")
    parts = parts_of(METRIC, launches, launches)
    for part in sorted(parts, key=lambda part: -part.fraction):
        values = [float(part.metric.measure(launch) or 0.0) for launch in launches]
        middle = median(values) or 1.0
        calls = "" if part.name == REST else f"{launches[0].kernels[part.name].calls:.4g}"
        span = f"{min(values) / middle - 1:+.2%} to {max(values) / middle - 1:+.2%}"
        print(f"| `{part.name}` | {part.fraction:.2%} | {calls} | {stdev(values) / middle:.3%} | {span} |")
    print("\n| change | flagged | passed | inconclusive or improved |\n| --- | --- | --- | --- |")
    print(f"| none | {rates(threes(launches))} |")
    for change in CHANGES:
        for part in parts:
            if part.name != REST:
                draws = [
                    ([slowed(one, part.name, change) for one in here], there) for here, there in threes(launches)[::4]
                ]
                print(f"| `{part.name}` {change:+.2%} of step, arithmetic | {rates(draws)} |")


def show_slowed(what: str, launches: Sequence[LaunchFacts], unchanged: Sequence[LaunchFacts]) -> None:
    """Print the change that launches show, and how often three of these launches are flagged."""
    if len(launches) < 3:
        print(f"| {what}: {len(launches)} launches, too few | | | |")
        return
    total_ms = [median(float(METRIC.measure(one) or 0.0) for one in side) for side in (launches, unchanged)]
    step_ms = median(one.step_time_ms["p50"] for one in unchanged)
    found = rates((list(three), unchanged) for three in combinations(launches, 3))
    print(f"| {what}, measured {(total_ms[0] - total_ms[1]) / step_ms:+.2%} of step | {found} |")


def keep(launches: Mapping[str, Sequence[LaunchFacts]]) -> None:
    """Write the facts of all launches into the folder OUT, if it is set."""
    if folder := os.environ.get("OUT"):
        rows = {what: [to_builtins(launch) for launch in found] for what, found in launches.items()}
        Path(folder, "kernel_families.json").write_text(json.dumps(rows), encoding="utf-8")


def time_ms(launches: Sequence[LaunchFacts], words: str) -> float:
    """Return the median time of all families whose name contains one of ``words``."""
    pattern = re.compile(words, re.IGNORECASE)
    return median(sum(ms for name, ms in one.kernel_ms.items() if pattern.search(name)) for one in launches)


@pytest.mark.world(size=1, warm=True)
def test_kernel_families(distributed_world: DistributedWorld, tmp_path: Path) -> None:
    """Print the variation of unchanged families, and how often slower families are flagged."""
    until_s = time.monotonic() + LIMIT_S
    script = tmp_path / "kernels.py"
    script.write_text(dedent(SCRIPT), encoding="utf-8")
    launch = launcher(distributed_world, script)
    unchanged = [launch() for _ in range(UNCHANGED)]
    step_ms = median(one.step_time_ms["p50"] for one in unchanged)
    tensor_ms = time_ms(unchanged, "hypot")
    # The floating-point operations of the matrix products of forward and backward, relative to those of the single one.
    matrix_ms = time_ms(unchanged, "gemm|nvjet|mm$") / (4 * 3 * 16)
    changes = {}
    for change in CHANGES:
        more_ms = change * step_ms
        changes[f"hypotenuse of tensors {change:+.2%}"] = {"longer": 1 + more_ms / tensor_ms}
        changes[f"one matrix product {change:+.2%}"] = {"inner": 1 + more_ms / matrix_ms}
        changes[f"new kernel {change:+.2%}"] = {"new": more_ms / tensor_ms}
    slower: dict[str, list[LaunchFacts]] = {what: [] for what in changes}
    for _ in range(SLOWED):
        for what, change_of in changes.items():
            if time.monotonic() < until_s:
                slower[what].append(launch(**change_of))
    keep({"unchanged": unchanged} | slower)
    show(distributed_world.device, unchanged)
    for what, found in slower.items():
        show_slowed(what, found, unchanged)
