"""The first operator that differs, from the operators of each rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.trace.rank_files import OperatorCall
from pytest_aorta.verdict.bitwise import Evidence, first_operator, locate_operator
from tests.unit.builders import replace

MM, ADAMW, GATHER = "aten.mm.default", "aten._fused_adamw_.default", "c10d._allgather_base_.default"


def call(name: str, inputs: str, outputs: str, **more) -> OperatorCall:
    """Return a call whose tensors have one letter each."""
    values = {"phase": "forward", "module": "layers.0", "source": "model.py:7", "is_collective": False, "arguments": ""}
    return OperatorCall(name, inputs=tuple(inputs), outputs=tuple(outputs), **(values | more))


# a, w -> b; the other rank's part c arrives; b, c -> d.
STEP = [call(MM, "aw", "b"), call(GATHER, "b", "c", is_collective=True), call(MM, "bc", "d")]


def test_equal_steps_have_no_first_operator():
    assert first_operator(0, STEP, STEP) is None
    assert locate_operator({0: STEP, 1: STEP}, {0: STEP, 1: STEP}) == (
        "all 6 outputs of operators are the same on all 2 ranks"
    )


def test_operator_that_computes_another_output_is_named_with_its_place():
    wrong = [replace(STEP[0], outputs=("x",)), call(GATHER, "x", "y", is_collective=True), call(MM, "xy", "z")]
    assert locate_operator({0: wrong}, {0: STEP}) == (
        "first aten.mm.default in forward of layers.0 (model.py:7) on rank 0: the same inputs gave another output "
        "(some operators differ on 1 of 1 rank)"
    )


def test_rank_that_only_received_the_difference_is_not_blamed():
    receiver = [STEP[0], replace(STEP[1], outputs=("y",)), call(MM, "by", "z")]
    culprit = [replace(STEP[0], outputs=("x",)), call(GATHER, "x", "y", is_collective=True), call(MM, "xy", "z")]
    line = locate_operator({0: receiver, 1: culprit}, {0: STEP, 1: STEP})
    assert "on rank 1: the same inputs gave another output (some operators differ on 2 of 2 ranks)" in line


def test_collective_is_named_if_every_rank_gave_it_the_same():
    wrong = [STEP[0], replace(STEP[1], outputs=("y",)), call(MM, "by", "z")]
    line = locate_operator({0: wrong, 1: wrong}, {0: STEP, 1: STEP})
    assert line.startswith("first c10d._allgather_base_.default in forward of layers.0 (model.py:7) on rank 0: ")
    assert "every rank gave the same, and this rank received another output" in line


def test_input_that_changed_between_operators_is_named_with_its_reader():
    wrong = [STEP[0], call(GATHER, "x", "y", is_collective=True), call(MM, "by", "z")]
    line = locate_operator({0: wrong}, {0: STEP})
    assert "c10d._allgather_base_.default" in line
    assert "its input 1 of 1 is not in the reference, and no captured operator before wrote it" in line


def test_parameter_that_an_optimizer_wrote_is_named():
    right = [call(ADAMW, "pq", "rs", phase="optimizer", module="", parameters=((0, "a.weight"), (1, "b.weight")))]
    line = locate_operator({0: [replace(right[0], outputs=("r", "x"))]}, {0: right})
    assert line.startswith("first aten._fused_adamw_.default in optimizer (model.py:7) on rank 0: ")
    assert "the same inputs gave another b.weight" in line


def test_one_of_several_outputs_is_counted_from_one():
    line = locate_operator({0: [call(MM, "a", "bx")]}, {0: [call(MM, "a", "bc")]})
    assert "the same inputs gave another output 2 of 2" in line


def other_program(**wrong) -> list[OperatorCall]:
    """Return STEP with a collective of another name, which gathers into a buffer of its own."""
    gather = call("_c10d_functional.all_gather_into_tensor.default", "b", "u", is_collective=True, source="fsdp.py:3")
    copied = call("aten.copy_.default", "u", "c", source="fsdp.py:4")
    return [STEP[0], gather, copied, replace(STEP[2], **wrong)]


def test_variants_that_run_other_operators_have_a_difference_only_where_equal_inputs_differ():
    line = locate_operator({0: other_program(outputs=("x",))}, {0: STEP})
    assert line.startswith("first aten.mm.default in forward of layers.0 (model.py:7) on rank 0: the same inputs gave ")


def test_value_that_only_another_program_has_is_not_named():
    changed = [*other_program()[:2], call(MM, "bx", "z")]
    assert locate_operator({0: changed}, {0: STEP}) == (
        "none named, because no operator gave another output for the same inputs, and the variants run different "
        "operators: the candidate alone _c10d_functional.all_gather_into_tensor.default in forward of layers.0 "
        "(fsdp.py:3), the reference alone c10d._allgather_base_.default in forward of layers.0 (model.py:7)"
    )


def test_operator_that_the_reference_does_not_run_is_named():
    extra = [STEP[0], call("aten.neg.default", "b", "n"), call(GATHER, "n", "y", is_collective=True)]
    line = locate_operator({0: extra}, {0: STEP})
    assert "aten.neg.default" in line
    assert "the reference does not run this operator on these inputs" in line


def test_arguments_that_are_no_tensors_tell_calls_apart():
    right = [call(MM, "a", "b", arguments="[1]"), call(MM, "a", "c", arguments="[2]")]
    wrong = [right[0], replace(right[1], outputs=("b",))]
    assert first_operator(0, wrong, right).call is wrong[1]


def test_ranks_that_one_side_alone_captured_are_left_out():
    assert locate_operator({0: STEP}, {1: STEP}) is None
    assert locate_operator({}, {}) is None


@given(st.permutations(range(3)))
def test_independent_operators_may_run_in_any_order(order):
    right = [call(MM, letter, letter.upper()) for letter in "abc"]
    assert first_operator(0, [right[number] for number in order], right) is None


@given(st.integers(0, 19), st.integers(0, 3))
def test_planted_output_is_found_whatever_follows_from_it(position, rank):
    # A chain, in which each call reads the output of the call before.
    right = {number: [call(MM, chr(100 + i), chr(101 + i)) for i in range(20)] for number in range(4)}
    chain = [call(MM, chr(100 + i), chr(101 + i)) for i in range(position)]
    follows = [call(MM, chr(500 + i), chr(501 + i)) for i in range(position + 1, 20)]
    wrong = [*chain, call(MM, chr(100 + position), chr(500 + position + 1)), *follows]
    found = first_operator(rank, wrong, right[rank])
    assert (found.rank, found.evidence, found.call) == (rank, Evidence.COMPUTED, wrong[position])
    assert f" on rank {rank}: " in locate_operator(right | {rank: wrong}, right)
