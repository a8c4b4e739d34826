"""How often the verdict and its peers' rules are right, on recorded launches with known changes and in simulation.

Run: python -m benchmarks.verdict.detection [--trials 2000] [--seed 1] [--plot docs/detection.png]
    [--parts gpu,peers,limit,cpu,week]
The launches are those of benchmarks/verdict/data, made by benchmarks/verdict/record_launches.py: some unchanged, some
with a real delay. Other changes are injected by arithmetic. Needs matplotlib for --plot; Otava's
row needs apache-otava (it pins other numpy versions: pip install --no-deps --target DIR apache-otava; PYTHONPATH=DIR).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

from benchmarks.verdict.peer_rules import PEERS
from benchmarks.verdict.regimes import REGIMES, week
from pytest_aorta.result.facts import LaunchFacts, growth, rank_lags_ms
from pytest_aorta.result.provenance import Provenance
from pytest_aorta.verdict.causes import straggler
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import RESOLVED_BY, Outcome, StoredRule, decide_pairs
from pytest_aorta.verdict.statistics.variance import Estimate, baseline_estimate, observed

DATA = Path(__file__).parent / "data"
K = 10
# Launches that every rule compares with, where the launches of one block have to suffice for the candidates too.
HISTORY = 7
MAX_LAUNCHES, MAX_PAIRS = 5, 6
# Between launches, tails of llama_fsdp2 vary by 10%, and tails of fsdp by 1.8% and 1.2%; finer tolerances are refused.
NOISY_TAILS = {"step_time_p99": 0.3, "step_time_tail5": 0.3}
STABLE_TAILS = {"step_time_p99": 0.08, "step_time_tail5": 0.05}
STALLS = {"stall25": "every 50th step +25%", "stall50": "every 50th step +50%", "slow2": "every step +2%"}
UNCHANGED = ("base", "untimed")
P50_CHANGES = (0, 0.5, 1, 2, 3, 5, 10)
P99_CHANGES = (0, 10, 25, 50)
METRIC_OF: dict[str, Callable[[np.ndarray], float]] = {
    "step_time_p50": lambda steps: float(np.quantile(steps, 0.5)),
    "step_time_p99": lambda steps: float(np.quantile(steps, 0.99)),
    "step_time_tail5": lambda steps: float(np.sort(steps)[-max(1, len(steps) // 20) :].mean()),
}


@dataclass(frozen=True, eq=False)
class Recorded:
    """One recorded launch: the steps' maxima over ranks in milliseconds, in order."""

    block: str
    variant: str
    steps: np.ndarray
    waits: list[list[float]]


def load(pattern: str) -> list[Recorded]:
    """Return every launch of the files that match."""
    found = []
    for path in sorted(DATA.glob(pattern)):
        document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        for launch in document["launches"]:
            steps = np.array(launch["step_ms"]).max(axis=0)
            found.append(Recorded(path.name.removesuffix(".json.gz"), launch["variant"], steps, launch["wait_ms"]))
    return found


def scaled(percent: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return a change that makes every step longer by ``percent``."""
    return lambda steps: steps * (1 + percent / 100)


def stalled(percent: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return a change that makes every 50th step longer by ``percent`` of the median."""

    def change(steps: np.ndarray) -> np.ndarray:
        out = steps.copy()
        out[::50] += np.median(steps) * percent / 100
        return out

    return change


def ramped(percent: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return a change that makes steps longer and longer, the last step by ``percent``."""
    return lambda steps: steps * (1 + percent / 100 * np.linspace(0, 1, len(steps)))


def jittered(percent: float, rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Return a change that delays each step independently, exponentially with a mean of ``percent`` of the median."""
    return lambda steps: steps + rng.exponential(np.median(steps) * percent / 100, len(steps))


class Lab:
    """Draws baselines and candidates from recorded launches."""

    def __init__(self, launches: Sequence[Recorded], device: str, rng: np.random.Generator, size: int = K) -> None:
        """Keep the launches to draw from; ``size`` is the number of launches of a baseline."""
        self.launches, self.device, self.rng, self.size = launches, device, rng, size
        self.drawn = self.refused = 0

    def pool(self, block: str | None = None, variants: Sequence[str] = UNCHANGED) -> list[Recorded]:
        """Return the launches of some variants, of one block or of all."""
        return [one for one in self.launches if one.variant in variants and block in (None, one.block)]

    @property
    def blocks(self) -> list[str]:
        """Return the names of all blocks."""
        return sorted({one.block for one in self.launches})

    def cycle(self, pool: Sequence[Recorded], count: int) -> list[Recorded]:
        """Return ``count`` launches in random order, some of them twice if there are fewer."""
        return [pool[number % len(pool)] for number in self.rng.permutation(max(count, len(pool)))]

    def draw(self, pool: Sequence[Recorded], count: int) -> list[Recorded]:
        """Return different launches in random order."""
        return [pool[number] for number in self.rng.permutation(len(pool))[:count]]

    def baseline(self, launches: Sequence[Recorded], metric: str) -> Estimate:
        """Return the baseline estimate that the plugin would store for the launches."""
        center: dict[Any, list[float]] = defaultdict(list)
        for one in launches:
            center[one.block].append(math.log(METRIC_OF[metric](one.steps)))
        return baseline_estimate(center, [list(center.values())], default_variance(METRICS[metric], self.device))

    def learned(
        self, metric: str, tolerance: float, draw: Callable[[], Sequence[Recorded]]
    ) -> tuple[Estimate, Sequence[Recorded]]:
        """Return a baseline that --update-baselines accepts; draw again instead of any that it refuses as too noisy."""
        while True:
            launches = draw()
            self.drawn += 1
            groups: dict[Any, list[float]] = defaultdict(list)
            for one in launches[: self.size]:
                groups[one.block].append(math.log(METRIC_OF[metric](one.steps)))
            if RESOLVED_BY * math.sqrt(observed([list(groups.values())]).within.value) <= math.log1p(tolerance):
                return self.baseline(launches[: self.size], metric), launches
            self.refused += 1
            if self.refused == self.drawn == 200:
                raise RuntimeError(f"no baseline of {metric} is quiet enough for {tolerance:.1%}")


Change = Callable[[np.ndarray], np.ndarray]


def sequential(
    stored: Estimate, candidates: Sequence[Recorded], metric: str, tolerance: float, change: Change
) -> tuple[Outcome, int]:
    """Return the verdict on launches taken one by one, and how many launches it took."""
    logs: list[float] = []
    for one in candidates[:MAX_LAUNCHES]:
        logs.append(math.log(METRIC_OF[metric](change(one.steps))))
        decision = StoredRule(stored, one.block, tolerance, MAX_LAUNCHES).decide(logs)
        if decision.outcome is not None:
            return decision.outcome, len(logs)
    raise AssertionError("the last look decides")


def paired(
    lab: Lab,
    candidates: Sequence[Recorded],
    references: Sequence[Recorded],
    metric: str,
    tolerance: float,
    change: Change,
    max_pairs: int,
) -> tuple[Outcome, int]:
    """Return the A/B's verdict, after a first launch that decided nothing, and how many launches it took."""
    pairs: list[tuple[float, float]] = []
    stored = lab.draw(lab.pool(candidates[0].block), lab.size)
    variance = lab.baseline(stored, metric).variance.within
    for one, other in zip(candidates, references, strict=False):
        here, there = METRIC_OF[metric](change(one.steps)), METRIC_OF[metric](other.steps)
        pairs.append((math.log(here), math.log(there)))
        decision = decide_pairs(pairs, variance, tolerance, max_pairs=max_pairs, worse=1)
        if decision.outcome is not None:
            return decision.outcome, 1 + 2 * len(pairs)
    raise AssertionError("the last look decides")


class Tally:
    """Counts outcomes and launches."""

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = defaultdict(int)
        self.launches: list[int] = []

    def add(self, result: tuple[Outcome, int]) -> None:
        """Count the result of one trial."""
        self.outcomes[result[0]] += 1
        self.launches.append(result[1])

    def fraction(self, outcome: Outcome) -> float:
        """Return the fraction of all trials with this outcome, in percent."""
        return 100 * self.outcomes[outcome] / len(self.launches)

    def __str__(self) -> str:
        """Return the numbers of a table row: flagged, passed, inconclusive, launches spent."""
        flagged, count = self.outcomes[Outcome.REGRESSION], len(self.launches)
        low = 100 * (beta.ppf(0.025, flagged, count - flagged + 1) if flagged else 0)
        high = 100 * (beta.ppf(0.975, flagged + 1, count - flagged) if flagged < count else 1)
        return (
            f"{self.fraction(Outcome.REGRESSION):6.2f} ({low:.2f} to {high:.2f}) | "
            f"{self.fraction(Outcome.PASS):6.2f} | {self.fraction(Outcome.INCONCLUSIVE):6.2f} | "
            f"{np.mean(self.launches):.2f}"
        )


def same_block(lab: Lab, metric: str, tolerance: float, change: Change, trials: int, variants: Sequence[str]) -> Tally:
    """Draw baseline and candidate from one block; ``variants`` are the candidate's."""
    tally = Tally()
    blocks = [one for one in lab.blocks if len(lab.pool(one)) >= lab.size + 3 and lab.pool(one, variants)]

    def draw() -> list[Recorded]:
        pool = lab.pool(blocks[lab.rng.integers(len(blocks))])
        return lab.draw(pool, len(pool))

    for _ in range(trials):
        stored, launches = lab.learned(metric, tolerance, draw)
        source = launches[lab.size :] if variants == UNCHANGED else lab.pool(launches[0].block, variants)
        tally.add(sequential(stored, lab.cycle(source, MAX_LAUNCHES), metric, tolerance, change))
    return tally


def across_blocks(
    lab: Lab, metric: str, tolerance: float, change: Change, trials: int, variants: Sequence[str]
) -> Tally:
    """Draw the candidate from one block, the baseline half and half from two others."""
    tally = Tally()

    def draw() -> list[Recorded]:
        order = lab.rng.permutation(lab.blocks).tolist()
        candidate = next(one for one in order if lab.pool(one, variants))
        others = [one for one in order if one != candidate][:2]
        half = [one for name in others for one in lab.draw(lab.pool(name), K // 2)]
        return half + lab.pool(candidate, variants)

    for _ in range(trials):
        stored, launches = lab.learned(metric, tolerance, draw)
        tally.add(sequential(stored, lab.cycle(launches[K:], MAX_LAUNCHES), metric, tolerance, change))
    return tally


def ab(
    lab: Lab,
    metric: str,
    tolerance: float,
    change: Change,
    trials: int,
    variants: Sequence[str],
    blocks: Sequence[str],
    max_pairs: int = MAX_PAIRS,
) -> Tally:
    """Draw pairs from one of the blocks; launches that were recorded next to each other are a pair."""
    tally = Tally()
    for _ in range(trials):
        block = blocks[lab.rng.integers(len(blocks))]
        order = [one for one in lab.launches if one.block == block]
        pairs = _adjacent(order, variants)
        chosen = lab.rng.permutation(max(max_pairs, len(pairs)))
        picked = [pairs[number % len(pairs)] for number in chosen[:max_pairs]]
        candidates, references = zip(*picked, strict=True)
        tally.add(paired(lab, candidates, references, metric, tolerance, change, max_pairs))
    return tally


def _adjacent(order: Sequence[Recorded], variants: Sequence[str]) -> list[tuple[Recorded, Recorded]]:
    """Return pairs (candidate, reference): each candidate with the unchanged launch recorded next to it."""
    pairs = []
    for number, one in enumerate(order):
        if one.variant not in variants:
            continue
        others = [index for index, other in enumerate(order) if other.variant in UNCHANGED and index != number]
        nearest = min(others, key=lambda index: abs(index - number))
        pairs.append((one, order[nearest]))
    return pairs


def drawn_in(lab: Lab, block: str) -> tuple[list[Recorded], list[Recorded]]:
    """Return stored launches and candidates: of one block, or of a block and of the other two if ``block`` is empty."""
    if block:
        launches = lab.draw(lab.pool(block), HISTORY + MAX_LAUNCHES)
        return launches[:HISTORY], launches[HISTORY:]
    candidate, *others = lab.rng.permutation(lab.blocks).tolist()
    return (
        [one for name in others for one in lab.draw(lab.pool(name), K // 2)],
        lab.draw(lab.pool(candidate), MAX_LAUNCHES),
    )


def panels(lab: Lab, percents: Sequence[float], trials: int) -> dict[str, dict[str, list[float]]]:
    """Return panel -> rule -> how often it flags each slowdown, in percent; all rules judge the same launches.

    The panels are the blocks, and the candidates of one block with stored launches of the two others.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for block in [*lab.blocks, ""]:
        counts: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(percents))
        for _ in range(trials):
            history, candidates = drawn_in(lab, block)
            for place, percent in enumerate(percents):
                for name, is_flagged in judged(lab, history, candidates, scaled(percent)).items():
                    counts[name][place] += 100 * is_flagged / trials
        found[block or "across blocks"] = dict(counts)
    return found


def judged(lab: Lab, history: Sequence[Recorded], candidates: Sequence[Recorded], change: Change) -> dict[str, bool]:
    """Return rule -> whether it flags the candidates."""
    stored = lab.baseline(history, "step_time_p50")
    flagged = {
        f"aorta, T = {tolerance:.0%}": sequential(stored, candidates, "step_time_p50", tolerance, change)[0]
        is Outcome.REGRESSION
        for tolerance in (0.01, 0.02)
    }
    before, after = [one.steps for one in history], [change(one.steps) for one in candidates]
    for name, rule in PEERS.items():
        flagged[name] = bool(rule.flags(before, after[: 3 if rule.needs_history else 1]))
    return flagged


def slow_ranks(rng: np.random.Generator, trials: int) -> None:
    """Print how often launches with 1 ms more work on rank 1 name it, and unchanged launches name no rank."""
    print("\n## 1 ms of more work on rank 1 of 4\n")
    print("| block | p50, ms | launches | one launch names | three launches name |\n| --- | --- | --- | --- | --- |")
    launches = load("*h200-*.json.gz")
    for block in sorted({one.block for one in launches}):
        mine = [one for one in launches if one.block == block and one.waits and one.waits[0]]
        unchanged = [one for one in mine if one.variant in UNCHANGED]
        for variant in ("base", "rank1"):
            chosen = [one for one in mine if one.variant == variant]
            if len(chosen) < 3:
                continue
            single = [_named([one], unchanged) for one in chosen]
            triples = [
                _named([chosen[n] for n in rng.permutation(len(chosen))[:3]], unchanged) for _ in range(trials // 10)
            ]
            cells = " | ".join(
                f"{len(named) - named.count(None)} of {len(named)}, ranks {sorted(set(named) - {None})}"  # type: ignore[type-var]
                for named in (single, triples)
            )
            p50 = float(np.median([np.median(one.steps) for one in chosen]))
            print(f"| {block} | {p50:.2f} | {len(chosen)} {variant} | {cells} |")


def _named(chosen: Sequence[Recorded], unchanged: Sequence[Recorded]) -> int | None:
    reference = [_facts(one) for one in unchanged if one not in chosen]
    found = straggler([_facts(one) for one in chosen], reference)
    return None if found is None else found.rank


def _facts(one: Recorded) -> LaunchFacts:
    return LaunchFacts(
        provenance=Provenance("2026-01-01T00:00:00Z", "0" * 12),
        launcher="forkserver",
        num_steps=len(one.steps),
        step_time_ms=dict.fromkeys(("p50", "p99", "tail5", "mean"), float(np.median(one.steps))),
        metrics={},
        weight_hashes={},
        final_loss=None,
        environment={"device": "cuda"},
        rank_lag_ms=rank_lags_ms(one.waits),
    )


def show(lab: Lab, title: str, rows: Sequence[tuple[str, Tally]]) -> None:
    """Print a table of tallies."""
    refused = f"; {100 * lab.refused / lab.drawn:.0f}% of baselines refused as too noisy" if lab.refused else ""
    lab.drawn = lab.refused = 0
    print(f"\n## {title}{refused}\n")
    print("| change | flagged, % (95%) | passed, % | inconclusive, % | launches |\n| --- | --- | --- | --- | --- |")
    for name, tally in rows:
        print(f"| {name} | {tally} |")


def gpu_tables(lab: Lab, trials: int, rng: np.random.Generator) -> None:
    """Print all tables on the recorded GPU launches."""
    plain, p50 = scaled(0), "step_time_p50"
    nothing = [("none", plain, UNCHANGED)]
    injected = [(f"+{percent}% of every step", scaled(percent), UNCHANGED) for percent in P50_CHANGES[1:]]
    real = [(f"delay kernel of {name[4:]}%", plain, (name,)) for name in ("slow0.5", "slow1", "slow2", "slow5")]
    real = [row for row in real if lab.pool(None, row[2])]
    for tolerance in (0.005, 0.01, 0.02):
        rows = [
            (name, same_block(lab, p50, tolerance, change, trials, variants))
            for name, change, variants in nothing + injected + real
        ]
        show(lab, f"p50 at T = {tolerance:.1%}, one block", rows)
    if len(lab.blocks) >= 3:
        for tolerance in (0.01, 0.02):
            rows = [
                (name, across_blocks(lab, p50, tolerance, change, trials, kind))
                for name, change, kind in nothing + injected + real
                if name.startswith(("none", "+")) or len({one.block for one in lab.pool(None, kind)}) > 1
            ]
            show(lab, f"p50 at T = {tolerance:.1%}, across blocks", rows)
    for block in lab.blocks:
        rows = [
            (name, ab(lab, p50, 0.01, change, trials // 2, kind, [block]))
            for name, change, kind in nothing + injected + real
            if any(one.block == block for one in lab.pool(None, kind))
        ]
        show(lab, f"p50 at T = 1.0%, interleaved A/B in {block} (launches count both sides and the first)", rows)
    rows = [
        ("ramp of +2%", same_block(lab, p50, 0.005, ramped(2), trials, UNCHANGED)),
        ("ramp of +10%", same_block(lab, p50, 0.005, ramped(10), trials, UNCHANGED)),
        ("jitter of 2%", same_block(lab, p50, 0.005, jittered(2, rng), trials, UNCHANGED)),
    ]
    show(lab, "p50 at T = 0.5%, other changes", rows)
    named = {
        percent: np.mean([growth(list(ramped(percent)(one.steps))) > 0.03 for one in lab.pool()])
        for percent in (0, 2, 5, 10)
    }
    print(
        "\nramps named:",
        ", ".join(f"+{percent}%: {100 * fraction:.0f}% of launches" for percent, fraction in named.items()),
    )


def tail_tables(lab: Lab, tolerances: Mapping[str, float], trials: int) -> None:
    """Print the tables of stalls in some steps, on launches of a workload whose tails are stable enough for them."""
    for metric, tolerance in tolerances.items():
        rows = [
            (f"every 50th step +{percent}%", same_block(lab, metric, tolerance, stalled(percent), trials, UNCHANGED))
            for percent in P99_CHANGES
        ]
        rows += [
            (f"delay kernel, {what}", same_block(lab, metric, tolerance, scaled(0), trials, (name,)))
            for name, what in STALLS.items()
            if lab.pool(None, (name,))
        ]
        show(lab, f"{metric} at T = {tolerance:.1%}, one block", rows)


def cpu_tables(lab: Lab, block: str, trials: int) -> None:
    """Print all tables on the launches of one block of CPU ranks."""
    p50 = "step_time_p50"
    rows = [
        (f"+{percent}%", same_block(lab, p50, 1.0, scaled(percent), trials, UNCHANGED))
        for percent in (0, 50, 100, 200, 400)
    ]
    show(lab, f"{block}, p50 at T = 100%, one block", rows)
    large, small = (0, 10, 20, 50), (0, 2, 5, 10)
    for max_pairs, tolerance, changes in ((6, 0.1, large), (12, 0.1, large), (12, 0.02, small)):
        rows = [
            (f"+{percent}%", ab(lab, p50, tolerance, scaled(percent), trials, UNCHANGED, [block], max_pairs))
            for percent in changes
        ]
        real = ab(lab, p50, tolerance, scaled(0), trials, ("slow20",), [block], max_pairs)
        show(
            lab,
            f"{block}, p50 at T = {tolerance:.0%}, A/B of up to {max_pairs} pairs",
            [*rows, ("added work of 20%", real)],
        )


def plot(path: Path, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw the power curves of every rule, a panel for each block and one across blocks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained", sharex=True, sharey=True)
    for panel, (name, curves) in zip(axes.flat, found.items(), strict=True):
        for rule, values in curves.items():
            own = {"marker": "o", "linewidth": 2.2} if rule.startswith("aorta") else {"linestyle": "--", "linewidth": 1}
            panel.plot(P50_CHANGES, values, label=rule, **own)
        panel.set(title=name.replace("h200-x4-", ""), ylim=(-3, 103), xlim=(-0.03, 11))
        panel.set_xscale("symlog", linthresh=0.5)
        panel.set_xticks(P50_CHANGES, [f"{percent:g}" for percent in P50_CHANGES])
        panel.grid(alpha=0.3)
    figure.supxlabel("slowdown of every step, %")
    figure.supylabel("flagged as a regression, %")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle("The same launches of 4 H200s, judged by every rule")
    figure.savefig(path, dpi=100)


def peers_part(trials: int, rng: np.random.Generator, plot_path: Path | None) -> None:
    """Print how often every rule flags a slowdown, on the same launches, and plot it."""
    lab = Lab([one for one in load("h200-*.json.gz") if one.variant in UNCHANGED], "cuda", rng)
    found = panels(lab, P50_CHANGES, min(trials, 300))
    for name, rows in found.items():
        print(f"\n## {name}: flagged %, by every rule on the same launches\n")
        print("| rule | " + " | ".join(f"+{percent:g}%" for percent in P50_CHANGES) + " |")
        print("| --- |" + " --- |" * len(P50_CHANGES))
        for rule, values in rows.items():
            print(f"| {rule} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    if plot_path:
        plot(plot_path, found)


def limit_part(trials: int, rng: np.random.Generator) -> None:
    """Print how often changes of 0.5, 1 and 1.5 times the printed limit are flagged, in the block of the baseline."""
    print("\n## The limit that a recording prints, T = 1%\n")
    print("| block | launches | limit, median | 0.5 times flagged | 1 times | 1.5 times |")
    print("| --- | --- | --- | --- | --- | --- |")
    lab = Lab([one for one in load("*h200-*.json.gz") if one.variant in UNCHANGED], "cuda", rng)
    for block in [one for one in lab.blocks if len(lab.pool(one)) >= HISTORY + 3]:
        limits, flagged = [], Counter[float]()
        for _ in range(trials):
            launches = lab.draw(lab.pool(block), HISTORY + 3)
            stored = lab.baseline(launches[:HISTORY], "step_time_p50")
            limit = StoredRule(stored, block, 0.01, 3).detectable(3)
            limits.append(limit)
            logs = [math.log(METRIC_OF["step_time_p50"](one.steps)) for one in launches[HISTORY:]]
            for times in (0.5, 1, 1.5):
                slower = [value + times * math.log1p(limit) for value in logs]
                decision = StoredRule(stored, block, 0.01, 3).decide(slower)
                flagged[times] += decision.outcome is Outcome.REGRESSION
        cells = " | ".join(f"{100 * flagged[times] / trials:.0f}%" for times in (0.5, 1, 1.5))
        print(f"| {block} | 3 | +{100 * float(np.median(limits)):.2f}% | {cells} |")


def gpu_part(trials: int, rng: np.random.Generator) -> None:
    """Print the tables on H200s."""
    gpu = Lab(load("h200-*.json.gz"), "cuda", rng)
    counts = {name: len(gpu.pool(name)) for name in gpu.blocks}
    print(f"H200: {len(gpu.launches)} launches, unchanged by block {counts}; baseline of {K}, at most {MAX_LAUNCHES}")
    gpu_tables(gpu, trials, rng)
    tail_tables(gpu, NOISY_TAILS, trials)
    tails = Lab(load("tails-*.json.gz"), "cuda", rng, size=7)
    print(f"\nfsdp: {len(tails.launches)} launches, {len(tails.pool())} unchanged")
    tail_tables(tails, STABLE_TAILS, trials)
    slow_ranks(rng, trials)


def cpu_part(trials: int, rng: np.random.Generator) -> None:
    """Print the tables on CPU ranks: each block with the noise of its own hour."""
    launches = load("cpu-*.json.gz")
    for block in sorted({one.block for one in launches}):
        own = [one for one in launches if one.block == block]
        # Some launches are left for candidates.
        lab = Lab(own, "cpu", rng, size=min(K, sum(one.variant in UNCHANGED for one in own) - 3))
        print(f"\n{block}: {len(lab.launches)} launches, {len(lab.pool())} unchanged")
        cpu_tables(lab, block, trials)


def week_part(trials: int, rng: np.random.Generator) -> None:
    """Print a simulated week of a suite."""
    print("\n## Fifty tests, fifty commits a week, T = 5%, simulated\n")
    cells = "false alarms a week | launches a test | inconclusive, % | +10% flagged, %"
    print(f"| regime | {cells} | with A/B: {cells} |")
    print("| --- |" + " --- |" * 8)
    for name in REGIMES:
        print(f"| {name} | {week(name, trials, rng)} |")


def main() -> None:
    """Print every table, or those of some parts; each part draws from the seed anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--parts", default="gpu,peers,limit,cpu,week")
    arguments = parser.parse_args()
    parts = {
        "gpu": lambda rng: gpu_part(arguments.trials, rng),
        "peers": lambda rng: peers_part(arguments.trials, rng, arguments.plot),
        "limit": lambda rng: limit_part(arguments.trials, rng),
        "cpu": lambda rng: cpu_part(arguments.trials, rng),
        "week": lambda rng: week_part(arguments.trials, rng),
    }
    for name in arguments.parts.split(","):
        if name not in parts:
            parser.error(f"--parts {name}: allowed are {', '.join(parts)}, parted by commas")
        parts[name](np.random.default_rng(arguments.seed))


if __name__ == "__main__":
    main()
