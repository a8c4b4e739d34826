from __future__ import annotations

from pytest_aorta.result.measurements import TensorHashes
from pytest_aorta.verdict import bitwise
from pytest_aorta.verdict.bitwise import difference_text
from tests.unit.builders import make_result

WEIGHTS = ["tok.weight", "layers.0.w.weight", "out.weight"]
FORWARD = [":input", "tok:input", "tok:output", "layers.0:input", "layers.0.w:input", "layers.0.w:output", ":output"]
BACKWARD = [":output", "layers.0.w:output", "tok:output"]


def locate(here, there, step):
    """Return the lines about two results whose run folders are not known."""
    return bitwise.locate(here, there, step, lambda result: None)


def hashes(names, *odd, step=2):
    """Return hashes of a step, with different hashes for the names in ``odd``."""
    values = ["f" * 32 if name in odd else "0" * 32 for name in names]
    return TensorHashes(list(names), [[place, 4] for place in range(len(names))], {str(step): values})


def result(weights=(), gradients=(), forward=((), ()), backward=((), ()), **changes):
    return make_result(
        [[1.0] * 3] * 2,
        tensor_hashes={
            "weights": hashes(WEIGHTS, *weights),
            "gradients": hashes(WEIGHTS, *gradients),
            "optimizer": hashes([f"{name}.exp_avg" for name in WEIGHTS]),
        },
        boundary_hashes=[
            {"forward": hashes(FORWARD, *one), "backward": hashes(BACKWARD, *other)}
            for one, other in zip(forward, backward, strict=True)
        ],
        **changes,
    )


def line(kind, **odd):
    [found] = [line for line in locate(result(**odd), result(), 2) if line.startswith(f"step 2, {kind}: ")]
    return found.removeprefix(f"step 2, {kind}: ")


def test_first_parameter_is_that_of_registration_order_with_count_and_shape():
    found = line("weights", weights=["out.weight", "layers.0.w.weight"])
    assert found == "2 of 3 parameters differ, first layers.0.w.weight [1, 4]"


def test_weights_alone_that_differ_were_changed_by_or_after_the_optimizer():
    assert locate(result(weights=["tok.weight"]), result(), 2)[-1] == (
        "so the weights were changed in the optimizer's step, or after it"
    )
    assert not locate(result(weights=["tok.weight"], gradients=["tok.weight"]), result(), 2)[-1].startswith("so ")


def test_module_that_computes_another_output_of_the_same_input_is_named_with_its_rank():
    found = line("forward", forward=((), ("layers.0.w:output", ":output")))
    assert found == (
        "2 of 7 inputs and outputs of modules differ on rank 1, first the output of layers.0.w [5, 4]: what layers.0.w "
        "was given is the same, so that it is computed there (some differ on 1 of 2 ranks)"
    )


def test_difference_between_modules_is_the_parents():
    found = line("forward", forward=(("layers.0.w:input", "layers.0.w:output"), ()))
    assert "first the input of layers.0.w [4, 4]: computed outside of modules, in what layers.0 does after" in found


def test_other_data_are_reported():
    assert "the model is given other data" in line("forward", forward=((":input",), ()))


def test_of_several_ranks_the_one_where_it_is_earliest_is_named():
    assert "differ on rank 1" in line("forward", forward=((":output",), ("tok:output",)))


def test_gradient_is_named_with_the_one_before_it():
    found = line("backward", backward=(("tok:output",), ()))
    assert found == (
        "1 of 3 gradients of modules' outputs differ on rank 0, first the gradient of the output of tok [2, 4]: made "
        "by backward between it and the gradient of the output of layers.0.w, which is the same "
        "(some differ on 1 of 2 ranks)"
    )
    assert "it comes from the loss" in line("backward", backward=((":output",), ()))


def test_what_is_the_same_is_said():
    assert line("gradients") == "all 3 gradients are the same"
    assert line("forward") == "all 7 inputs and outputs of modules are the same on all 2 ranks"


def test_names_of_one_side_alone_are_reported():
    here = make_result([[1.0]], tensor_hashes={"weights": hashes(["a", "b"])})
    there = make_result([[1.0]], tensor_hashes={"weights": hashes(["a"])})
    assert locate(here, there, 2) == ["step 2, weights: all 1 parameters are the same; one of the two alone has ['b']"]


def test_other_shape_of_the_same_values_is_a_difference():
    one, other = TensorHashes(["a"], [[2, 3]], {"2": ["0" * 32]}), TensorHashes(["a"], [[3, 2]], {"2": ["0" * 32]})
    here, there = (make_result([[1.0]], tensor_hashes={"weights": of}) for of in (one, other))
    assert locate(here, there, 2) == ["step 2, weights: 1 of 1 parameters differ, first a [3, 2]"]


def test_steps_without_hashes_give_no_line():
    assert locate(result(), result(), 3) == []


def test_only_keys_that_both_configs_have_are_reported():
    here = make_result([[1.0]], config={"lr": 1, "backend": "eager"})
    there = make_result([[1.0]], config={"lr": 2, "prefetch": 1})
    assert difference_text([], here, there, []).splitlines()[1:] == ["  config: lr is 1, the reference's 2"]
