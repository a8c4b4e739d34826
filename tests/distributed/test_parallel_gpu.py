"""The axes of `llama_fsdp2` under NCCL: every layout trains like FSDP; `test_layouts_gpu.py` trains traced models."""

import importlib.util

import pytest

from tests.distributed import small_llama
from tests.distributed.test_parallel import LAYOUTS as ON_CPU
from tests.distributed.test_parallel import UNCHANGED

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.world(size=4, device="cuda", warm=True),
    pytest.mark.launch_timeout(240),
]

TRAINING = small_llama.TRAINING | {"param_dtype": "bfloat16", "steps": 10, "deterministic": True}
LAYOUTS = {name: layout for name, layout in ON_CPU.items() if name != "replicas alone"}
COMPILED_TOO = ["hsdp 2x2", "fsdp 2, tp 2", "fsdp 2, cp 2", "pp 2, fsdp 2"]


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def eager(workload, known):
    """Return a function for results of `llama_fsdp2` by layout, each launched once."""

    def result_of(layout):
        if layout not in known:
            known[layout] = workload.run("llama_fsdp2", **TRAINING | LAYOUTS[layout])
        return known[layout]

    return result_of


def test_layouts_begin_with_the_same_weights(workload):
    layouts = ["fsdp 4", "hsdp 2x2", "replicas 2, tp 2", "cp 2, tp 2", "pp 2, fsdp 2", "pp 2, tp 2"]
    initial = {
        layout: workload.run("llama_fsdp2", **TRAINING | LAYOUTS[layout] | UNCHANGED).weight_hashes["1"]
        for layout in layouts
    }
    assert len(set(initial.values())) == 1, initial


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layout_trains_as_fsdp_does(eager, layout):
    assert eager(layout).loss == pytest.approx(eager("fsdp 4").loss, rel=2e-3)
    assert eager(layout).grad_norm == pytest.approx(eager("fsdp 4").grad_norm, rel=2e-2)


@pytest.mark.parametrize("layout", COMPILED_TOO)
def test_compiled_blocks_train_as_eager_ones(workload, eager, layout):
    compiled = workload.run("llama_fsdp2", compile_blocks=True, **TRAINING | LAYOUTS[layout])
    assert compiled.loss == pytest.approx(eager(layout).loss, rel=2e-3)
    assert compiled.grad_norm == pytest.approx(eager(layout).grad_norm, rel=2e-2)


def test_a_pipeline_has_the_same_bits_again(workload, eager):
    one, other = eager("pp 2, fsdp 2"), workload.run("llama_fsdp2", **TRAINING | LAYOUTS["pp 2, fsdp 2"])
    assert (one.weight_hashes, one.loss, one.grad_norm) == (other.weight_hashes, other.loss, other.grad_norm)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_two_stages_a_rank_have_the_bits_of_one(workload, schedule):
    changed = {"n_layers": 4, "gradient_accumulation": 4, "reduce_dtype": "bfloat16", "max_grad_norm": None}
    training = TRAINING | LAYOUTS["pp 2, fsdp 2"] | changed | {"reshard_after_forward": False}
    one, two = (workload.run("llama_fsdp2", pipeline_parallel_schedule=name, **training) for name in ("1F1B", schedule))
    assert (one.weight_hashes, one.loss) == (two.weight_hashes, two.loss)


def test_a_checkpoint_goes_on_in_another_layout(workload, tmp_path):
    folder = str(tmp_path / "saved")
    training = TRAINING | {"steps": 3}
    saved = workload.run("llama_fsdp2", save_checkpoint=folder, **training | LAYOUTS["replicas 2, tp 2"])
    for layout in ("fsdp 4", "fsdp 2, cp 2", "pp 2, fsdp 2"):
        same = workload.run("llama_fsdp2", load_checkpoint=folder, **training | LAYOUTS[layout] | UNCHANGED)
        assert same.weight_hashes["1"] == saved.weight_hashes["3"], layout


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_trains_nearly_as_bfloat16(workload, eager):
    float8 = workload.run("llama_fsdp2", float8_linear=True, **TRAINING | LAYOUTS["fsdp 4"])
    assert float8.weight_hashes["1"] != eager("fsdp 4").weight_hashes["1"]
    assert float8.loss == pytest.approx(eager("fsdp 4").loss, rel=2e-2)
