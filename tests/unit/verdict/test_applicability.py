"""Rules on what is compared: config, choices of setup(), steps, machine, versions, and settings of the code."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.trace.profiled_steps import Costs, CostsOfRanks
from pytest_aorta.verdict.environment import TEST_HOOK_KEY, changed_settings, identity
from pytest_aorta.verdict.metrics import METRICS, Tolerance
from pytest_aorta.verdict.noise import BLOCK_GAP_S
from pytest_aorta.verdict.verdicts import Open, Reason
from tests.unit.builders import (
    MISSING,
    NOT_APPLICABLE,
    PASS,
    REGRESSION,
    baseline_of,
    launches_near,
    make_baseline,
    make_facts,
    on_cpu,
    stamp,
    stored,
    with_p50,
)
from tests.unit.verdict.compared import (
    CONFIG,
    LONG,
    OTHER_WEIGHTS,
    PINNED_CPU,
    STABLE,
    SURE,
    check,
    chose,
    compare,
    outcomes,
)


def test_p99_of_few_steps_is_not_compared_by_default():
    for steps, compared in ((99, False), (100, True)):
        launch = make_facts(num_steps=steps)
        verdicts = check(launch, baseline=baseline_of(launch))
        assert ("step_time_p99" in outcomes(verdicts)) is compared


@pytest.mark.parametrize(
    ("recorded", "config", "texts"),
    [
        (CONFIG, CONFIG | {"steps": 30}, ("steps=20", "steps=30")),
        (CONFIG, {"steps": 20}, ("dtype='float32'", "no key dtype")),
        (
            {"lr": 0.1, "steps": 20, "old": "x", "model": {"layers": 2}},
            {"lr": 0.2, "steps": 20, "new": None, "model": {"layers": 3}},
            ("lr=0.1, model={'layers': 2}, no key new, old='x'", "lr=0.2, model={'layers': 3}, new=None, no key old"),
        ),
    ],
)
def test_baseline_of_another_config_is_missing_and_names_every_key(recorded, config, texts):
    row = check(make_facts(), baseline=make_baseline(config=recorded), config=config)["step_time_p50"]
    detail = f"the baseline was recorded with {texts[0]}, the test has {texts[1]}"
    assert row.outcome is MISSING
    assert row.reason.startswith(detail)
    assert "--update-baselines" in row.reason


@pytest.mark.parametrize(
    ("recorded", "config"),
    [({"lr": 1}, {"lr": 1.0}), ({"shard": True, "sizes": [1, 2.0]}, {"shard": True, "sizes": [1.0, 2]})],
)
def test_integer_is_the_same_config_as_the_float_it_equals(recorded, config):
    launches = stored(*[make_facts()] * 10)
    row = check(make_facts(), baseline=make_baseline(config=recorded, launches=launches), config=config)
    assert row["step_time_p50"].outcome is PASS


_VALUES = st.recursive(
    st.booleans() | st.sampled_from([0, 1, "1", None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(_VALUES, _VALUES)
def test_configs_are_equal_exactly_if_their_json_is(one, other):
    is_same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (changed_settings({"key": one}, {"key": other}) == ("", "")) is is_same


def test_fault_is_no_part_of_the_identity():
    assert identity({"steps": 20, TEST_HOOK_KEY: {"kind": "slowdown"}}) == {"steps": 20}


@pytest.mark.parametrize("launches", [[chose("full on all 4 blocks")], [chose("none on all 4 blocks"), make_facts()]])
def test_baseline_of_another_choice_of_checkpointing_is_missing_and_names_both(launches):
    baseline = baseline_of(*[chose("none on all 4 blocks")] * 10)
    row = check(*launches, baseline=baseline)["step_time_p50"]
    chosen = launches[-1].environment.get("activation_checkpointing")
    assert row.outcome is MISSING
    assert (
        f"activation_checkpointing='none on all 4 blocks', which setup chose, and a launch with {chosen!r}"
        in row.reason
    )


def test_same_choice_of_checkpointing_is_compared():
    launches = [chose("none on all 4 blocks")] * 3
    verdicts = check(*launches, baseline=baseline_of(*launches * 3))
    assert set(outcomes(verdicts).values()) == {PASS}


@pytest.mark.parametrize("num_steps", [1, 99, 101])
def test_launch_of_another_number_of_steps_misses_every_metric_of_the_baseline(num_steps):
    slow_tail = LONG["step_time_ms"] | {"p99": 36.0}
    candidate = make_facts(**LONG | {"num_steps": num_steps, "step_time_ms": slow_tail})
    baseline = baseline_of(*[make_facts(**LONG)] * 10)
    verdicts = check(*[candidate] * 3, baseline=baseline)
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "step_time_p99", "weight_hash"], MISSING)
    assert f"with 100 measured steps, the test has {num_steps}; " in verdicts["step_time_p99"].reason
    assert "--update-baselines --aorta-record=replace" in verdicts["step_time_p99"].reason
    # The percentile needs 100 steps, so a launch of fewer steps has lost it and fails whatever --aorta-fail-on says.
    assert verdicts["step_time_p99"].is_lost is (num_steps < 100)


def test_one_of_several_launches_with_another_number_of_steps_is_enough():
    launches = [make_facts(), make_facts(), make_facts(num_steps=19)]
    assert set(outcomes(check(*launches, baseline=STABLE)).values()) == {MISSING}


NAMED = {"step_time_p50": Tolerance(0.05)}
ON_CPU = baseline_of(*[on_cpu()] * 10)


@pytest.mark.parametrize(
    ("given", "p50", "outcome"),
    [
        (0.5, 21.4, REGRESSION),  # +114% passed when 50% became 100%
        (0.5, 14.0, PASS),
        (3.0, 30.0, PASS),
        (None, 11.0, REGRESSION),
    ],
)
def test_cpu_timing_of_this_block_is_judged_by_the_tolerance_that_was_given(given, p50, outcome):
    launches = [with_p50(on_cpu(), p50)] * 3
    row = check(*launches, baseline=ON_CPU, marked={"step_time_p50": Tolerance(given)})["step_time_p50"]
    assert (row.outcome, row.tolerance) == (outcome, Tolerance(given))


@pytest.mark.parametrize(
    "recorded",
    [on_cpu(block="f" * 12), on_cpu(measured_at=stamp(BLOCK_GAP_S["cpu"] + 120))],
    ids=["another machine", "an hour ago"],
)
def test_cpu_timing_of_another_block_is_not_applicable(recorded):
    verdicts = check(on_cpu(), baseline=baseline_of(recorded), marked=NAMED)
    assert outcomes(verdicts) == {"step_time_p50": NOT_APPLICABLE, "weight_hash": PASS}
    row = verdicts["step_time_p50"]
    assert "only within one hour on one machine" in row.reason
    assert row.baseline == 10.0


def test_gpu_timing_carries_over_between_blocks():
    elsewhere = launches_near(10.0, 10, block="f" * 12, measured_at="2020-01-01T00:00:00Z")
    assert check(make_facts(), baseline=baseline_of(*elsewhere))["step_time_p50"].outcome is PASS


def test_timing_of_another_launcher_is_not_applicable_and_its_numbers_are():
    verdicts = check(make_facts(launcher="forkserver"), baseline=make_baseline())
    assert outcomes(verdicts) == {"step_time_p50": NOT_APPLICABLE, "weight_hash": PASS}
    assert "by forkserver, the baseline's by torchrun" in verdicts["step_time_p50"].reason


def quick(p10: float, slow: float = 1.1, late: float = 0.0, **changes):
    """Return a launch on CPU ranks whose fast and slow steps differ by a factor, with a rank that is late."""
    times_ms = {"mean": p10, "p10": p10, "p50": p10, "p99": p10 * slow, "tail5": p10 * slow}
    return on_cpu(step_time_ms=times_ms, late_ms=[0.0, late], **{"cpu_wait": 0.0} | changes)


@pytest.mark.parametrize(
    ("launch", "recorded", "expected"),
    [
        (quick(10.0), quick(10.0), (PASS, PASS)),
        (quick(30.0), quick(10.0), (REGRESSION, PASS)),
        # Some of the recorded steps were as slow.
        (quick(30.0), quick(10.0, slow=4.0), (NOT_APPLICABLE, PASS)),
        # Without the time for which ranks waited for a CPU, the steps are as slow as the recorded ones, or may be.
        (quick(30.0, cpu_wait=0.5), quick(10.0), (REGRESSION, PASS)),
        (quick(30.0, cpu_wait=0.7), quick(10.0), (NOT_APPLICABLE, PASS)),
        (quick(30.0, cpu_wait=1.7), quick(10.0), (NOT_APPLICABLE, PASS)),
        (quick(30.0, cpu_wait=None), quick(10.0), (NOT_APPLICABLE, PASS)),
        (quick(15.0, late=5.0, cpu_wait=1.7), quick(10.0), (PASS, NOT_APPLICABLE)),
        (quick(3.0), quick(10.0), (PASS, PASS)),
        (quick(15.0, late=5.0), quick(10.0), (PASS, REGRESSION)),
        (quick(15.0, late=5.0), quick(10.0, late=4.5), (PASS, PASS)),
        # On another machine, the difference between ranks is compared.
        (quick(30.0, late=15.0, block="elsewhere"), quick(10.0), (NOT_APPLICABLE, REGRESSION)),
    ],
)
def test_gross_changes_of_unmarked_times_of_cpu_ranks_are_found(launch, recorded, expected):
    verdicts = check(*[launch] * 5, baseline=baseline_of(*[recorded] * 10))
    rows = [verdicts[name] for name in ("step_time_p10", "late_rank_ms")]
    assert tuple(row.outcome for row in rows) == expected
    assert [row.fails([NOT_APPLICABLE]) for row in rows] == [one is REGRESSION for one in expected]
    assert "step_time_p50" not in outcomes(verdicts)
    if launch.cpu_wait != 0:
        assert all("waited for a CPU" in row.detail for row in rows if row.not_applicable)
    if expected[1] is REGRESSION:
        assert "wait for rank 1" in rows[1].detail


@pytest.mark.parametrize(("cpu_wait", "is_open"), [(0.1, True), (1.5, False)])
def test_no_further_launch_where_waits_for_a_cpu_could_double_a_step(cpu_wait, is_open):
    noisy = [quick(factor * 10.0) for factor in (1.0, 3.0, 1.2, 2.5)]
    verdicts = check(quick(18.0, cpu_wait=cpu_wait), baseline=baseline_of(*noisy), max_launches=5)
    assert isinstance(verdicts["step_time_p10"].state, Open) is is_open


def test_stored_launches_of_one_cpu_block_are_compared_later_too():
    old = [on_cpu(measured_at=stamp(48 * 3600 + age)) for age in (60, 30, 0)]
    row = check(*old, baseline=baseline_of(*old), marked={"step_time_p50": Tolerance(1.0)})
    assert row["step_time_p50"].outcome is not NOT_APPLICABLE


NEWER = make_facts().environment | {"torch": "2.12.0"}


def test_reasons_of_an_ab_speak_of_its_reference_not_of_a_baseline():
    hashed = compare([make_facts(environment=NEWER)] * 2, [make_facts()] * 2)["weight_hash"]
    assert hashed.outcome is NOT_APPLICABLE
    assert "torch '2.11.0' -> '2.12.0'" in hashed.reason
    timed = compare([make_facts(launcher="forkserver")] * 2, [make_facts()] * 2)["step_time_p50"]
    assert "by forkserver, the reference's by torchrun" in timed.reason


def test_timing_is_compared_in_another_numeric_environment():
    assert check(make_facts(environment=NEWER), baseline=STABLE)["step_time_p50"].outcome is PASS


def test_number_with_a_tolerance_is_compared_in_another_numeric_environment():
    newer = make_facts(environment=NEWER, final_loss=2.02)
    baseline = baseline_of(*[make_facts(final_loss=2.0)] * 5)
    assert check(newer, baseline=baseline, marked={"final_loss": Tolerance(0.05)})["final_loss"].outcome is PASS
    row = check(newer, baseline=baseline, marked={"final_loss": Tolerance(None)})["final_loss"]
    assert row.outcome is NOT_APPLICABLE


PLAIN, LOOSE = make_facts().environment, SURE | {"bitwise_reproducible": False}
ARM = PINNED_CPU | {"cpu_capability": "SVE256", "cpu_kernels": None}
OLD_CPU = PINNED_CPU | {"cpu_capability": "NO AVX", "cpu_kernels": None}
DEFAULT_PINS = {"cpu_kernels": "ATEN_CPU_CAPABILITY=default", "cpu_capability": "DEFAULT"}
IRREPRODUCIBLE = "this workload is not bitwise reproducible here; run it in its deterministic mode"


def without(fact: str) -> dict[str, object]:
    return {key: value for key, value in SURE.items() if key != fact}


@pytest.mark.parametrize(
    ("recorded", "environment", "outcome", "detail"),
    [
        (PLAIN, NEWER, NOT_APPLICABLE, "other environment: torch '2.11.0' -> '2.12.0'"),
        (SURE, SURE | {"nccl": "2.27"}, NOT_APPLICABLE, "other environment: nccl None -> '2.27'"),
        # Every fact that differs is named.
        (
            SURE | {"nccl": "2.26"},
            SURE | {"nccl": "2.27", "cudnn": 91002, "device_name": "H200"},
            NOT_APPLICABLE,
            "other environment: cudnn None -> 91002, device_name None -> 'H200', nccl '2.26' -> '2.27'",
        ),
        # Launches before this fact did not report it.
        (
            SURE | {"cublas": "12.8"},
            SURE | {"cublas": "12.9"},
            NOT_APPLICABLE,
            "other environment: cublas '12.8' -> '12.9'",
        ),
        (SURE, SURE | {"cublas": "12.9"}, REGRESSION, ""),
        (PLAIN | {"hip": None}, PLAIN, REGRESSION, ""),
        (LOOSE, LOOSE, NOT_APPLICABLE, IRREPRODUCIBLE),
        (LOOSE, SURE, NOT_APPLICABLE, IRREPRODUCIBLE),
        *(
            (SURE, without(fact), MISSING, f"the launch does not report {fact}, which is {SURE[fact]!r} in the")
            for fact in ("torch", "deterministic_algorithms", "bitwise_reproducible")
        ),
        # Another machine outweighs a setting of the code.
        (
            PINNED_CPU,
            PINNED_CPU | {"torch": "2.12.0", "num_threads": 2},
            NOT_APPLICABLE,
            "other environment: torch '2.11.0' -> '2.12.0'",
        ),
        (
            PINNED_CPU,
            PINNED_CPU | {"cpu_capability": "DEFAULT", "cpu_kernels": None, "num_threads": 2},
            NOT_APPLICABLE,
            "other environment: cpu_capability 'AVX2' -> 'DEFAULT', cpu_kernels ",
        ),
        # Pins that code sets on a CPU that the launcher does not pin are a setting.
        (ARM, ARM | {"cpu_kernels": "MKL_CBWR=AVX2"}, REGRESSION, "changed settings: cpu_kernels None -> "),
        (ARM, ARM | DEFAULT_PINS, REGRESSION, "changed settings: cpu_capability 'SVE256' -> 'DEFAULT'"),
        # CPUs that the launcher does not pin are other machines by their capability.
        (OLD_CPU, OLD_CPU | {"cpu_capability": "DEFAULT"}, NOT_APPLICABLE, "other environment: cpu_"),
        (OLD_CPU, OLD_CPU | {"cpu_capability": "SVE256"}, NOT_APPLICABLE, "other environment: cpu_"),
    ],
)
def test_other_hash_is_judged_by_what_differs_in_the_environment(recorded, environment, outcome, detail):
    baseline = baseline_of(make_facts(environment=recorded))
    row = check(make_facts(environment=environment, weight_hashes=OTHER_WEIGHTS), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.is_lost) == (outcome, outcome is MISSING)
    assert row.detail.startswith(detail)


@pytest.mark.parametrize("fact", ["deterministic_algorithms", "bitwise_reproducible"])
@pytest.mark.parametrize("metric", ["weight_hash", "final_loss"])
def test_changed_number_of_a_launch_that_is_no_longer_reproducible_is_lost(fact, metric):
    candidate = make_facts(environment=SURE | {fact: False}, weight_hashes=OTHER_WEIGHTS, final_loss=2.0)
    baseline = baseline_of(make_facts(environment=SURE, final_loss=1.0))
    row = check(candidate, baseline=baseline, marked={"final_loss": Tolerance(None)})[metric]
    assert (row.outcome, row.is_lost) == (MISSING, True)
    assert row.detail.startswith(f"{fact} is False, but True in the baseline; ")


def test_other_vendor_is_another_machine_if_both_sides_report_the_vendor():
    intel, amd = (PINNED_CPU | {"cpu_vendor": name} for name in ("GenuineIntel", "AuthenticAMD"))
    baseline = baseline_of(make_facts(environment=intel))
    row = check(make_facts(environment=amd, block="elsewhere"), baseline=baseline)["weight_hash"]
    assert "cpu_vendor 'GenuineIntel' -> 'AuthenticAMD'" in row.detail
    assert row.outcome is NOT_APPLICABLE


@pytest.mark.parametrize(("block", "outcome"), [("here", PASS), ("elsewhere", MISSING)])
def test_vendor_that_the_launch_drops_is_lost_on_another_host_only(block, outcome):
    baseline = baseline_of(make_facts(environment=SURE | {"cpu_vendor": "x"}, block="here"))
    assert check(make_facts(environment=SURE, block=block), baseline=baseline)["weight_hash"].outcome is outcome


COUNTED = [CostsOfRanks([0], Costs(operators={"aten::mm": 100}))]
ON_FORKSERVER, OLD = make_facts(launcher="forkserver"), on_cpu(measured_at=stamp(2 * BLOCK_GAP_S["cpu"]))
NEW_TORCH = make_facts(costs=COUNTED, environment={"torch": "2.12.0", "device": "cuda"})
WAITS = make_facts(metrics={"overlap_ratio_as_run": 0.6}, blocked_by="cudaStreamSynchronize in aten::item")
TOO_LARGE, HIDDEN = make_facts(overlap_problem="the trace is too large"), make_facts(metrics={"overlap_ratio": 0.9})


@pytest.mark.parametrize(
    ("reason", "metric", "launches", "remedied"),
    [
        (Reason.LAUNCHER, "step_time_p50", (make_facts(), ON_FORKSERVER), (make_facts(), make_facts())),
        (Reason.LAUNCHER, "step_time_p50", (make_facts(), ON_FORKSERVER), (ON_FORKSERVER, ON_FORKSERVER)),
        (Reason.OLD_CPU_TIMES, "step_time_mean", (OLD, on_cpu()), (on_cpu(), on_cpu())),
        (Reason.VERSIONS, "operators", (make_facts(costs=COUNTED), NEW_TORCH), (NEW_TORCH, NEW_TORCH)),
        (Reason.HEAD_START, "overlap_ratio", (WAITS, WAITS), (HIDDEN, HIDDEN)),
        (Reason.TRACE, "overlap_ratio", (TOO_LARGE, TOO_LARGE), (HIDDEN, HIDDEN)),
    ],
)
def test_metric_that_a_marker_names_is_compared_after_the_remedy_of_the_reason(reason, metric, launches, remedied):
    marked = {metric: Tolerance(0.9, METRICS[metric].scale)}
    for (recorded, launch), outcome in ((launches, NOT_APPLICABLE), (remedied, PASS)):
        row = check(launch, baseline=baseline_of(*[recorded] * 10), marked=marked)[metric]
        assert row.outcome is outcome
        assert row.not_applicable is (reason if outcome is NOT_APPLICABLE else None)
        assert row.fails() is (outcome is NOT_APPLICABLE)


def test_old_times_of_cpu_ranks_are_compared_side_by_side():
    marked = {"step_time_mean": Tolerance(0.9)}
    assert compare([on_cpu()] * 12, [on_cpu()] * 12, marked, max_pairs=12)["step_time_mean"].outcome is PASS
