"""Checkpoints resumed in the same layout and in others: weights, optimizer state, and the tokens that follow."""

from __future__ import annotations

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
    MODEL, RANKING | {"workload": "ranking"}, RANKING | {"workload": "ddp_overlap", "h2d_prefetch": False},
])
def test_equal(workload, config):
    workload.compare_restart(config | {"lr_schedule": {"kind": "cosine", "steps": 7}}, steps=7, after=3)

def test_equal_in_the_other_program(workload):
    traced = {"workload": "llama_simple_fsdp", "backend": "aot_eager", "bucketing": "transformer_block"}
    workload.compare_restart(MODEL, steps=4, after=2, into=traced)

def test_different(workload):
    fault = {"kind": "weight_ulp", "step": 1, "rank": 1}
    workload.compare_restart(MODEL, steps=4, after=2, into={"fault": fault})

@pytest.mark.parametrize("config, after", [
    (MODEL, 4), (MODEL | {"lr_schedule": {"kind": "linear"}}, 2), ({"workload": "copy_compute"}, 2), ({}, 2),
])
def test_refused(workload, config, after):
    with pytest.raises(Exception) as refused:
        workload.compare_restart(config, steps=4, after=after)
    print("refused:", refused.value)

@pytest.mark.parametrize("into", [{"lr_schedule": {"kind": "linear"}}, {"workload": "copy_compute"}])
def test_refused_after_the_restart(workload, into):
    with pytest.raises(Exception) as refused:
        workload.compare_restart(MODEL, steps=4, after=2, into=into)
    print("refused:", refused.value)
"""


def test_a_restart_computes_the_same_bits_and_a_difference_is_at_its_step(inner, on_cpu):
    result = inner(RESTARTS, "--aorta-launcher=forkserver", "-s")
    result.assert_outcomes(passed=10, failed=1)
    text = result.stdout.str()
    assert "Regression: weight_hash" in text
    assert "first in step 3, in 2 of 4 steps" in text
    for part, count in (
        ("after is 4", 1), ("lr_schedule.steps is null", 2), ("no config key load_checkpoint", 2),
        ("at the key 'workload'", 1),
    ):  # fmt: skip
        assert text.count(part) == count, part


@pytest.mark.extended
def test_checkpoints_go_on_in_other_layouts(inner, on_cpu):
    inner(INNER, "--aorta-launcher=forkserver").assert_outcomes(passed=11)
