"""Edits of a script on two real ranks: what its steps train with is recorded, and one sentence names the edit."""

from pathlib import Path

import pytest

from pytest_aorta import WorkloadRunner
from pytest_aorta.verdict.edits import edits
from tests.distributed import TWO_CPU_RANKS

SCRIPT = Path(__file__).parent / "scripts" / "edited.py"
pytestmark = TWO_CPU_RANKS
EDITS = {
    "lr=0.02": "the learning rate changed: 0.01 -> 0.02 from step 1",
    "decay=0": "weight decay of module.2.weight changed: 0.01 -> 0 from step 1",
    "batch=4": "the batch changed: [8, 16] float32, [8, 1] float32 -> [4, 16] float32, [4, 1] float32 from step 1",
    "eval=1": "the mode of the model changed: train -> eval from step 1",
    "eval=2": "the mode of the model changed: train -> train, module in eval from step 1",
    "dropout=0": "dropout changed: 0.1 -> off from step 1",
    "autocast=0": "autocast changed: bfloat16 -> off from step 1",
    "clip=0": "the norm that gradients are clipped to changed: 1 -> off from step 1",
    "zero_grad=0": "gradients of the step before are no longer cleared (zero_grad) from step 2",
    "set_epoch=0": "data: other samples from step 5 on, on all ranks; look at the seed, shuffle, and sampler.set_epoch",
    "sampler_seed=1": "data: other samples from step 1 on, on all ranks; look at the seed, shuffle, the sampler, and "
    "transforms",
    "scale=2": "the loss of step 1 is 2 times as large with equal samples and weights; look at how it is scaled or "
    "averaged",
    "seed=1": "random numbers: torch's generator had another state when the optimizer was made; look at the seed",
}
# One of each kind of evidence; the others run every night.
IN_CI = ("lr=0.02", "zero_grad=0", "set_epoch=0", "scale=2")


@pytest.fixture(scope="module")
def launched():
    """Results by arguments, since all tests compare with the launch of the script as it is."""
    return {}


def result(workload: WorkloadRunner, launched: dict, *words: str):
    if words not in launched:
        launched[words] = workload.run_script(SCRIPT, words, record={"hash_weights": True})
    return launched[words]


@pytest.mark.parametrize(
    "edit", [pytest.param(edit, marks=[pytest.mark.extended] if edit not in IN_CI else []) for edit in EDITS]
)
def test_edit_is_named_in_one_sentence(workload, launched, edit):
    here, there = (result(workload, launched, *words).facts for words in ((edit,), ()))
    assert edits([here], [there]) == [EDITS[edit]]


def test_script_as_it_is_has_no_sentence(workload, launched):
    again = workload.run_script(SCRIPT, record={"hash_weights": True})
    assert edits([again.facts], [result(workload, launched).facts]) == []
