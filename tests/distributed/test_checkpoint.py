"""Checkpoints resumed in the same layout and in others: weights, optimizer state, and the tokens that follow."""

import pytest

INNER = """
import json, pathlib, pytest

FOLDER = pathlib.Path(__file__).parent
# Each rank of a data-parallel axis takes its part of 4 sequences.
TRAINING = {"n_layers": 2, "n_kv_heads": 4, "warmup": 0}
UNCHANGED = {"lr": 1e-60, "steps": 1}
HSDP_TP = {"data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2, "batch_size": 2}
FSDP_TP = {"tensor_parallel_degree": 2, "batch_size": 2}
PP = {"pipeline_parallel_degree": 2, "gradient_accumulation": 4, "batch_size": 1}
TWO, FOUR = {"batch_size": 2}, {"batch_size": 1}
SIMPLE = {"backend": "eager"}

pytestmark = pytest.mark.launch_timeout(120)
four, two = (pytest.mark.world(size=size, device="cpu") for size in (4, 2))

@pytest.mark.parametrize("key, layout", [
    pytest.param("hsdp-tp", HSDP_TP, marks=four), pytest.param("two", TWO, marks=two),
    pytest.param("four", FOUR, marks=four), pytest.param("pp", PP, marks=two),
])
def test_saved(workload, key, layout):
    whole = workload.run("llama_fsdp2", **TRAINING, **layout, steps=5)
    first = workload.run("llama_fsdp2", **TRAINING, **layout, steps=3, save_checkpoint=str(FOLDER / key))
    last = workload.run("llama_fsdp2", **TRAINING, **layout, steps=2, load_checkpoint=str(FOLDER / key))
    assert (last.weight_hashes["2"], last.loss) == (whole.weight_hashes["5"], whole.loss[3:])
    seen = {"loss": whole.loss[3:], "first": first.weight_hashes["3"], "last": last.weight_hashes["2"]}
    FOLDER.joinpath(f"{key}.json").write_text(json.dumps(seen))

# Only sums in the same order have the same bits.
@pytest.mark.parametrize("key, layout, has_equal_bits", [
    pytest.param("hsdp-tp", TWO, False, marks=two), pytest.param("two", FOUR, False, marks=four),
    pytest.param("four", FSDP_TP, False, marks=four), pytest.param("pp", TWO, False, marks=two),
    pytest.param("two", TWO | SIMPLE, True, marks=two), pytest.param("hsdp-tp", HSDP_TP | SIMPLE, True, marks=four),
])
def test_loaded_into_another_layout(workload, key, layout, has_equal_bits):
    seen = json.loads(FOLDER.joinpath(f"{key}.json").read_text())
    name = "llama_simple_fsdp" if has_equal_bits else "llama_fsdp2"
    training = {**TRAINING, **layout, "load_checkpoint": str(FOLDER / key)}
    same = workload.run(name, **training, **UNCHANGED)
    assert same.weight_hashes["1"] == seen["first"]
    continued = workload.run(name, **training, steps=2)
    if has_equal_bits:
        assert (continued.loss, continued.weight_hashes["2"]) == (seen["loss"], seen["last"])
    assert continued.loss == pytest.approx(seen["loss"], rel=1e-6)

@pytest.mark.world(size=2, device="cpu")
def test_the_bias_of_experts_goes_on(workload):
    training = {**TRAINING, "num_experts": 4, "load_balance_coeff": 0.05}
    whole = workload.run("llama_fsdp2", **training, steps=4)
    workload.run("llama_fsdp2", **training, steps=2, save_checkpoint=str(FOLDER / "experts"))
    last = workload.run("llama_fsdp2", **training, steps=2, load_checkpoint=str(FOLDER / "experts"))
    assert (last.weight_hashes["2"], last.loss) == (whole.weight_hashes["4"], whole.loss[2:])
"""


RESTARTS = """
import pytest

MODEL = {"workload": "llama_fsdp2", "n_layers": 1, "n_kv_heads": 4}
pytestmark = pytest.mark.world(size=2, device="cpu")

RANKING = {"num_tables": 2, "dim": 8, "n_layers": 1, "ffn_hidden": 8, "max_grad_norm": 1.0}

@pytest.mark.parametrize("config", [
    MODEL | {"async_save": True}, RANKING | {"workload": "ranking"},
    RANKING | {"workload": "ddp_overlap", "h2d_prefetch": False},
], ids=["llama", "ranking", "ddp"])
def test_equal(workload, config):
    workload.compare_restart(config | {"lr_schedule": {"kind": "cosine", "steps": 7}}, steps=7, after=3)

FSDP = {"workload": "fsdp", "optimizer": "sgd", "verify": 0}

def test_weights_alone(workload):
    verdicts = workload.compare_restart(FSDP | {"async_save": True}, steps=7, after=3, metrics=["weight_hash"])
    assert verdicts["weight_hash"].detail == "all 7 steps"

def test_equal_in_the_other_program(workload):
    traced = {"workload": "llama_simple_fsdp", "backend": "aot_eager", "bucketing": "transformer_block"}
    workload.compare_restart(MODEL, steps=4, after=2, into=traced)

def test_different(workload):
    fault = {"kind": "weight_ulp", "step": 1, "rank": 1}
    workload.compare_restart(MODEL, steps=4, after=2, into={"fault": fault})

LINEAR = {"lr_schedule": {"kind": "linear"}}

@pytest.mark.parametrize("config, given, said", [
    (MODEL, {"after": 4}, "after is 4"),
    (MODEL | LINEAR, {}, "lr_schedule.steps is null"),
    (MODEL, {"into": LINEAR}, "lr_schedule.steps is null"),
    (MODEL, {"into": {"workload": "copy_compute"}}, "no config key load_checkpoint"),
    (MODEL, {"ranks": (2, 3)}, "two numbers from 1 to 2"),
    (MODEL, {"metrics": ["step_time_p50"]}, "step_time_p50"),
    ({"workload": "copy_compute"}, {}, "no config key load_checkpoint"),
    ({}, {}, "at the key 'workload'"),
    (FSDP | {"optimizer": "none"}, {}, "save_checkpoint is"),
    (FSDP | {"verify": 1}, {}, "verify is 1: checked steps train too"),
])
def test_refused(workload, config, given, said):
    with pytest.raises(Exception) as refused:
        workload.compare_restart(config, **{"steps": 4, "after": 2} | given)
    assert said in str(refused.value)
"""

# PP 2 x FSDP 2 has the bits of FSDP 2. The gradient norm is summed in another order, so it differs by rounding.
LAYOUTS = """
import pytest
from pytest_aorta import ComparisonFailed

FSDP = {
    "workload": "llama_fsdp2", "n_layers": 3, "batch_size": 1, "gradient_accumulation": 3, "max_grad_norm": None,
    "param_dtype": "bfloat16", "reduce_dtype": "bfloat16",
}
STAGES = FSDP | {"pipeline_parallel_degree": 2}
TP = {"tensor_parallel_degree": 2}

pytestmark = [pytest.mark.world(size=4, device="cpu"), pytest.mark.launch_timeout(150)]

@pytest.mark.parametrize("config, into, ranks", [
    (FSDP, STAGES, (2, 4)),
    (STAGES, FSDP | {"pipeline_parallel_degree": 1}, (4, 2)),
], ids=["2 to 4 ranks", "2 stages to 1"])
def test_equal(workload, config, into, ranks):
    workload.compare_restart(
        config, steps=4, after=2, into=into, ranks=ranks, metrics=["loss", "weight_hash"]
    )
    assert [launch.result.world_size for launch in workload.launcher.launches] == [ranks[0], ranks[0], ranks[1]]

@pytest.mark.parametrize("into, ranks", [(TP | {"batch_size": 2}, (4, 4)), (TP, (2, 4))])
def test_rounds(workload, into, ranks):
    with pytest.raises(ComparisonFailed) as found:
        workload.compare_restart(FSDP, steps=4, after=2, into=into, ranks=ranks, metrics=["loss", "weight_hash"])
    assert set(found.value.metrics) == {"loss", "weight_hash"}
    assert "weight_hash: first in step 3, in 2 of 4 steps" in str(found.value)
"""

OF_OTHER_WORKLOADS = "ranking or ddp or other_program"


@pytest.mark.extended
def test_a_restart_of_other_workloads_computes_the_same_bits(inner, on_cpu):
    inner(RESTARTS, "-k", OF_OTHER_WORKLOADS).assert_outcomes(passed=3, deselected=13)


def test_a_restart_computes_the_same_bits_and_a_difference_is_at_its_step(inner, on_cpu):
    result = inner(RESTARTS, "-k", f"not ({OF_OTHER_WORKLOADS})")
    result.assert_outcomes(passed=12, failed=1, deselected=3)
    text = result.stdout.str()
    assert "Regression: weight_hash" in text
    assert "first in step 3, in 2 of 4 steps" in text


@pytest.mark.extended
def test_restart_into_another_layout_has_equal_bits_or_differs_from_its_first_step(inner, on_cpu):
    inner(LAYOUTS).assert_outcomes(passed=4)


@pytest.mark.extended
def test_checkpoints_go_on_in_other_layouts(inner, on_cpu):
    inner(INNER).assert_outcomes(passed=11)
