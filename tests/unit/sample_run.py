"""A made-up run of pytest: result files, baselines and records as tests leave them, from a seed and without torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pytest_aorta.common.files import slug, write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.overlap import overlap_of, union
from pytest_aorta.result.trace.profiled_steps import Costs, Profile
from pytest_aorta.session.record import ComparedLaunch, Comparison, LaunchNote, Side, TestRecord
from pytest_aorta.session.rounds import Repeated, comparison_text, in_pairs, joined, settle, with_baseline
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch, baseline_path, write_baseline
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import METRICS, MetricKind, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts
from tests.unit.builders import changed, make_provenance, make_result, ran, replace, stamp
from tests.unit.step_graphs import fsdp_step

USUAL_HIDES = 0.9
PLATFORM = "nvidia-h200-x8-nccl"
HANG = """\
llama_fsdp2 on 8 cuda ranks: hang in collective: time limit of 300 s reached; ranks 0, 1, 2, 4, 5, 6, 7 wait for rank 3
  rank 3, step 117: <module> (train/data.py:88) < next_batch (train/data.py:41)
  rank 0, step 118: in all_gather number 4021, _all_gather_base (torch/distributed/distributed_c10d.py:4125)
plan, logs and stacks: /tmp/aorta/test-llama-hangs/01-llama-fsdp2"""
ENVIRONMENT = {
    "python": "3.12.11",
    "torch": "2.11.0+cu130",
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "deterministic_algorithms": False,
    "bitwise_reproducible": True,
    "num_threads": 16,
    "cpu_capability": "AVX512",
    "weight_hash_version": 2,
    "tf32_matmul": False,
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}

MISSPELLED = "SpecError: no workload named 'lama_fsdp2' (did you mean 'llama_fsdp2'?)"
LACKED = "needs 16 GPUs, the host has 8"
CPU_ENVIRONMENT = {"python": "3.12.11", "torch": "2.11.0+cpu", "device": "cpu", "num_threads": 16}
COMMAND = ["pytest", "tests", "--aorta-ab=origin/main", "--aorta-report=report.html"]
RAISED = """\
llama_fsdp2 on 8 cuda ranks: rank exception: rank 3 failed first: RuntimeError: CUDA error: out of memory
  File "train/loop.py", line 212, in step
    loss.backward()
  then ranks 0, 1, 2, 4, 5, 6, 7: connection closed by peer
plan, logs and stacks: /tmp/aorta/test-llama-late-rank/03-llama-fsdp2"""


@dataclass(frozen=True)
class Plan:
    """A test of the sample run: ``slower`` is the change of its steps, ``late_rank`` the straggler."""

    name: str
    workload: str = "fsdp"
    step_ms: float = 17.6
    slower: float = 0.0
    hides: float = USUAL_HIDES
    late_rank: int | None = None
    has_graph: bool = False
    environment: tuple[tuple[str, Any], ...] = ()
    has_baseline: bool = True
    hangs: bool = False
    device: str = "cuda"
    commit: str = "c0ffee00" * 5
    branch: str | None = "main"

    def platform(self, ranks: int) -> str:
        """Return the platform, which is always 8 H200s for GPUs."""
        return PLATFORM if self.device == "cuda" else f"cpu-x{ranks}-gloo"

    @property
    def marked(self) -> dict[str, Tolerance]:
        """Return the tolerances of the test's markers."""
        return {"step_time_p50": METRICS["step_time_p50"].parse_tolerance("2%")} if self.device == "cuda" else {}


SPECIAL = (
    Plan("test_fsdp_overlap.py::test_fsdp_overlap[comm_stream]", slower=0.083, hides=0.35, has_graph=True),
    Plan("test_llama.py::test_simple_fsdp[transformer_block]", "llama_simple_fsdp", 231.0, slower=0.031, late_rank=5),
    Plan("test_llama.py::test_hangs", "llama_fsdp2", hangs=True),
    Plan("test_ranking.py::test_four_streams", "ranking", 9.4, slower=-0.12),
    Plan("test_ddp.py::test_bucket_cap[25]", "ddp_overlap", 12.1, has_baseline=False),
    Plan("test_llama.py::test_fsdp2[8b]", "llama_fsdp2", 224.0, environment=(("nccl", "2.27.3"), ("torch", "2.11.1"))),
)


def make_run(folder: Path, *, tests: int = 30, ranks: int = 8, steps: int = 300, seed: int = 0) -> list[TestRecord]:
    """Write the files of ``tests`` tests below ``folder`` and return their records; the first six tests are special."""
    rng = np.random.default_rng(seed)
    usual = [Plan(f"test_matrix.py::test_config[{number}]", step_ms=8.0 + number) for number in range(tests)]
    return [_record(plan, folder, rng, ranks, steps) for plan in [*SPECIAL, *usual][:tests]]


def make_varied_run(folder: Path, *, ranks: int = 4, steps: int = 120, seed: int = 1) -> list[TestRecord]:
    """Write the files of tests of other kinds below ``folder`` and return their records.

    These are an A/B with a stored baseline beside it, metrics that are not applicable, a failed launch, a failure
    before a launch, and a host with too few devices.
    """
    rng = np.random.default_rng(seed)
    return [
        _ab_record(folder, rng, ranks, steps),
        _record(Plan("test_scripts.py::test_on_cpu_ranks", step_ms=31.0, device="cpu"), folder, rng, 2, steps),
        _failed("test_llama.py::test_late_rank", RAISED, ran(3, failed=1)),
        _failed("test_llama.py::test_misspelled", MISSPELLED),
        TestRecord("tests/test_scaling.py::test_16_gpus", lacked_devices=LACKED, outcome="skipped"),
    ]


def _failed(name: str, failure: str, launches: tuple[LaunchNote, ...] = ()) -> TestRecord:
    return TestRecord(f"tests/{name}", outcome="failed", failure=failure, can_launch=True, launches=launches)


@dataclass
class _Test:
    """A test with one comparison, whose launches are written below ``folder``.

    Attributes:
        sides: Side -> what its launches are like.
        launches: The launches so far.
    """

    folder: Path
    sides: dict[Side, Plan]
    rng: np.random.Generator
    ranks: int
    steps: int
    launches: list[ComparedLaunch] = field(default_factory=list)

    def launch(self, side: Side) -> LaunchFacts:
        """Write the result of one more launch and return its facts."""
        plan = self.sides[side]
        result = one_launch(plan, self.rng, self.ranks, self.steps)
        place = self.folder / slug(self.nodeid) / side / f"{len(self.launches) + 1:02d}-{plan.workload}"
        place.mkdir(parents=True)
        write_json(place / "result.json", to_builtins(result))
        self.launches.append(ComparedLaunch(side, result.facts, str(place)))
        return self.launches[-1].facts

    @property
    def plan(self) -> Plan:
        """Return what the candidate's launches are like."""
        return self.sides[Side.CANDIDATE]

    @property
    def nodeid(self) -> str:
        """Return the test's node id."""
        return f"tests/{self.plan.name}"

    def stored(self) -> StoredComparison:
        """Write the baseline, if the plan has one, and return a comparison with it."""
        plan, case = self.plan, f"{self.nodeid}::{self.plan.workload}"
        platform, baseline = plan.platform(self.ranks), None
        if plan.has_baseline:
            before = replace(plan, slower=0.0, hides=USUAL_HIDES, late_rank=None, environment=())
            facts = (one_launch(before, self.rng, self.ranks, self.steps).facts for _ in range(10))
            dated = tuple(StoredLaunch(changed(one, measured_at=stamp(86400))) for one in facts)
            baseline = Baseline(case, self.nodeid, platform, plan.workload, {"steps": self.steps}, dated)
            write_baseline(self.folder / "baselines", baseline)
        file = str(baseline_path(self.folder / "baselines", platform, case))
        return StoredComparison(case, {"steps": self.steps}, baseline, plan.marked, 5, file)

    def record(self, comparison: StoredComparison, verdicts: Verdicts) -> TestRecord:
        """Return the record of the test, which fails on a failing or missing verdict."""
        platform = self.plan.platform(self.ranks)
        failing = verdicts.failing({Outcome.MISSING})
        ended = Comparison(
            comparison.case,
            platform=platform,
            workload=self.plan.workload,
            launches=tuple(self.launches),
            rows=verdicts.rows,
            notes=verdicts.notes,
            suspect=verdicts.suspect,
            baseline=comparison.file,
            failing=tuple(row.metric for row in failing),
        )
        found = TestRecord(self.nodeid, outcome="passed", comparisons=(ended,), launches=ran(len(self.launches)))
        if failing:
            shown = replace(ended, baseline=str(baseline_path(Path("baselines"), platform, ended.case)))
            return replace(found, outcome="failed", failure=comparison_text(shown, failing, Repeated(self.nodeid)))
        return found


def _record(plan: Plan, folder: Path, rng: np.random.Generator, ranks: int, steps: int) -> TestRecord:
    if plan.hangs:
        return _failed(plan.name, HANG, ran(1, failed=1))
    test = _Test(folder, {Side.CANDIDATE: plan}, rng, ranks, steps)
    comparison = test.stored()
    return test.record(comparison, settle(with_baseline(comparison, test.launch(Side.CANDIDATE)), test.launch))


def _ab_record(folder: Path, rng: np.random.Generator, ranks: int, steps: int) -> TestRecord:
    """Return a test whose times an A/B decides, since the baseline has another torch; steps take 3.6 times as long."""
    plan = Plan("test_llama.py::test_compiled[8b]", "llama_simple_fsdp", 24.0, slower=2.6)
    other = replace(plan, slower=0.04, commit="0ddba115" * 5, branch=None)
    test = _Test(folder, {Side.CANDIDATE: plan, Side.REFERENCE: other}, rng, ranks, steps)
    comparison = test.stored()
    timing = [name for name, metric in METRICS.items() if metric.kind is MetricKind.TIMING and metric.default]
    paired = PairedComparison(comparison.case, plan.marked, timing[:3], 5, "origin/main")
    settled = settle(in_pairs(paired), test.launch)
    first = next(launch.facts for launch in test.launches if launch.side is Side.CANDIDATE)
    return test.record(comparison, joined(comparison.judge([first]), settled))


def one_launch(plan: Plan, rng: np.random.Generator, ranks: int, steps: int) -> WorkloadResult:
    """Return steps around ``step_ms``, some of them slow, and a profiled step of 16 layers."""
    own = plan.step_ms * (1 + plan.slower + rng.normal(0, 0.002))
    common = own * (1 + np.abs(rng.normal(0, 0.006, steps)) + (rng.random(steps) < 0.02) * rng.random(steps) * 0.12)
    times = np.round(common * (1 + rng.normal(0, 0.001, (ranks, steps))), 4)
    waits = np.round(np.full((ranks, steps), 0.12 * own) * (1 + rng.normal(0, 0.02, (ranks, steps))), 4)
    if plan.late_rank is not None:
        waits[plan.late_rank % ranks] *= 0.3
    profiled = [_profiled(own, plan.hides, rng) for _ in range(ranks)]
    return make_result(
        times.tolist(),
        workload=plan.workload,
        device=plan.device,
        platform=plan.platform(ranks),
        backend="nccl" if plan.device == "cuda" else "gloo",
        config={"steps": steps},
        collective_ms=waits.tolist(),
        environment=(ENVIRONMENT if plan.device == "cuda" else CPU_ENVIRONMENT) | dict(plan.environment),
        rank_metrics={
            "peak_memory_bytes": [48.2 * 2**30] * ranks,
            "tokens_per_s": [8.2e6 / own] * ranks,
            "num_parameters": [8_030_261_248.0] * ranks,
            **{name: [capture.metrics()[name] for capture in profiled] for name in profiled[0].metrics()},
        },
        overlap=[capture.steps for capture in profiled],
        timeline=[capture.timeline for capture in profiled],
        costs=[Costs(graph=fsdp_step(gather_waits=plan.hides < USUAL_HIDES))] * ranks if plan.has_graph else [],
        provenance=make_provenance(measured_at=stamp(0), command=COMMAND, commit=plan.commit, branch=plan.branch),
    )


def _profiled(step_ms: float, hides: float, rng: np.random.Generator, layers: int = 16) -> Profile:
    """Return a step whose all-gathers run ahead of compute; with little hidden, compute waits for each all-gather."""
    gemm = step_ms / layers / 3.4
    names = ("compute", "wait", "all_gather", "reduce_scatter", "copy")
    lanes: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    now, free = 0.3 * gemm, 0.0
    for phase in ("forward", "backward"):
        for _ in range(layers):
            begin = max(free, now - hides * 0.6 * gemm)
            lanes["wait"].append((max(free, begin - 0.08 * gemm), begin))
            free = begin + gemm * 0.6 * (1 + abs(rng.normal(0, 0.05)))
            lanes["all_gather"].append((begin, free))
            begin = max(now, free)
            now = begin + gemm * (1 if phase == "forward" else 1.9) * (1 + rng.normal(0, 0.01))
            lanes["compute"].append((begin, now))
            if phase == "backward":
                begin = max(free, now - hides * gemm * 0.5)
                free = begin + gemm * 0.5
                lanes["reduce_scatter"].append((begin, free))
    lanes["copy"].append((0.1 * gemm, 0.8 * gemm))
    sets = {name: union([(round(a * 1e6), round(b * 1e6)) for a, b in lane]) for name, lane in lanes.items()}
    return overlap_of(sets, [(0, round(max(now, free) * 1e6))])
