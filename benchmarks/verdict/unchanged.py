"""Launches of unchanged code on CPU ranks or GPUs: records them, and compares them with each other.

Record: RECORD_OUT=DIR RECORD_LIMIT_S=3600 python -m pytest benchmarks/verdict/unchanged.py -k cpu
Compare: python -m benchmarks.verdict.unchanged [DIR/unchanged.jsonl ...] [--draws 100] [--seed 1]
Each stretch launches one workload or script again and again on 2 warm CPU ranks, every second one beside a process that
keeps a core busy; ``-k cuda`` launches the workloads on all GPUs, which have to be idle. Each launch is appended to
DIR/unchanged.jsonl, so a run can be stopped at any moment. A file that ends in .gz is read too; without a file, those
of the folder data. Launches of one stretch are compared in two ways. In turn: the first ten are the baseline, and the
others are compared with it one after the other; no launch is a candidate twice. Resampled: ten random launches are the
baseline, and the others, in random order, the candidates, or the pairs of an A/B.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verdict.costs_repeat import HEAD, SCRIPTS, load
from pytest_aorta import DistributedWorld
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import in_pairs, settle, with_baseline
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import Tolerance, metric_of, parse_tolerances
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts

FILE = "unchanged.jsonl"
DATA = sorted(Path(__file__).parent.joinpath("data").glob("unchanged-*.jsonl.gz"))
BASELINE, MAX_LAUNCHES = 10, 5
# Times of CPU ranks are compared only if a marker names them.
MARKED = {
    device: parse_tolerances(
        {
            "step_time_p50": f"{wide}%",
            "step_time_mean": f"{wide}%",
            "step_time_tail5": "50%",
            "tokens_per_s": f"{wide}%",
            "samples_per_s": f"{wide}%",
            "overlap_ratio": f"{wide} points",
            "exposed_comm_ms": f"{wide}% of step",
            "time_overlapped_ms": f"+{wide}%",
        },
        "MARKED",
    )
    for device, wide in {"cpu": 20, "cuda": 5}.items()
}
OUTCOMES = (Outcome.PASS, Outcome.REGRESSION, Outcome.IMPROVED, Outcome.INCONCLUSIVE, Outcome.MISSING)
STRETCH = int(os.environ.get("RECORD_STRETCH", "24"))
# A 99th percentile needs 100 steps.
STEPS = 110
WORKLOADS: dict[str, dict[str, Any]] = {
    "copy_compute": {"steps": STEPS, "gemms": 2, "copy_mb": 0.5},
    "ddp_overlap": {"steps": 30, "n_layers": 1, "num_tables": 2, "batch_size": 16},
    "fsdp": {"steps": STEPS, "verify": 0, "layers": 2},
    "llama_fsdp2": {"steps": 20, "n_layers": 1},
    "ranking": {"steps": 20, "n_layers": 1, "num_tables": 2, "batch_size": 16},
}
_SCRIPTS = {
    "FSDP2 by hand": SCRIPTS["FSDP2 by hand"].replace("range(8)", f"range({STEPS})"),
    "DDP, loader": SCRIPTS["DDP, loader"].replace("randn(128", f"randn({16 * STEPS}"),
    "GAN": SCRIPTS["GAN"].replace("range(8)", f"range({STEPS})"),
}


@pytest.mark.launch_timeout(120)
@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        pytest.param([*_SCRIPTS, *WORKLOADS], 2, id="cpu", marks=pytest.mark.world(size=2, device="cpu", warm=True)),
        pytest.param([*WORKLOADS], 1, id="cuda", marks=pytest.mark.world(size="all", device="cuda", warm=True)),
    ],
)
def test_record(distributed_world: DistributedWorld, tmp_path: Path, names: list[str], kinds: int) -> None:
    """Launch stretch by stretch until the time is over, idle and with two ``kinds`` busy too."""
    out, ends_s = Path(os.environ.get("RECORD_OUT", ".")) / FILE, time.monotonic() + _limit_s()
    for stretch in count():
        name = names[stretch // kinds % len(names)]
        busy = stretch % kinds
        with load(busy), out.open("a", encoding="utf-8") as file:
            for _ in range(STRETCH):
                if time.monotonic() > ends_s:
                    return
                try:
                    line = _launch(distributed_world, name, tmp_path)
                except LaunchError as error:
                    print(f"{name}: {error}")
                    continue
                print(json.dumps({"case": name, "busy": busy} | line), file=file, flush=True)


def _limit_s() -> float:
    return float(os.environ.get("RECORD_LIMIT_S", "60"))


def _launch(world: DistributedWorld, name: str, folder: Path) -> dict[str, object]:
    """Launch once and return the platform and the facts of the launch."""
    if name in WORKLOADS:
        result = world.run(name, **WORKLOADS[name])
    else:
        script = folder / "train.py"
        script.write_text(HEAD + _SCRIPTS[name], encoding="utf-8")
        result = world.run_script(script)
    return {"platform": world.platform, "facts": to_builtins(result.facts)}


def stretches(path: Path) -> dict[tuple[str, int, int], list[LaunchFacts]]:
    """Return the launches of each stretch, in order, by case, whether the machine was kept busy, and number."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[tuple[str, int, int], list[LaunchFacts]] = defaultdict(list)
    number, last = 0, None
    for line in text.decode().splitlines():
        launch = json.loads(line)
        here = launch["case"], launch["busy"]
        number, last = number + (here != last), here
        # Launches may have been recorded when there were other facts.
        facts = {name: value for name, value in launch["facts"].items() if name in LaunchFacts.__struct_fields__}
        found[*here, number].append(convert(facts, LaunchFacts, str(path)))
    return {key: launches for key, launches in found.items() if len(launches) > BASELINE}


def _marked(launch: LaunchFacts) -> dict[str, Tolerance]:
    """Return the tolerances of the metrics that a launch has."""
    marked = MARKED[launch.device]
    rows = {name: metric_of(name, tolerance.direction) for name, tolerance in marked.items()}
    return {name: marked[name] for name, row in rows.items() if row.measure(launch) is not None}


def _stored(launches: Sequence[LaunchFacts], candidates: Sequence[LaunchFacts]) -> Verdicts:
    """Return the verdicts on as many candidates as the comparison asks for."""
    # As --aorta-record=noisy records: no metric is left out.
    kept = tuple(StoredLaunch(launch) for launch in launches)
    first = launches[0]
    baseline = Baseline("case", "case", first.device, "case", {}, kept)
    most = min(MAX_LAUNCHES, len(candidates))
    comparison = StoredComparison("case", {}, baseline, _marked(first), most)
    further = iter(candidates[1:])
    return settle(with_baseline(comparison, candidates[0]), lambda _: next(further))


def _paired(candidates: Sequence[LaunchFacts], references: Sequence[LaunchFacts]) -> Verdicts:
    """Return the verdicts of an A/B of as many pairs as it asks for."""
    first = references[0]
    comparison = PairedComparison("case", _marked(first), max_pairs=len(candidates), version="same")
    sides = {Side.CANDIDATE: iter(candidates), Side.REFERENCE: iter(references)}
    return settle(in_pairs(comparison), lambda side: next(sides[side]))


def _in_turn(launches: list[LaunchFacts]) -> Iterator[Verdicts]:
    for begin in range(BASELINE, len(launches)):
        yield _stored(launches[:BASELINE], launches[begin:])


def _resampled(launches: list[LaunchFacts], draws: int, rng: random.Random) -> Iterator[Verdicts]:
    for _ in range(draws):
        shuffled = rng.sample(launches, len(launches))
        yield _stored(shuffled[:BASELINE], shuffled[BASELINE:])


def _in_pairs(launches: list[LaunchFacts], draws: int, rng: random.Random) -> Iterator[Verdicts]:
    """Yield A/Bs of launches that were made one after the other, from a random launch on, in alternating order."""
    for _ in range(draws):
        begin = rng.randrange(len(launches))
        run = [launches[(begin + place) % len(launches)] for place in range(len(launches) // 4 * 4)]
        pairs = [pair for a, b, c, d in zip(*(run[k::4] for k in range(4)), strict=True) for pair in ((a, b), (d, c))]
        yield _paired(*(tuple(side) for side in zip(*pairs, strict=True)))


def main() -> None:
    """Print a table for each file and way of comparing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", default=DATA)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for file in arguments.files:
        print(f"\n## {file.name}\n")
        compare(file, arguments.draws, random.Random(arguments.seed))


def compare(file: Path, num_draws: int, rng: random.Random) -> None:
    """Print the outcomes by metric of the launches of one file."""
    known = stretches(file)
    num_busy = sum(len(launches) for (_, busy, _), launches in known.items() if busy)
    print(f"{sum(map(len, known.values()))} launches in {len(known)} stretches, {num_busy} beside a busy process")
    ways = {
        "baseline, in turn": _in_turn,
        "baseline, resampled": lambda launches: _resampled(launches, num_draws, rng),
        "A/B, resampled": lambda launches: _in_pairs(launches, num_draws, rng),
    }
    for text, compared in ways.items():
        counts: dict[str, Counter[Outcome]] = defaultdict(Counter)
        num_comparisons = num_alarms = 0
        for launches in known.values():
            for verdicts in compared(launches):
                num_comparisons += 1
                num_alarms += any(row.outcome is Outcome.REGRESSION for row in verdicts.rows)
                for row in verdicts.rows:
                    counts[row.metric][row.outcome] += 1
        print(f"\n{text}: {num_comparisons} comparisons, {num_alarms} with a false alarm\n")
        print(f"| metric | {' | '.join(map(str, OUTCOMES))} |\n| --- |{' --- |' * len(OUTCOMES)}")
        for name, found in sorted(counts.items()):
            if any(found[outcome] for outcome in OUTCOMES):
                print(f"| `{name}` | {' | '.join(str(found[outcome]) for outcome in OUTCOMES)} |")


if __name__ == "__main__":
    main()
