"""Error rates of the metric ``kernel_ms``, simulated: how often slower kernels are flagged, and unchanged ones.

Run: python -m benchmarks.verdict.kernel_gate --trials 600
     python -m benchmarks.verdict.kernel_gate --facts kernel_families.json

Each trial draws a baseline of 10 launches and 3 launches under test. A launch's clock moves all kernels by one factor,
and each family varies by itself, the more the shorter it is. With ``--facts`` the launches that
``benchmarks/overlap/kernel_families.py`` recorded are drawn instead, without replacement.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pytest_aorta.common.model import convert
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.profiled_steps import FamilyTime
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.kernel_gate import MIN_FRACTION
from pytest_aorta.verdict.metrics import parse_tolerances
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import Outcome

STEP_MS = 70.0
BASELINE, CANDIDATES = 10, 3
CHANGE = 0.0025
# Fractions of the step, calls: the kernels of a Llama's training step.
FAMILIES = {
    "nvjet_tst_NTT": (0.31, 64),
    "nvjet_tst_TNN": (0.17, 32),
    "nvjet_tst_NNN": (0.12, 32),
    "flash_bwd_kernel": (0.08, 8),
    "flash_fwd_kernel": (0.04, 8),
    "multi_tensor_apply_kernel[FusedAdamMathFunctor]": (0.06, 4),
    "vectorized_elementwise_kernel[MulFunctor]": (0.05, 80),
    "vectorized_elementwise_kernel[CUDAFunctor_add]": (0.04, 64),
    "elementwise_kernel[direct_copy_kernel_cuda]": (0.03, 120),
    "reduce_kernel[sum_functor]": (0.02, 40),
    "vectorized_elementwise_kernel[silu_kernel]": (0.012, 16),
    "softmax_warp_forward": (0.008, 4),
    "reduce_kernel[MeanOps]": (0.003, 40),
    "vectorized_elementwise_kernel[FillFunctor]": (0.001, 60),
}
# Standard deviations relative to the time of a family: of the clock in a block and between blocks, and of a family that
# takes 10% of the step; for a family that takes 1%, the last is twice as large.
REGIMES = {
    "steady": (0.0002, 0.0, 0.0003),
    "usual": (0.0007, 0.0, 0.0007),
    "noisy": (0.002, 0.0, 0.002),
    "other blocks": (0.0007, 0.002, 0.0007),
}
Draw = Callable[[random.Random, int, str], list[LaunchFacts]]


def template(block: str) -> LaunchFacts:
    """Return a launch of a GPU without kernels."""
    times = dict.fromkeys(("mean", "p50", "p99", "tail5", "max"), STEP_MS)
    return LaunchFacts(
        recorded_at="2026-01-02T03:04:05Z", block=block, launcher="forkserver", num_steps=100, step_time_ms=times,
        step_time_sample_ms=[STEP_MS], slowest_rank_p50_ms=STEP_MS, fastest_rank_p50_ms=STEP_MS, metrics={},
        weight_hashes={}, final_loss=None, environment={"device": "cuda"}, rank_lag_ms=[], step_time_growth=0.0,
        memory_growth=0.0, canary_ms={},
    )  # fmt: skip


def simulated(regime: str) -> Draw:
    """Return a function that draws launches of one block."""
    within, between, own = REGIMES[regime]

    def draw(rng: random.Random, count: int, block: str) -> list[LaunchFacts]:
        center, launches = 1 + rng.gauss(0, between), []
        for _ in range(count):
            clock = center * (1 + rng.gauss(0, within))
            kernels = {
                family: FamilyTime(STEP_MS * part * clock * (1 + rng.gauss(0, own * (0.1 / part) ** 0.3)), calls)
                for family, (part, calls) in FAMILIES.items()
            }
            launches.append(template(block).replace(kernels=kernels))
        return launches

    return draw


def recorded(path: Path) -> Iterator[tuple[list[LaunchFacts], list[LaunchFacts]]]:
    """Yield baselines and candidates without end, drawn from recorded launches of unchanged code."""
    launches = [
        convert(entry, LaunchFacts, str(path)) for entry in json.loads(path.read_text(encoding="utf-8"))["unchanged"]
    ]
    rng = random.Random(1)
    while True:
        drawn = rng.sample(launches, len(launches))
        yield drawn[CANDIDATES:], drawn[:CANDIDATES]


def drawn(regime: str) -> Iterator[tuple[list[LaunchFacts], list[LaunchFacts]]]:
    """Yield simulated baselines and candidates without end; of other blocks, a baseline has two."""
    draw, rng = simulated(regime), random.Random(1)
    is_elsewhere = REGIMES[regime][1] > 0
    while True:
        if is_elsewhere:
            baseline = [one for block in ("a" * 12, "b" * 12) for one in draw(rng, BASELINE // 2, block)]
        else:
            baseline = draw(rng, BASELINE + CANDIDATES, "a" * 12)
        candidates = draw(rng, CANDIDATES, "c" * 12) if is_elsewhere else baseline[BASELINE:]
        yield baseline[:BASELINE], candidates


def unchanged(launch: LaunchFacts) -> LaunchFacts:
    """Return the launch itself."""
    return launch


def slower(family: str) -> Callable[[LaunchFacts], LaunchFacts]:
    """Return a function that adds CHANGE of the step to one family."""
    return lambda launch: _with(launch, family, CHANGE, 0)


def new_kernel(launch: LaunchFacts) -> LaunchFacts:
    """Return the launch with a new family that takes CHANGE of the step."""
    return _with(launch, "triton_poi_fused_add", CHANGE, 4)


def further_call(launch: LaunchFacts) -> LaunchFacts:
    """Return the launch with a further call of its largest family that takes CHANGE of the step."""
    return _with(launch, _largest(launch), CHANGE, 1)


def replaced(launch: LaunchFacts) -> LaunchFacts:
    """Return the launch with half of its largest family under another name."""
    family = _largest(launch)
    half = FamilyTime(launch.kernels[family].ms / 2, launch.kernels[family].calls / 2)
    return launch.replace(kernels=launch.kernels | {family: half, "xmma_gemm_tn": half})


def _largest(launch: LaunchFacts) -> str:
    return max(launch.kernels, key=lambda family: launch.kernels[family].ms)


def _with(launch: LaunchFacts, family: str, change: float, calls: int) -> LaunchFacts:
    before = launch.kernels.get(family, FamilyTime(0.0, 0))
    now = FamilyTime(before.ms + change * launch.step_time_ms["p50"], before.calls + calls)
    return launch.replace(kernels=launch.kernels | {family: now})


def outcome(candidates: Sequence[LaunchFacts], launches: Sequence[LaunchFacts], tolerance: str) -> str:
    """Return the outcome for the candidates with the first number of launches that decides."""
    baseline = Baseline("case", "test", "platform", "kernels", {}, tuple(map(StoredLaunch, launches)))
    marked = parse_tolerances({"kernel_ms": tolerance}, "--tolerance")
    comparison = StoredComparison(
        "case", {}, baseline, marked, lambda metric: default_variance(metric, "cuda"), CANDIDATES
    )
    for count in (1, CANDIDATES):
        row = comparison.judge(candidates[:count])["kernel_ms"]
        if not row.is_open:
            break
    return f"{row.outcome.value} {row.launches}"


def table(name: str, draws: Iterator[tuple[list[LaunchFacts], list[LaunchFacts]]], trials: int, tolerance: str) -> None:
    """Print how often each change is flagged and passed, in percent."""
    print(f"\n{name}\n| change | trials | flagged | passed | passed with one launch |\n| --- | --- | --- | --- | --- |")
    first = next(draws)[0][0]
    families = [family for family, time in first.kernels.items() if time.ms >= MIN_FRACTION * first.step_time_ms["p50"]]
    changes: dict[str, Sequence[Callable[[LaunchFacts], LaunchFacts]]] = {
        "none": [unchanged],
        "half of the largest family replaced by another in equal time": [replaced],
        "+0.25% of the step in one family": [slower(family) for family in families],
        "+0.25% by a new kernel": [new_kernel],
        "+0.25% by a further call of the largest family": [further_call],
    }
    for what, kinds in changes.items():
        # False alarms are rare, so they need more trials.
        count = trials * 10 if kinds == [unchanged] else trials
        found = Counter[str]()
        for number, (baseline, candidates) in zip(range(count), draws, strict=False):
            found[outcome([kinds[number % len(kinds)](one) for one in candidates], baseline, tolerance)] += 1
        rates = [
            sum(times for key, times in found.items() if key.startswith(wanted))
            for wanted in (Outcome.REGRESSION.value, Outcome.PASS.value, f"{Outcome.PASS.value} 1")
        ]
        print(f"| {what} | {count:,} | {' | '.join(f'{100 * rate / count:.2f}' for rate in rates)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--tolerance", default="2%")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--facts", type=Path)
    given = parser.parse_args()
    if given.facts:
        table(str(given.facts), recorded(given.facts), given.trials, given.tolerance)
        return
    for regime in given.regimes:
        table(regime, drawn(regime), given.trials, given.tolerance)


if __name__ == "__main__":
    main()
