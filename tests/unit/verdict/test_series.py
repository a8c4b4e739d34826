"""Comparison of what was recorded of the optimizers of an unedited script."""

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.series import (
    LocalWeights,
    Series,
    diverged,
    first_other_weights,
    joined_hashes,
    optimizers_facts,
    series_facts,
)
from pytest_aorta.verdict.metrics import Origin, Tolerance
from tests.unit.builders import (
    MISSING,
    NOT_APPLICABLE,
    PASS,
    REGRESSION,
    baseline_of,
    each_of,
    make_baseline,
    make_facts,
    stored,
)
from tests.unit.verdict.compared import SURE, check, texts

NAME = "AdamW of DDP(Net)"


def series(
    loss: Sequence[float] = (),
    weights: dict[str, Sequence[str]] | None = None,
    names: Sequence[str] | None = None,
    **changes: Any,
) -> Series:
    """Return a rank's series; ``weights`` is step -> a digit for each parameter."""
    rows = {step: [digit * 32 for digit in row] for step, row in (weights or {}).items()}
    held = LocalWeights(
        names=[*(names or (f"p{number}" for number in range(len(next(iter(rows.values()), [])))))],
        shapes=[[2] for _ in next(iter(rows.values()), [])],
        tensors=rows,
        hashes={step: "".join(row) * 16 for step, row in (weights or {}).items()},
    )
    values = {"optimizer": "AdamW", "model": "DDP(Net)", "num_steps": max(1, len(loss)), "weights": held}
    return Series(loss={str(step): value for step, value in enumerate(loss, 1)}, **values | changes)


def launch(*ranks: Series, **changes: Any) -> LaunchFacts:
    facts = series_facts([[rank] for rank in ranks])
    return make_facts(series=facts, environment=SURE, weight_hashes={}, **changes)


def judged(here: LaunchFacts, *there: LaunchFacts, metric: str = "loss", **marked: Tolerance) -> Any:
    verdicts = check(here, baseline=baseline_of(*there), marked=marked)
    return next(row for row in verdicts.rows if row.metric == metric)


CURVE = [1.0, 0.5, 0.25, 0.125]


def test_first_other_bit_names_step_optimizer_and_ranks():
    there = launch(series(CURVE), series(CURVE))
    here = launch(series([*CURVE[:3], 9.0]), series([*CURVE[:2], 0.2500001, 9.0]))
    row = judged(here, there, there)
    assert row.outcome is REGRESSION
    assert f"step 3 of {NAME} on rank 1: 0.2500001, recorded 0.25" in row.detail
    assert (row.value, row.baseline) == (0.2500001, 0.25)
    assert "bit for bit" in judged(there, there, there).detail
    assert {str(judged(side, there, there).tolerance) for side in (here, there)} == {"exact"}


def test_rank_with_more_steps_does_not_differ_by_steps_that_one_side_hashed():
    short, long = {"2": "1", "3": "1"}, {"2": "1", "4": "1"}
    plain = launch(series(weights=short), series(weights=long))
    every, other = (launch(series(weights=short), series(weights={**long, "3": "1", "4": last})) for last in "12")
    assert not first_other_weights(every.series, plain.series)
    assert "differ after step 4 on rank 1, and are equal after step 3" in first_other_weights(
        other.series, plain.series
    )


@pytest.mark.parametrize("side", [0, 1])
def test_no_tensor_has_come_or_gone_in_a_step_that_a_side_did_not_hash(side):
    rows = [{"0": "11", "2": "11", "16": last} for last in ("22", "33")]
    facts = [series_facts([[series(weights=row)]]) for row in rows]
    facts[side] = [one.replace(parameters={"0": one.parameters["0"]}) for one in facts[side]]
    assert "after step 16 on rank 0, and are equal after step 2" in first_other_weights(*facts)


def test_hashes_of_other_tensors_are_not_joined():
    first, every = (series_facts([[series(weights=rows)]])[0] for rows in ({"0": "11"}, {"1": "123"}))
    assert first.with_every_step(every).parameters == first.parameters


def two_optimizers(bad: str, turns: tuple[list[int], list[int]]) -> LaunchFacts:
    """Return a launch whose first optimizer steps often; the weights and losses after its third step are ``bad``."""
    often = series([1.0, 1.0, 1.0, float(bad)], {"0": "0", "2": "0", "4": bad}, optimizer="SGD", turns=turns[0])
    seldom = series([1.0, float(bad)], {"0": bad if turns[1][0] > turns[0][-1] else "0", "2": bad}, turns=turns[1])
    facts = series_facts([[often, seldom]])
    return make_facts(series=facts, environment=SURE, weight_hashes={4: "a" * 32 if bad == "0" else "b" * 32})


@pytest.mark.parametrize(("counts", "word"), [((2, 1), "new"), ((1, 2), "gone")])
def test_optimizer_that_one_side_lacks_is_named_where_the_others_hold_equal_weights(counts, word):
    def side(count: int) -> LaunchFacts:
        facts = series_facts([[series(weights={"0": "11", "2": "22"}) for _ in range(count)]])
        return make_facts(series=facts, environment=SURE, weight_hashes={0: f"{count}" * 32, 2: f"{count}" * 32})

    here, there = map(side, counts)
    assert judged(here, there, there, metric="weight_hash").detail == f"{NAME} #2 is {word}"


@each_of("turns", {"in phases": ([1, 2, 3, 4], [5, 6]), "in turns": ([1, 2, 4, 5], [3, 6])})
def test_first_difference_is_that_of_the_optimizer_that_stepped_first(turns):
    here, there = two_optimizers("9", turns), two_optimizers("0", turns)
    expected = {
        "loss": "differs first in step 4 of SGD of DDP(Net) on rank 0: 9.0, recorded 0.0",
        "weight_hash": "the weights of SGD of DDP(Net) first differ after step 4 on rank 0, and are equal after "
        "step 2: p0; those of 1 other optimizer differ too",
    }
    assert {name: judged(here, there, there, metric=name).detail for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "marked", "outcome"),
    [
        (1.04, {}, PASS),
        (1.2, {}, REGRESSION),
        (1.04, {"loss": Tolerance(0.02)}, REGRESSION),
        (1.2, {"loss": Tolerance(0.5)}, PASS),
        (1.0, {"loss": Tolerance(None)}, PASS),
        (1.04, {"loss": Tolerance(None)}, REGRESSION),
    ],
)
def test_where_bits_do_not_repeat_steps_are_within_the_tolerance(change, marked, outcome):
    there = [launch(series(CURVE)), launch(series([value * 1.001 for value in CURVE]))]
    row = judged(launch(series([value * change for value in CURVE])), *there, **marked)
    assert row.outcome is outcome
    assert str(row.tolerance) == str(marked.get("loss", "5%"))
    if marked.get("loss", Tolerance(0.05)).value is not None:
        assert "the recorded launches differ by up to 0.0005 of the value" in row.detail


@pytest.mark.parametrize(("num_outside", "outcome"), [(2, PASS), (3, REGRESSION)])
def test_one_step_in_a_hundred_may_be_outside(num_outside, outcome):
    steps = [1.0] * 200
    there = [launch(series(steps)), launch(series([1.001] * 200))]
    here = [2.0 if number in range(50, 50 + num_outside) else 1.0 for number in range(200)]
    row = judged(launch(series(here)), *there)
    assert row.outcome is outcome
    if outcome is REGRESSION:
        assert f"3 steps outside of the tolerance, allowed are 2; first step 51 of {NAME} on rank 0" in row.detail


def test_single_recorded_launch_is_exact_only_if_its_weights_are():
    one = launch(series(CURVE))
    here = launch(series([1.0, 0.5001, 0.25, 0.125]))
    assert judged(here, one).outcome is PASS
    hashed = {"weight_hashes": {"4": "a" * 32}}
    assert judged(here.replace(**hashed), one.replace(**hashed)).outcome is REGRESSION


MISSING_STEPS = {
    "fewer": ([series(CURVE[:3])], [series(CURVE)], f"the launch has no loss of step 4 of {NAME} on rank 0"),
    "more": ([series(CURVE)], [series(CURVE[:3])], f"the baseline test_file.json has no loss of step 4 of {NAME}"),
    "none": ([series()], [series(CURVE)], "the launch has no loss"),
}


@each_of("here, there, detail", MISSING_STEPS)
def test_missing_steps_are_missing(here, there, detail):
    row = judged(launch(*here), launch(*there), launch(*there))
    assert row.outcome is MISSING
    assert detail.split("baseline")[0] in row.detail


def test_equal_steps_are_compared_where_numbers_of_steps_differ():
    recorded = series_facts([[series(CURVE)], [series(CURVE)]])
    later = series_facts([[series([1.0, 0.5, 0.2])], [series([1.0, 0.5, 0.25, 0.1, 0.05])]])
    there, here = (make_facts(series=facts, environment=SURE) for facts in (recorded, later))
    row = judged(here, there, there)
    assert row.outcome is REGRESSION
    assert f"step 3 of {NAME} on rank 0: 0.2, recorded 0.25" in row.detail
    assert "the launch has 3 and 5 steps by rank" in row.detail
    assert "the baseline has 4 steps" in row.detail


def test_optimizers_are_named_beside_a_step_without_a_value_only_if_they_differ():
    here, there = ({str(step): 1.0 + more for step in steps} for steps, more in (((2, 3), 0.5), ((1, 2, 3), 0)))
    now, before = (launch(series(CURVE, grad_norm=norms)) for norms in (here, there))
    row = judged(now, before, before, metric="grad_norm")
    assert row.detail.endswith(f"1.5, recorded 1.0; the launch has no grad_norm of step 1 of {NAME} on rank 0")


NEWER, LOOSELY = SURE | {"torch": "2.13.0"}, [value * 1.01 for value in CURVE]


@pytest.mark.parametrize(
    ("losses", "origin", "outcome", "said"),
    [
        (CURVE, Origin.NUMERICS, PASS, "4 steps, bit for bit"),
        (LOOSELY, Origin.NUMERICS, NOT_APPLICABLE, "torch '2.11.0' -> '2.13.0'"),
        (LOOSELY, Origin.DEFAULT, PASS, "not compared bit for bit, other environment: torch '2.11.0' -> "),
        ([2.0] * 4, Origin.NUMERICS, REGRESSION, "4 steps outside of the tolerance"),
    ],
)
def test_bits_of_another_torch_that_differ_are_no_pass_of_a_test_of_numbers(losses, origin, outcome, said):
    there = launch(series(CURVE))
    here = launch(series(losses)).replace(environment=NEWER)
    row = judged(here, there, there, loss=Tolerance(0.05, origin=origin))
    assert (row.outcome, said in row.detail) == (outcome, True)
    assert row.fails() is (outcome is not PASS)


def hashed(*ranks: dict[str, Sequence[str]]) -> LaunchFacts:
    rows = [series(weights=rank) for rank in ranks]
    return launch(*rows).replace(weight_hashes=joined_hashes([[row] for row in rows]))


def test_other_weights_name_step_rank_and_parameters():
    there = hashed({"1": "ab", "2": "cd", "5": "ef"}, {"1": "ab", "2": "cd", "5": "ef"})
    here = hashed({"1": "ab", "2": "cd", "5": "e0"}, {"1": "ab", "2": "c1", "5": "e1"})
    row = judged(here, there, metric="weight_hash")
    assert row.outcome is REGRESSION
    assert "after step 2 on rank 1, and are equal after step 1: p1" in row.detail
    kept = baseline_of(there, there).condensed().center_launches
    # The names of one launch are enough.
    assert [launch.series[0].names for launch in kept] == [["p0", "p1"], []]


# The digits of each parameter before the first step, by its name -> what is said of them.
CAME_OR_WENT = {
    "came": ({"embed": "a"}, {"embed": "a", "head": "b"}, ": head is new"),
    "went": ({"embed": "a", "head": "b"}, {"embed": "a"}, ": head is gone"),
    "renamed": ({"embed": "a", "head": "b"}, {"embed": "a", "out": "c"}, ": out is new, head is gone"),
    "changed too": ({"embed": "a"}, {"embed": "c", "head": "b"}, ": head is new, embed"),
    "many": ({"embed": "a"}, {"embed": "a"} | dict.fromkeys("wxyz", "b"), ": w is new, x is new, y is new and 1 other"),
}


@each_of("before, after, text", CAME_OR_WENT)
def test_parameter_that_came_or_went_is_named(before, after, text):
    there, here = (
        launch(row).replace(weight_hashes=joined_hashes([[row]]))
        for row in (
            series(weights={"0": [*side.values()], "2": [*side.values()]}, names=[*side]) for side in (before, after)
        )
    )
    baseline = baseline_of(there).condensed()
    row = judged(here, *baseline.center_launches, metric="weight_hash")
    assert f"first differ before the first step on rank 0{text}" in row.detail
    # Earlier versions kept no names.
    old = [facts.replace(series=[facts.series[0].replace(names=[])]) for facts in baseline.center_launches]
    assert "first differ before the first step on rank 0" in judged(here, *old, metric="weight_hash").detail


def buffered(*ranks: dict[str, Sequence[str]]) -> LaunchFacts:
    rows = [series(weights={"1": "ab"}, buffers=series(weights=rank).weights) for rank in ranks]
    hashes = {kind: joined_hashes([[row] for row in rows], kind) for kind in ("weights", "buffers")}
    return launch(*rows).replace(weight_hashes=hashes["weights"], buffer_hashes=hashes["buffers"])


def test_buffers_have_a_row_of_their_own_that_names_them():
    there, here = buffered({"1": "ab"}, {"1": "ab"}), buffered({"1": "ab"}, {"1": "a0"})
    assert judged(there, there, metric="buffer_hash").outcome is PASS
    row = judged(here, there, metric="buffer_hash")
    assert row.outcome is REGRESSION
    assert "first differ after step 1 on rank 1: p1" in row.detail
    assert judged(here, there, metric="weight_hash").outcome is PASS
    lost = judged(hashed({"1": "ab"}, {"1": "ab"}), there, metric="buffer_hash")
    assert lost.is_lost


def test_last_step_of_a_shorter_run_has_what_followed_it_and_does_not_differ():
    there, here = buffered({"1": "a", "2": "b", "3": "c"}), buffered({"1": "a", "2": "d"})
    row = judged(here.replace(num_steps=2), there.replace(num_steps=3), metric="buffer_hash")
    assert row.outcome is MISSING
    assert "with 3 measured steps" in row.detail


def test_baseline_without_buffers_stays_valid_and_says_so():
    old = hashed({"1": "ab"}, {"1": "ab"})
    verdicts = check(buffered({"1": "ab"}, {"1": "ab"}), baseline=baseline_of(old))
    assert "buffer_hash" not in {row.metric for row in verdicts.rows}
    assert any(
        note.startswith("buffers are not compared: the baseline has no hashes of them") for note in texts(verdicts)
    )
    varying = make_baseline(launches=stored(buffered({"1": "ab"})), left_out={"buffer_hash": "p0 varies"})
    row = check(buffered({"1": "cd"}), baseline=varying)["buffer_hash"]
    assert row.outcome is NOT_APPLICABLE
    assert "p0 varies" in row.detail


REPLICAS = {
    "equal": (({"1": "ab", "2": "cd"}, {"1": "ab", "2": "cd"}), ""),
    # Shards, stages and tensors of other seeds are no replicas.
    "own": (({"1": "ab", "2": "cd"}, {"1": "ef", "2": "01"}), ""),
    "differ": (
        ({"0": "ab", "2": "cd"}, {"0": "ab", "2": "c0"}),
        f"replicas differ: p1 of {NAME} on rank 1 and on rank 0 after step 2; they are equal before the first step",
    ),
    "averaged": (
        ({"1": "ab", "2": "cd", "4": "ab"}, {"1": "ab", "2": "00", "4": "ab"}),
        f"replicas differ: p0 and 1 other of {NAME} on rank 1 and on rank 0 after step 2; they are equal after "
        f"step 1, and again after step 4",
    ),
}


@each_of("ranks, text", REPLICAS)
def test_replicas_are_found_and_their_difference_is_named(ranks, text):
    rows = [[series(weights=rank)] for rank in ranks]
    assert [str(parted) for parted in diverged(rows)] == ([text] if text else [])
    assert diverged(rows[:1]) == []


def test_replicas_that_differ_in_the_baseline_too_are_no_cause():
    def stepped(*digits: str) -> LaunchFacts:
        """Return a launch whose parameters on rank 1 have these digits after steps 1 and 2."""
        ranks = ({"0": "abc", "1": "def", "2": "123"}, {"0": "abc", "1": digits[0], "2": digits[1]})
        return make_facts(replicas=diverged([[series(weights=rank)] for rank in ranks]))

    baseline = baseline_of(stepped("de0", "120")).condensed()
    assert texts(check(stepped("de0", "120"), baseline=baseline)) == []
    for digits, text in ((("de0", "100"), "p1 of "), (("d00", "120"), "p1 and 1 other of ")):
        [note] = texts(check(stepped(*digits), baseline=baseline))
        assert note.startswith(f"replicas differ: {text}{NAME} on rank 1")


def line_on(ranks: list[list[Series]], **changes: bool) -> str:
    return optimizers_facts(ranks, **{"has_messages": False, "is_simulated": False} | changes).text


def test_optimizers_are_described_if_there_are_several_or_one_works_alone():
    reference = series([1.0], optimizer="SGD", model="Net", num_steps=40, collectives=0)
    trained, trained_text = series([1.0], num_steps=44, collectives=2), f"{NAME} (44 steps, 2 collectives a step)"
    assert "there is no collective in the steps of SGD of Net; so each rank trains alone" in line_on([[reference]] * 2)
    line = line_on([[reference, trained]] * 2)
    assert f"SGD of Net (40 steps, no collective), {trained_text}" in line
    assert line_on([[trained, trained]] * 2).endswith(f": {trained_text}, {trained_text.replace(NAME, f'{NAME} #2')}")
    lossless = series(num_steps=44, collectives=2, is_main=True)
    assert line_on([[lossless]] * 2).startswith("no loss is recorded, since the script calls no backward() of one; ")
    for ranks, changes in (
        ([[trained], [trained]], {}),
        ([[reference]], {}),
        ([[reference]] * 2, {"has_messages": True}),
        ([[lossless]] * 2, {"is_simulated": True}),
        ([[lossless], [trained]], {}),
    ):
        assert not line_on(ranks, **changes)
    many = line_on([[reference] * 9] * 2)
    assert (many.count("(40 steps"), many.count("SGD of Net #8"), many.count(" and 1 other")) == (8, 2, 2)


def test_time_of_the_other_optimizers_is_a_metric_of_its_own():
    both = [series(is_main=True, step_times_ms=[5.0, 5.0]), series(step_times_ms=[2.0, 4.0])]
    facts = make_facts(series=series_facts([both, both]))
    marked = {"other_steps_ms": Tolerance(0.05, origin=Origin.MARKER)}
    row = next(row for row in check(facts, marked=marked).rows if row.metric == "other_steps_ms")
    assert row.value == 3.0
