"""A planted fault is found, with its step, its parameter, and the point of the step at which it began."""

import re

import pytest

from pytest_aorta import ComparisonFailed
from tests.distributed import TWO_CPU_RANKS
from tests.distributed.test_faults import WORKLOADS

pytestmark = [pytest.mark.numerics, TWO_CPU_RANKS]

STEPS = 3
TRAINING = {"size": "debug", "n_layers": 1}
HASHED = TRAINING | {
    "steps": STEPS,
    "warmup": 0,
    "hash_every": 1,
    "hash_tensors": ["weights", "gradients", "clipped", "optimizer"],
    "hash_operators_step": 2,
}
WEIGHTS_ALONE = ["step 2, optimizer: all 39 ", "so the weights were changed in the optimizer's step, or after it"]
ALL = ["loss", "grad_norm", "weight_hash"]
LOST_GRADIENT = [
    "Regression: grad_norm ",
    "first difference: step 2, ",
    "step 2, gradients: 12 of 12 gradients differ, first tok_embeddings.weight [256, 64]",
    "step 2, operators: none named, because no operator gave another output for the same inputs, and the ",
    "the candidate alone bucketing._pre_bucket_all_gather.default in forward of tok_embeddings (",
    "the reference alone fsdp.all_gather_copy_in.default",
]


@pytest.mark.extended
def test_fault_is_located_from_the_hashes_of_both_launches(workload):
    plain = workload.run("llama_fsdp2", **HASHED)
    faulty = workload.run("llama_simple_fsdp", fault={"kind": "drop_gradient", "step": 2, "rank": 1}, **HASHED)
    with pytest.raises(ComparisonFailed) as regression:
        workload.compare(faulty, plain, steps=STEPS)
    assert set(regression.value.metrics) == set(ALL)
    assert [part for part in LOST_GRADIENT if part not in str(regression.value)] == [], str(regression.value)


@pytest.mark.extended
def test_state_that_differed_before_is_named_and_not_the_last_step(workload):
    plain = {"workload": "llama_fsdp2"} | TRAINING
    faulty = plain | {"fault": {"kind": "double_moment", "step": 1, "rank": 1}}
    with pytest.raises(ComparisonFailed) as regression:
        workload.compare(faulty, plain, steps=STEPS, metrics=["weight_hash"], locate=True)
    assert set(regression.value.metrics) == {"weight_hash"}
    assert "step 1, optimizer: 1 of 39 numbers and tensors of the optimizer differ, first tok_" in str(regression.value)
    assert "tensors differ in step 1 already" in str(regression.value)
    assert re.search(
        r"step 1, operators: first aten\.\S+ after the optimizer \(\S+faults\.py:\d+\) on rank 1", str(regression.value)
    )
    assert "so the weights were changed" not in str(regression.value)


LOCATED = [
    (
        "llama_fsdp2",
        {"kind": "operator_output", "operator": "aten.mm.default", "call": 9},
        ["grad_norm", "weight_hash"],
        [
            "step 2, gradients: 1 of 12 gradients differ, first output.weight [256, 64]",
            "step 2, operators: first aten.mm.default in backward of output (",
            "models/common/chunked_loss.py:",
            ") on rank 1: the same inputs gave another output (some operators differ on 2 of 2 ranks)",
        ],
    ),
    (
        "llama_fsdp2",
        {"kind": "weight_ulp"},
        ["weight_hash"],
        [
            "step 2, weights: 1 of 12 parameters differ, first tok_",
            *WEIGHTS_ALONE,
            "operators: first aten.add_.Tensor after the optimizer (",
            "faults.py:",
            ") on rank 1: ",
        ],
    ),
    (
        "ranking",
        {"kind": "operator_output", "operator": "aten.native_layer_norm.default", "call": 1},
        ALL,
        [
            "operators: first aten.native_layer_norm.default in forward of ",
            ") on rank 1: the same inputs gave another output 1 of 3",
        ],
    ),
    (
        "ddp_overlap",
        {"kind": "operator_input", "operator": "c10d.allreduce_.default", "call": 1},
        ["grad_norm", "weight_hash"],
        ["operators: first c10d.allreduce_.default over ranks 0, 1 in backward", " on rank 1: its input 1 of 1"],
    ),
    (
        "llama_simple_fsdp",
        {"kind": "operator_output", "operator": "aten.silu.default", "call": 1},
        ALL,
        [
            "aten.silu.default in forward of layers.0.feed_forward (",
            "on rank 1: the same inputs gave another output",
        ],
    ),
    (
        "llama_fsdp2",
        {"kind": "batch_integer"},
        ALL,
        [
            "operators: first aten.embedding.default in forward of tok_embeddings (",
            "on rank 1: its input 2 of 2, torch.int64(2, 32), is not in the reference, and no captured operator",
            "before wrote it: this rank was given another batch, or",
        ],
    ),
    (
        "llama_fsdp2",
        {"kind": "operator_input", "operator": "c10d._reduce_scatter_base_.default", "call": 1},
        ["grad_norm", "weight_hash"],
        [
            "c10d._reduce_scatter_base_.default over ranks 0, 1 in backward",
            "is not in the reference, and no captured operator before wrote it; kernels that inductor",
        ],
    ),
    (
        "llama_fsdp2",
        {"kind": "operator_output", "operator": "aten._fused_adamw_.default", "call": 1},
        ["weight_hash"],
        [
            "aten._fused_adamw_.default in optimizer (",
            "on rank 1: the same inputs gave another tok_embeddings.weight",
        ],
    ),
]


@pytest.mark.parametrize(
    ("name", "flip", "metrics", "expected"),
    [LOCATED[0], *(pytest.param(*case, marks=pytest.mark.extended) for case in LOCATED[1:])],
)
def test_fault_is_located_at_its_operator_or_in_its_batch(workload, name, flip, metrics, expected):
    plain = {"workload": name} | (TRAINING if name.startswith("llama") else {"n_layers": 1})
    faulty = plain | {"fault": flip | {"step": 2, "rank": 1}}
    with pytest.raises(ComparisonFailed) as regression:
        workload.compare(faulty, plain, steps=2, locate=True)
    assert set(regression.value.metrics) == set(metrics)
    assert [part for part in expected if part not in str(regression.value)] == [], str(regression.value)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("operator", "call", "expected"),
    [
        (
            "aten.silu.default",
            1,
            "step 2, operators: first NaN: aten.silu.default in forward of layers.0.feed_forward (",
        ),
        # The loss of the next step is the first value that is reported.
        ("aten.mm.default", 9, "step 2, operators: first NaN: aten.mm.default in backward of output ("),
    ],
)
def test_launch_that_failed_by_a_nan_is_located_at_the_operator_that_wrote_it(inner, on_cpu, operator, call, expected):
    fault = {"kind": "operator_nan", "operator": operator, "call": call, "step": 2, "rank": 1}
    source = f"""
import pytest

@pytest.mark.world(size=2, device="cpu")
def test_nan(workload):
    workload.run("llama_fsdp2", **{TRAINING | {"steps": STEPS, "warmup": 0, "fault": fault}})
"""
    text = inner(source).stdout.str()
    assert [part for part in ("NotFinite", expected, " on rank 1, from finite inputs") if part not in text] == [], text


@pytest.mark.extended
def test_race_that_the_capture_hides_is_said_to_be_the_likely_cause(inner, on_cpu):
    source = """
import pytest

@pytest.mark.numerics
@pytest.mark.world(size=2, device="cpu")
def test_race(workload):
    pair = {"workload": "unwaited", "unwaited_from": 2}, {"workload": "unwaited"}
    workload.compare(*pair, steps=3, metrics=["weight_hash"])
"""
    text = inner(source, "-o", f"aorta_workloads={WORKLOADS}").stdout.str()
    expected = [
        "first difference: step 2, weight_hash",
        "launched once more, they differ first in step 3, not in the captured step 2: the likely cause is a race",
        "step 2, operators: all ",
    ]
    assert [part for part in expected if part not in text] == [], text
