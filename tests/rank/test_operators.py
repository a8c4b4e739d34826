"""The capture of operators, in one process."""

import math
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from aorta_workloads.common.faults import BitFlip
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_aorta.common.variables import RANK_FOLDER
from pytest_aorta.result.folder import rank_folder
from pytest_aorta.result.trace.rank_files import read_operators
from pytest_aorta.verdict.bitwise import Evidence, first_operator
from pytest_aorta.worker import OperatorCapture, operators


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, recomputes: bool):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.recomputes = recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """Return a function that trains one captured step, with a fault if given, and returns the calls read back."""
    folder = rank_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    monkeypatch.setenv(RANK_FOLDER, str(folder))

    def train(*, backend=None, recomputes=False, fault=None, inner=None):
        torch.manual_seed(0)
        model = Model(recomputes=recomputes)
        if backend:
            torch._dynamo.reset()
            model.compile(backend=backend, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        capture = OperatorCapture(model)
        with warnings.catch_warnings():
            # Dynamo's own imports warn.
            warnings.simplefilter("ignore", DeprecationWarning)
            with fault or torch.enable_grad():
                capture.begin(1)
                with inner or torch.enable_grad():
                    model(torch.linspace(-1, 1, 24).reshape(3, 8)).square().sum().backward()
                    optimizer.step()
                capture.end()
        return read_operators(tmp_path, 0, 1)

    return train


def counts(calls):
    return Counter((call.name, call.phase) for call in calls)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_every_matrix_product_is_captured_with_its_module_and_line(captured, backend):
    calls = captured(backend=backend)
    found = counts(calls)
    assert found["aten.addmm.default", "forward"] == 4
    # In the first layer, only the weight has a gradient.
    assert found["aten.mm.default", "backward"] == 7
    assert found["aten._fused_adamw_.default", "optimizer"] == 1
    products = [call for call in calls if call.name in ("aten.addmm.default", "aten.mm.default")]
    modules = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert [call.module for call in products if call.phase == "forward"] == modules
    assert {call.module for call in products if call.phase == "backward"} == set(modules)
    assert {call.source.rpartition(":")[0] for call in products} == {"tests/rank/test_operators.py"}


def test_recomputed_forward_is_told_from_backward(captured):
    calls = captured(recomputes=True)
    recomputed = [call for call in calls if call.phase == "recomputation"]
    assert {call.module for call in recomputed} >= {"blocks.0.up", "blocks.1.up"}
    assert {call.name for call in recomputed} >= {"aten.addmm.default", "aten.relu.default"}


def test_optimizer_names_the_parameters_that_it_writes(captured):
    adamw = captured()[-1]
    assert dict(adamw.parameters)[0] == "blocks.0.up.weight"
    assert len(adamw.parameters) == 8


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("operator", "call", "phase", "module"),
    [
        ("aten.relu.default", 2, "forward", "blocks.1"),
        ("aten.mm.default", 3, "backward", "blocks.1.up"),
        ("aten._fused_adamw_.default", 1, "optimizer", ""),
    ],
)
def test_operator_whose_output_has_a_flipped_bit_is_found(captured, backend, operator, call, phase, module):
    plain = captured(backend=backend)
    faulty = captured(backend=backend, fault=BitFlip(operator, call, of_input=False))
    found = first_operator(0, faulty, plain)
    assert (found.evidence, found.call.name) == (Evidence.COMPUTED, operator)
    assert (found.call.phase, found.call.module) == (phase, module)


@pytest.mark.extended
def test_operator_of_a_compiled_backward_pass_is_named_with_its_generated_line(captured):
    backward = [call for call in captured(backend="inductor") if (call.name, call.phase) == ("aten.mm.out", "backward")]
    assert len(backward) == 7
    for call in backward:
        file, _, line = call.source.rpartition(":")
        [path] = Path(torch._inductor.codecache.cache_dir()).parent.glob(file)
        assert "extern_kernels.mm(" in path.read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(("value", "kind"), [(math.nan, 2), (-math.inf, 1), (1.0, 0)])
def test_values_that_are_not_finite_are_flagged_in_what_reads_and_writes_them(value, kind):
    capture = OperatorCapture(nn.Linear(1, 1))
    capture.begin(1)
    torch.tensor([0.0, value]).clone().mul(1.0)
    capture.end()
    [clone] = [call for call in capture.calls() if call.name == "aten.clone.default"]
    assert (clone.read, clone.wrote) == (kind, kind)


def test_random_operators_and_attention_are_captured(captured):
    query = torch.linspace(-1, 1, 48).reshape(1, 2, 3, 8)
    capture = OperatorCapture(nn.Linear(1, 1))
    capture.begin(1)
    nn.functional.scaled_dot_product_attention(query, query, query)
    nn.functional.dropout(query)
    capture.end()
    calls = {call.name: call for call in capture.calls()}
    assert len(calls["aten._scaled_dot_product_flash_attention_for_cpu.default"].outputs) == 2
    assert len(calls["aten.bernoulli_.float"].outputs) == 1
    schema = torch.ops.aten._scaled_dot_product_flash_attention.default
    results = [number if number in (4, 5) else torch.ones(number) for number in range(9)]
    written = [tensor.numel() for tensor in operators._written_tensors(schema, (query,) * 3, {}, tuple(results))]
    assert written == [0, 1, 2, 3, 8]


def test_input_that_changed_between_operators_is_found_at_its_reader(captured):
    plain = captured()
    torch.manual_seed(0)
    faulty = captured(inner=BitFlip("aten.threshold_backward.default", 1, of_input=True))
    found = first_operator(0, faulty, plain)
    assert (found.evidence, found.call.name) == (Evidence.CHANGED, "aten.threshold_backward.default")


def test_inputs_are_shown_as_parameters_or_by_dtype_and_shape(captured):
    first = next(call for call in captured() if call.name == "aten.addmm.default")
    assert first.sources == ("blocks.0.up.bias", "torch.float32(3, 8)", "blocks.0.up.weight")


def drawn(draw, *, seed):
    torch.manual_seed(seed)
    capture = OperatorCapture(nn.Linear(1, 1))
    capture.begin(1)
    draw(torch.ones(8), torch.Generator().manual_seed(seed))
    capture.end()
    return capture.calls()


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda values, _: nn.functional.dropout(values), "it runs with ['random state "),
        (lambda _, own: torch.randint(9, (8,), generator=own), "on these inputs in this state of its random generator"),
        (lambda *_: torch.rand(8), "on these inputs in this state of its random generator"),
    ],
)
def test_operator_that_draws_from_another_random_state_computes_no_other_value(draw, expected):
    found = first_operator(0, drawn(draw, seed=1), drawn(draw, seed=2))
    assert found.evidence is Evidence.OTHER
    assert expected in found.explanation
    assert first_operator(0, drawn(draw, seed=1), drawn(draw, seed=1)) is None


def test_state_of_a_generator_from_which_nothing_is_drawn_makes_no_difference():
    def attend(values, _):
        query = values.reshape(1, 1, 2, 4)
        nn.functional.scaled_dot_product_attention(query, query, query)

    assert first_operator(0, drawn(attend, seed=1), drawn(attend, seed=2)) is None


def test_conjugated_and_negated_views_are_hashed_by_their_values():
    values = torch.complex(torch.linspace(-1, 1, 6), torch.linspace(0, 3, 6)).requires_grad_()
    capture = OperatorCapture(nn.Linear(1, 1))
    capture.begin(1)
    # Backward multiplies by the conjugate, and the imaginary part of a conjugate is a negated view.
    (values * torch.view_as_complex(torch.ones(6, 2))).abs().sum().backward()
    torch.add(values.detach().conj().imag, 0)
    torch.add(-values.detach().imag, 0)
    capture.end()
    negated, plain = [call for call in capture.calls() if call.name == "aten.add.Tensor"][-2:]
    assert negated.inputs == plain.inputs
    assert any(call.phase == "backward" for call in capture.calls())


def test_flip_of_a_call_that_does_not_happen_is_an_error(captured):
    with pytest.raises(RuntimeError, match=r"fault: aten\.relu\.default has 2 calls in this step, not 9"):
        captured(fault=BitFlip("aten.relu.default", 9, of_input=False))
