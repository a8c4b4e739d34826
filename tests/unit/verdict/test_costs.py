"""Costs of a step against a baseline: one launch decides, and the verdict says what came and went on which ranks."""

import pytest

from pytest_aorta.result.trace.profiled_steps import CollectiveCost, Cost, Costs, distinct_costs
from pytest_aorta.verdict.metrics import parse_tolerances
from pytest_aorta.verdict.verdicts import Missing, MissingPart, NotApplicable, NoteKind, Reason
from tests.unit.builders import CHANGED, IMPROVED, MISSING, PASS, REGRESSION, baseline_of, on_cpu
from tests.unit.verdict.compared import check, launches_needed, outcomes, texts

GATHERS = CollectiveCost("all_gather", 4, 2, "bfloat16", 4_000_000)
COSTS = Costs(
    collectives=[GATHERS],
    flops={"aten::mm": 1_000_000},
    operators={"aten::mm": 100, "aten::add": 900},
    compiled_graphs=0,
    recompilations=0,
    graph_breaks=0,
)


def launch(*ranks: Costs, **changes):
    """Return a launch with these costs of its ranks; with none, both ranks have the costs of the baseline."""
    return on_cpu(costs=distinct_costs(ranks or [COSTS, COSTS], range(2)), **changes)


def judged(*ranks: Costs, before=(), marked=None, **changes):
    """Return the verdicts of one launch against a baseline of unchanged launches, which the first of ``before`` is."""
    baseline = baseline_of(*(before or [launch()]))
    return check(launch(*ranks, **changes), baseline=baseline, marked=parse_tolerances(marked or {}, "test"))


def changed(**changes):
    return COSTS.replace(**changes)


MORE_GATHERS = changed(collectives=[GATHERS.replace(calls=5, bytes=5_050_000)])
IN_FLOAT32 = changed(collectives=[GATHERS.replace(dtype="float32", bytes=8_000_000)])
ONE_MORE = changed(operators={"aten::mm": 100, "aten::add": 900, "aten::neg": 1})
OTHERS = changed(operators={"aten::mm": 100, "aten::sub": 900})


@pytest.mark.parametrize(
    ("cost", "metric", "marker", "outcome", "detail"),
    [
        (MORE_GATHERS, "collectives", None, REGRESSION, "all_gather over 2 ranks, bfloat16 4 -> 5 a step, +1.05 MB"),
        (MORE_GATHERS, "collectives", "30%", PASS, "all_gather over 2 ranks, bfloat16 4 -> 5 a step, +1.05 MB"),
        (
            IN_FLOAT32,
            "collective_bytes",
            None,
            REGRESSION,
            "all_gather over 2 ranks, float32 +8 MB, all_gather over 2 ranks, bfloat16 -4 MB",
        ),
        (changed(flops={"aten::mm": 1_001_000}), "flops", None, PASS, "aten::mm +1,000"),
        (changed(flops={"aten::mm": 1_001_001}), "flops", None, REGRESSION, "aten::mm +1,001"),
        (ONE_MORE, "operators", None, PASS, "+ aten::neg x 1"),
        (ONE_MORE, "operators", "exact", REGRESSION, "+ aten::neg x 1"),
        (OTHERS, "operators", "exact", REGRESSION, "- aten::add x 900, + aten::sub x 900"),
        (changed(operators={"aten::mm": 90}), "operators", None, IMPROVED, "- aten::add x 900, - aten::mm x 10"),
        (changed(host_copies={"aten::_local_scalar_dense": 1}), "host_copies", None, REGRESSION, "+ aten::_local"),
        (changed(recompilations=8), "recompilations", None, REGRESSION, "8 in 20 measured steps, 0 before"),
        (changed(compiled_graphs=1), "compiled_graphs", None, REGRESSION, "+ compiled_graphs x 1"),
        (changed(graph_breaks=1), "graph_breaks", None, REGRESSION, "+ graph_breaks x 1"),
        (changed(kernels={"gemm": 3}), "kernels", None, MISSING, "the baseline has no kernels"),
    ],
)
def test_one_launch_decides_and_says_what_came_and_went(cost, metric, marker, outcome, detail):
    row = judged(cost, cost, marked={metric: marker} if marker else {})[metric]
    assert row.outcome is outcome
    assert row.detail.startswith(detail)


@pytest.mark.parametrize(
    ("cost", "here", "there", "detail"),
    [
        (ONE_MORE, {"aten::neg": {"train.py:43": 1}}, {}, "+ aten::neg x 1 (train.py:43)"),
        (
            MORE_GATHERS,
            {str(GATHERS): {"layers.1 at train.py:9": 3, "layers.* at train.py:9": 2}},
            {},
            "all_gather over 2 ranks, bfloat16 4 -> 5 a step, +1.05 MB (layers.1 at train.py:9 x 3 and 1 other line)",
        ),
        # The other side's places tell new calls from old ones, also where a new line has moved the lines below it.
        (
            MORE_GATHERS,
            {str(GATHERS): {"train.py:5 gather(one)": 1, "layers.* at train.py:10 gather(x[1:9])": 4}},
            {str(GATHERS): {"layers.* at train.py:9 gather(x[1:9])": 4}},
            "4 -> 5 a step, +1.05 MB (train.py:5 gather(one))",
        ),
        (
            OTHERS,
            {"aten::sub": {f"a.py:{line} f({line})": 100 - line for line in range(5)}},
            {},
            "- aten::add x 900, + aten::sub x 900 (a.py:0 f(0) x 100 and 4 other lines)",
        ),
        (
            OTHERS,
            {"aten::sub": {"a.py:2": 900}},
            {"aten::add": {"a.py:1": 900}},
            "- aten::add x 900 (a.py:1 x 900), + aten::sub x 900 (a.py:2 x 900)",
        ),
        (
            IN_FLOAT32,
            {"all_gather over 2 ranks, float32": {"backward of layers.0 at train.py:9": 4}},
            {},
            "float32 +8 MB (backward of layers.0 at train.py:9 x 4), all_gather over 2 ranks, bfloat16 -4 MB",
        ),
        (
            changed(flops={"aten::mm": 2_000_000}),
            {"aten::mm": {"recomputation in layers.*": 2}},
            {},
            "aten::mm +1,000,000 (recomputation in layers.* x 2)",
        ),
        (
            changed(recompilations=8),
            {"recompilations": {"forward at model.py:3": 8}},
            {},
            "8 in 20 measured steps, 0 before (forward at model.py:3 x 8)",
        ),
        (ONE_MORE, {"aten::mm": {"train.py:1": 100}}, {}, "+ aten::neg x 1"),
    ],
)
def test_places_of_what_came_and_went_follow_it(cost, here, there, detail):
    named = dict.fromkeys((Cost.COLLECTIVES, Cost.OPERATORS, Cost.RECOMPILATIONS), here)
    before = COSTS.replace(places=dict.fromkeys(named, there))
    placed = cost.replace(places=named)
    marked = dict.fromkeys(("operators", "flops"), "exact")
    rows = judged(placed, placed, before=[launch(before, before)], marked=marked).rows
    assert any(row.detail.endswith(detail) for row in rows if row.outcome is REGRESSION)


def test_graphs_are_not_compared_with_a_baseline_that_does_not_know_them():
    older = changed(compiled_graphs=None)
    verdicts = judged(changed(compiled_graphs=1), changed(compiled_graphs=1), before=[launch(older, older)])
    assert "compiled_graphs" not in outcomes(verdicts)


GONE = changed(collectives=[])
REDUCED = changed(collectives=[GATHERS.replace(calls=3), GATHERS.replace(kind="reduce_scatter", calls=1)])


def test_fewer_collectives_are_no_improvement_beside_a_regression():
    more_copies = GONE.replace(host_copies={"aten::_local_scalar_dense": 1})
    verdicts = judged(more_copies, more_copies)
    assert verdicts["collectives"].outcome is CHANGED
    assert "stale" not in str(verdicts["collectives"])
    fewer = changed(operators={"aten::mm": 90})
    assert "stale" in str(judged(fewer, fewer)["operators"])


def test_collective_that_is_gone_fails_where_weights_are_not_compared():
    assert judged(GONE, GONE)["collectives"].outcome is IMPROVED
    without = judged(GONE, GONE, before=[launch(COSTS, COSTS, weight_hashes={})], weight_hashes={})
    assert without["collectives"].outcome is REGRESSION


def test_other_kinds_of_as_many_collectives_are_named_in_place_of_the_change():
    headline = judged(REDUCED, REDUCED)["collectives"].headline
    assert headline.startswith("Regression: collectives: all_gather over 2 ranks, bfloat16 4 -> 3 a step")
    assert headline.endswith("(4 -> 4, limit exact)")


def test_unchanged_costs_pass_and_those_that_are_0_have_no_row():
    names = ("collectives", "collective_bytes", "flops", "operators", "weight_hash")
    assert outcomes(judged()) | {"weight_hash": PASS} == dict.fromkeys(names, PASS)


def test_ranks_that_differ_are_named_and_the_worst_decides():
    row = judged(COSTS, MORE_GATHERS)["collectives"]
    assert (row.outcome, row.value, row.baseline) == (REGRESSION, 5, 4)
    assert row.detail.endswith("on rank 1 only")


def test_other_change_of_other_ranks_is_said():
    row = judged(changed(operators={"aten::mm": 99, "aten::add": 990}), changed(operators={"aten::mm": 200}))
    assert row["operators"].detail.endswith("on rank 0; rank 1 changed otherwise")


def test_ranks_with_costs_of_their_own_that_change_alike_name_the_rank_of_the_values():
    stages = [changed(operators={"aten::mm": 10}), changed(operators={"aten::mm": 20})]
    more = [changed(operators={"aten::mm": 15}), changed(operators={"aten::mm": 25})]
    row = judged(*more, before=[launch(*stages)])["operators"]
    assert (row.value, row.baseline) == (15, 10)
    assert "aten::mm x 5; the values are those of rank 0" in row.detail


def test_what_differs_between_launches_of_the_baseline_is_left_out_by_name():
    routed = [launch(*[changed(operators={"aten::mm": 100 + number, "aten::add": 900})] * 2) for number in range(3)]
    row = judged(changed(operators={"aten::mm": 500, "aten::add": 900}), COSTS, before=routed)["operators"]
    assert (row.outcome, row.value) == (PASS, 900)
    assert "differs between launches of the baseline: aten::mm" in row.detail


def test_costs_of_other_simulated_ranks_are_missing():
    here, there = (on_cpu(costs=distinct_costs([COSTS], [rank]), simulated=True) for rank in (3, 0))
    row = check(here, baseline=baseline_of(there)).rows[0]
    assert row.state == Missing(MissingPart.BASELINE_VALUE)
    assert row.detail.startswith("the launch has the costs of ranks [3], the baseline of ranks [0]; record it again")


def test_a_baseline_without_costs_stays_valid_and_says_so_once():
    verdicts = judged(COSTS, COSTS, before=[on_cpu()])
    assert not {row.metric for row in verdicts.rows} & {"collectives", "operators"}
    assert texts(verdicts)[-1].startswith("costs of a step are not in the baseline; record it again with")
    marked = judged(COSTS, COSTS, before=[on_cpu()], marked={"collectives": "exact"})["collectives"]
    assert marked.state == Missing(MissingPart.BASELINE_VALUE)


def test_costs_that_a_launch_could_not_count_are_missing_with_the_reason():
    problem = Costs(problem="torch.profiler runs")
    verdicts = judged(problem, problem)
    assert verdicts["collectives"].is_lost
    assert "costs of a step are not compared: torch.profiler runs" in texts(verdicts)


def test_operator_without_a_formula_is_told_in_the_row_of_flops_alone():
    custom = MORE_GATHERS.replace(without_flops={"mine::scan": 2})
    verdicts = judged(custom, custom)
    assert verdicts["flops"].outcome is PASS
    assert "no formula is known for mine::scan" in verdicts["flops"].detail
    assert not any(note.kind is NoteKind.CAUSE for note in verdicts.notes)


def test_another_torch_keeps_operators_from_being_compared_but_not_collectives():
    verdicts = judged(MORE_GATHERS, MORE_GATHERS, environment={"torch": "2.13.0", "device": "cpu"})
    assert verdicts["operators"].state == NotApplicable(Reason.VERSIONS)
    row = verdicts["collectives"]
    assert row.outcome is REGRESSION
    assert "torch is 2.13.0, the baseline's 2.11.0, which can be the cause" in row.detail


@pytest.mark.parametrize(("wanted", "needed"), [(1, 1), (10, 2)])
def test_costs_need_a_second_launch_for_a_baseline_to_show_what_varies(wanted, needed):
    assert launches_needed(launch(), {}, wanted) == needed
