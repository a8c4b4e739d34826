"""Bitwise comparison: step by step, and the first tensor, module and operator that differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import SpecError
from pytest_aorta.result.measurements import TensorHashes
from pytest_aorta.result.trace.rank_files import OperatorCall
from pytest_aorta.verdict import bitwise
from pytest_aorta.verdict.bitwise import (
    STEP_METRICS,
    Difference,
    Evidence,
    compare_steps,
    first_difference,
    first_operator,
    locate_non_finite,
    locate_operator,
    split,
)
from tests.unit.builders import NOT_APPLICABLE, PASS, REGRESSION, each_of, make_result, replace

HASHES = {"1": "a" * 32, "2": "b" * 32, "3": "c" * 32}


def trained(**changes):
    values = {"weight_hashes": HASHES, "loss": [3.0, 2.0, 1.0], "grad_norm": [0.3, 0.2, 0.1]}
    return make_result([[1.0] * 3] * 2, **values | changes)


def rows(candidate, reference, steps=3, metrics=tuple(STEP_METRICS)):
    return {row.metric: row for row in compare_steps("case", candidate, reference, steps, metrics)}


def test_sign_of_a_zero_is_a_difference():
    assert rows(trained(loss=[0.0, 2.0, 1.0]), trained(loss=[-0.0, 2.0, 1.0]))["loss"].outcome is REGRESSION


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("metric", "lacking", "remedy"),
    [
        (
            "weight_hash",
            {"weight_hashes": {"3": "c" * 32}},
            "1 of steps 1 to 3, but not for step 1; *config hash_every=1",
        ),
        ("loss", {"loss": []}, "0 of steps 1 to 3, but not for step 1; use recorder.loss"),
        ("grad_norm", {"grad_norm": [0.3, 0.2]}, "2 of steps 1 to 3, but not for step 3; use recorder.grad_norm"),
    ],
)
def test_what_one_side_lacks_is_lost_and_never_passes(side, metric, lacking, remedy):
    pair = [trained(), trained()]
    pair[side] = trained(**lacking)
    row = rows(*pair)[metric]
    assert row.is_lost
    assert row.reason.startswith(f"the {('candidate', 'reference')[side]} has values for ")
    assert all(part in row.reason for part in remedy.split("*"))


def test_too_few_measured_steps_are_reported_as_such():
    row = rows(trained(), trained(), steps=25)["loss"]
    assert row.is_lost
    assert "not for step 4; use config steps=25; it measured 3" in row.reason


def test_bits_that_differ_by_a_setting_are_a_regression_that_names_it():
    facts = {"torch": "2.11.0", "device": "cpu", "num_threads": 1}
    candidate = trained(loss=[3.0, 2.0, 9.0], environment=facts | {"num_threads": 2})
    row = rows(candidate, trained(environment=facts))["loss"]
    assert row.outcome is REGRESSION
    assert "first in step 3" in row.detail
    assert "num_threads 1 -> 2" in row.detail


def test_bits_that_differ_between_environments_are_not_applicable():
    other = trained(loss=[3.0, 2.0, 9.0], environment={"torch": "2.13.0", "device": "cpu"})
    found = rows(other, trained())
    assert found["loss"].outcome is NOT_APPLICABLE
    assert "torch '2.11.0' -> '2.13.0'" in found["loss"].reason
    assert found["weight_hash"].outcome is PASS


def test_difference_without_deterministic_mode_fails_and_says_so():
    chance = {"torch": "2.11.0", "device": "cuda", "bitwise_reproducible": False}
    row = rows(trained(environment=chance, loss=[3.0, 2.0, 9.0]), trained(environment=chance))["loss"]
    assert row.outcome is REGRESSION
    assert "run both in their deterministic mode" in row.reason


def test_first_difference_is_the_earliest_step_and_what_a_step_makes_first():
    odd = trained(loss=[3.0, 2.0, 9.0], grad_norm=[0.3, 0.2, 9.0], weight_hashes=HASHES | {"2": "d" * 32})
    assert first_difference(odd, trained(), 3, list(STEP_METRICS)) == Difference(2, "weight_hash")
    assert first_difference(odd, trained(), 3, ["grad_norm", "loss"]) == Difference(3, "loss")
    assert first_difference(trained(), trained(), 3, list(STEP_METRICS)) is None


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
)
def test_verdict_and_first_difference_agree(here, there):
    steps = min(len(here), len(there))
    candidate, reference = make_result([[1.0]], loss=here), make_result([[1.0]], loss=there)
    [row] = compare_steps("case", candidate, reference, steps, ["loss"])
    odd = [step for step in range(1, steps + 1) if here[step - 1].hex() != there[step - 1].hex()]
    assert first_difference(candidate, reference, steps, ["loss"]) == (Difference(odd[0], "loss") if odd else None)
    assert row.outcome is (REGRESSION if odd else PASS)


def test_metrics_are_distinguished_by_what_they_are_about():
    assert split(None) == (["loss", "grad_norm", "weight_hash"], [])
    assert split(["step_time_p50", "weight_hash"]) == (["weight_hash"], ["step_time_p50"])
    with pytest.raises(SpecError, match=r"metrics \['los'\] are unknown"):
        split(["los"])


WEIGHTS = ["tok.weight", "layers.0.w.weight", "out.weight"]


def locate(here, there, step):
    """Return the lines about two results whose run folders are not known."""
    return bitwise.locate(here, there, step, lambda result: None)


def hashes(names, *odd, step=2):
    """Return hashes of a step, with different hashes for the names in ``odd``."""
    values = ["f" * 32 if name in odd else "0" * 32 for name in names]
    return TensorHashes(list(names), [[place, 4] for place in range(len(names))], {str(step): values})


def result(weights=(), gradients=(), state=(), **changes):
    moments = [f"{name}.exp_avg" for name in WEIGHTS]
    optimizer = hashes(moments)
    optimizer.steps["1"] = hashes(moments, *state).steps["2"]
    tensors = {"weights": weights, "gradients": gradients, "clipped": gradients}
    tensors = {kind: hashes(WEIGHTS, *odd) for kind, odd in tensors.items()} | {"optimizer": optimizer}
    return make_result([[1.0] * 3] * 2, tensor_hashes=tensors, **changes)


def line(kind, **odd):
    [found] = [line for line in locate(result(**odd), result(), 2) if line.startswith(f"step 2, {kind}: ")]
    return found.removeprefix(f"step 2, {kind}: ")


def test_first_parameter_is_that_of_registration_order_with_count_and_shape():
    found = line("weights", weights=["out.weight", "layers.0.w.weight"])
    assert "2 of 3 parameters differ, first layers.0.w.weight" in found


def test_weights_alone_that_differ_were_changed_by_or_after_the_optimizer():
    assert "changed in the optimizer's step" in locate(result(weights=["tok.weight"]), result(), 2)[-1]
    assert not locate(result(weights=["tok.weight"], gradients=["tok.weight"]), result(), 2)[-1].startswith("so ")
    first, then, *_, last = locate(result(weights=["tok.weight"], state=["tok.weight.exp_avg"]), result(), 2)
    assert "step 1, optimizer: 1 of 3 " in first
    assert "first tok.weight.exp_avg" in first
    assert "differed in step 1, before " in then
    assert not last.startswith("so ")


def test_an_earlier_step_whose_tensors_differ_is_located_by_launches_of_its_own():
    launched = []

    def again(side, changes):
        launched.append(changes["hash_operators_step"])
        odd = ["tok.weight"] if side is here else []
        found = result(weights=odd, state=[f"{name}.exp_avg" for name in odd], loss=[1.0, 3.0 if odd else 2.0, 1.0])
        if launched[-1] == 1:
            for one in found.tensor_hashes.values():
                one.steps["1"] = one.steps.pop("2")
        return found

    here, there = (make_result([[1.0] * 3], loss=[1.0, last, 1.0]) for last in (3.0, 2.0))
    keys = {"hash_operators_step", "hash_tensors", "hash_tensors_step"}
    lines = [*map(str, bitwise.locate_first(here, there, Difference(2, "loss"), keys, again, lambda _: None))]
    assert launched == [2, 2, 1, 1]
    assert "step 1 already" in lines[1]
    assert "step 1, weights: 1 of 3 parameters differ, first tok.weight [0, 4]" in lines


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        # The captured launches agree in the captured step alone.
        ([1.0, 2.0, 9.0], "they differ first in step 3, not in the captured step 2: the likely cause is a race"),
        ([1.0, 2.0, 1.0], "they differ in no step up to 2: the capture may hide a race, because it waits at each"),
        ([9.0, 2.0, 1.0], "they first differ in step 1: results vary between launches of the same code"),
    ],
)
def test_difference_that_a_capture_makes_disappear_is_explained_by_a_race(losses, expected):
    here, there = (make_result([[1.0] * 3], loss=[1.0, last, 1.0]) for last in (3.0, 2.0))

    def again(side, _):
        return make_result([[1.0] * 3], loss=losses if side is here else [1.0, 2.0, 1.0])

    lines = bitwise.locate_first(here, there, Difference(2, "loss"), {"hash_operators_step"}, again, lambda _: None)
    assert expected in lines[1]


def test_location_without_the_keys_that_it_needs_says_so_and_launches_nothing():
    lines = bitwise.locate_first(
        make_result([[1.0]], loss=[1.0]),
        make_result([[1.0]], loss=[2.0]),
        Difference(1, "loss"),
        {"steps"},
        lambda *_: pytest.fail("launched"),
        lambda _: None,
    )
    first, why = lines
    assert "step 1, loss" in first
    assert "hash_operators_step and hash_tensors" in why


def test_what_is_the_same_is_said():
    assert "all 3 gradients" in line("gradients")


def test_other_shape_of_the_same_values_is_a_difference():
    one, other = TensorHashes(["a"], [[2, 3]], {"2": ["0" * 32]}), TensorHashes(["a"], [[3, 2]], {"2": ["0" * 32]})
    here, there = (make_result([[1.0]], tensor_hashes={"weights": of}) for of in (one, other))
    [line] = locate(here, there, 2)
    assert "step 2, weights: 1 of 1 parameters differ, first a " in line


MM, ADAMW, GATHER = "aten.mm.default", "aten._fused_adamw_.default", "c10d._allgather_base_.default"


def call(name: str, inputs: str, outputs: str, **more) -> OperatorCall:
    """Return a call whose tensors have one letter each."""
    values = {"phase": "forward", "module": "layers.0", "source": "model.py:7", "is_collective": False, "arguments": ""}
    return OperatorCall(name, inputs=tuple(inputs), outputs=tuple(outputs), **(values | more))


# a, w -> b; the other rank's part c arrives; b, c -> d.
STEP = [call(MM, "aw", "b"), call(GATHER, "b", "c", is_collective=True), call(MM, "bc", "d")]


def test_equal_steps_have_no_first_operator():
    assert first_operator(0, STEP, STEP) is None
    found = locate_operator({0: STEP, 1: STEP}, {0: STEP, 1: STEP})
    assert "all 6 outputs of operators" in found
    assert "can hide a race" in found
    undefined = [call("bucketing._pre_bucket_all_gather.default", "a", "")]
    left_out = "left out, because they write only a part of their output: bucketing._pre_bucket_all_gather.default;"
    assert left_out in locate_operator({0: undefined}, {0: undefined})


def other_program(**wrong) -> list[OperatorCall]:
    """Return STEP with a collective of another name, which gathers into a buffer of its own."""
    gather = call("_c10d_functional.all_gather_into_tensor.default", "b", "u", is_collective=True, source="fsdp.py:3")
    copied = call("aten.copy_.default", "u", "c", source="fsdp.py:4")
    return [STEP[0], gather, copied, replace(STEP[2], **wrong)]


RECEIVED = [STEP[0], replace(STEP[1], outputs=("y",)), call(MM, "by", "z")]
COMPUTED = [replace(STEP[0], outputs=("x",)), call(GATHER, "x", "y", is_collective=True), call(MM, "xy", "z")]
CHANGED = [STEP[0], call(GATHER, "x", "y", is_collective=True), call(MM, "by", "z")]
FURTHER = [STEP[0], call("aten.neg.default", "b", "n"), call(GATHER, "n", "y", is_collective=True)]
UPDATED = call(ADAMW, "pq", "rs", phase="optimizer", module="", parameters=((0, "a.weight"), (1, "b.weight")))
FIRST_MM = "first aten.mm.default in forward of layers.0 (model.py:7) on rank 0: the same inputs gave "
GATHERED = "first c10d._allgather_base_.default in forward of layers.0 (model.py:7) on rank 0: "


def read_from(source: str) -> list[OperatorCall]:
    return [replace(STEP[0], inputs=("x", "w"), sources=(source, "norm.bias"))]


# The operators of each rank of the candidate and of the reference, and what the line says.
LOCATED = {
    "another output": ([COMPUTED], [STEP], [FIRST_MM]),
    "received by the other rank": (
        [RECEIVED, COMPUTED],
        [STEP, STEP],
        ["on rank 1: the same inputs gave another output (some operators differ on 2 of 2 ranks)"],
    ),
    "collective, to which every rank gave the same": (
        [RECEIVED, RECEIVED],
        [STEP, STEP],
        [GATHERED, "every rank gave the same, and this rank received another output"],
    ),
    "input that changed between operators": (
        [CHANGED],
        [STEP],
        [GATHERED, "its input 1 of 1 is not in the reference, and no captured operator before wrote it"],
    ),
    "batch": (
        [read_from("torch.int64(2, 32)")],
        [STEP],
        ["wrote it: this rank was given another batch, or a kernel that inductor generated"],
    ),
    "input of no captured kernel": (
        [read_from("torch.float32(2, 32)")],
        [STEP],
        ["before wrote it; kernels that inductor generated are not captured"],
    ),
    "parameter": ([read_from("norm.weight")], [STEP], ["its input 1 of 2, norm.weight, is not in the reference"]),
    "parameter that an optimizer wrote": (
        [[replace(UPDATED, outputs=("r", "x"))]],
        [[UPDATED]],
        ["first aten._fused_adamw_.default in optimizer (model.py:7) on rank 0: ", "gave another b.weight"],
    ),
    "one of several outputs": ([[call(MM, "a", "bx")]], [[call(MM, "a", "bc")]], ["gave another output 2 of 2"]),
    "other operators, and equal inputs that differ": ([other_program(outputs=("x",))], [STEP], [FIRST_MM]),
    "value that only another program has": (
        [[*other_program()[:2], call(MM, "bx", "z")]],
        [STEP],
        [
            "candidate alone _c10d_functional.all_gather_into_tensor.default in forward of layers.0 (fsdp.py:3)",
            "reference alone c10d._allgather_base_.default in forward of layers.0 (model.py:7)",
        ],
    ),
    "operator that the reference does not run": (
        [FURTHER],
        [STEP],
        ["aten.neg.default", "the reference does not run this operator on these inputs"],
    ),
}


@each_of("candidate, reference, parts", LOCATED)
def test_first_operator_that_differs_is_named_with_its_place_and_what_differs(candidate, reference, parts):
    found = locate_operator(dict(enumerate(candidate)), dict(enumerate(reference)))
    assert [part for part in parts if part not in found] == []


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ({"arguments": "[torch.bfloat16]"}, {"arguments": "[torch.float32]"}, "[torch.bfloat16], the reference's"),
        (
            {"outputs": ("x",), "group": "ranks 0, 1", "is_collective": True},
            {"group": "ranks 0, 2", "is_collective": True},
            "it runs with ranks 0, 1, the reference's with ranks 0, 2",
        ),
    ],
)
def test_call_with_other_arguments_or_another_group_says_which(here, there, expected):
    right = [replace(STEP[0], **there)]
    line = locate_operator({0: [replace(STEP[0], **{"outputs": ("x",), **here})]}, {0: right})
    assert "on the same inputs, it runs with " in line
    assert expected in line


NAN, INF = {"wrote": 2}, {"wrote": 1}
FROM_NAN = {"read": 2, "wrote": 2}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ({0: STEP}, ("no captured operator wrote a NaN", False)),
        (
            {0: [call(MM, "a", "b"), call(MM, "n", "m", **FROM_NAN)], 1: [call("aten.log.default", "a", "n", **NAN)]},
            ("first NaN: aten.log.default in forward of layers.0 (model.py:7) on rank 1, from finite inputs", True),
        ),
        (
            # A masked score is infinite in every step; an exponential that overflows is not.
            {
                0: [
                    call("aten.masked_fill.Scalar", "a", "i", arguments="[-inf]", **INF),
                    call("aten.exp.default", "a", "j", **INF),
                    call("aten.sub.Tensor", "ij", "n", read=1, wrote=2),
                ]
            },
            (
                "first infinity: aten.exp.default in forward of layers.0 (model.py:7) on rank 0, from finite inputs",
                True,
            ),
        ),
        (
            {0: [call(ADAMW, "pq", "rs", parameters=((0, "a.weight"),), **NAN)]},
            (
                "first NaN in a.weight: aten._fused_adamw_.default in forward of layers.0 (model.py:7) on rank 0, "
                "from finite inputs",
                True,
            ),
        ),
        (
            {0: [call(MM, "n", "m", **FROM_NAN)]},
            (
                "first NaN: aten.mm.default in forward of layers.0 (model.py:7) on rank 0 read one "
                "that no operator wrote",
                False,
            ),
        ),
    ],
)
def test_first_nan_is_named_with_its_rank_and_what_it_came_from(calls, expected):
    assert locate_non_finite(calls) == expected


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
