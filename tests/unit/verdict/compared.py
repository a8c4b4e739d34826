"""Compares made-up launches with a stored baseline or with one another."""

from pytest_aorta.plan.options import Recording
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.learning import BaselineRecording
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts
from tests.unit.builders import baseline_of, launches_near, make_baseline, make_facts, make_options

CONFIG = make_baseline().config
STABLE = baseline_of(*launches_near(10.0, 10))
LONG = {"num_steps": 100, "step_time_ms": {"mean": 10.0, "p50": 10.0, "p99": 12.0, "tail5": 12.0}}
SURE = {"torch": "2.11.0", "device": "cuda", "deterministic_algorithms": True, "bitwise_reproducible": True}
PINNED = "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2"
PINNED_CPU = {
    "torch": "2.11.0",
    "device": "cpu",
    "cpu_capability": "AVX2",
    "cpu_kernels": PINNED,
    "num_threads": 1,
    "deterministic_algorithms": False,
    "bitwise_reproducible": True,
}
OTHER_WEIGHTS = {"10": "f" * 16}


def check(*facts, baseline=None, marked=None, config=None, max_launches=None) -> Verdicts:
    """Return the verdicts of launches, whose number is the allowed maximum."""
    allowed = max_launches or max(len(facts), 1)
    comparison = StoredComparison("case", config or CONFIG, baseline, marked or {}, allowed)
    return comparison.judge(facts)


def compare(candidates, references, marked=None, only=None, max_pairs=6) -> Verdicts:
    return PairedComparison("case", marked or {}, only, max_pairs).judge(candidates, references)


def recording(first, marked=None, old=None, **options) -> BaselineRecording:
    """Return the recording of launches, of which the first is given, of the case that baselines of tests are of."""
    case, config = make_baseline().case, (old or make_baseline()).config
    return BaselineRecording(StoredComparison(case, config, old, marked or {}, 5), first, make_options(**options))


def learn(old: Baseline | None, new: Baseline, *, fresh: bool = False, marked=None) -> Baseline:
    """Return what is stored of a baseline and new launches."""
    options = {"record": Recording(replaces=fresh)}
    return recording(new.center_launches[0], marked, old, **options).learned(new, "").baseline


def left_out(launches, marked) -> dict[str, str]:
    return recording(launches[0], marked).left_out(launches)


def detection_lines(baseline: Baseline, marked) -> tuple[str, ...]:
    return recording(baseline.center_launches[0], marked).learned(baseline, "").detection


def launches_needed(facts, marked, most: int = 10) -> int:
    """Return the number of launches that a recording takes if all are equal."""
    new = recording(facts, marked, launches=most)
    counts = range(1, most)
    return next((n for n in counts if not new.needs_another(baseline_of(*[facts] * n))), most)


def texts(verdicts: Verdicts) -> list[str]:
    return [note.text for note in verdicts.notes]


def outcomes(verdicts: Verdicts) -> dict[str, Outcome]:
    return {row.metric: row.outcome for row in verdicts.rows}


def chose(kinds: str, facts=None):
    facts = facts or make_facts()
    return facts.replace(environment=facts.environment | {"activation_checkpointing": kinds})
