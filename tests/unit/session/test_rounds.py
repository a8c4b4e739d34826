"""Rounds of launches until a comparison is decided, and the text of its end."""

import re
import sys
from itertools import cycle
from pathlib import Path

import pytest

from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import Repeated, comparison_text, in_pairs, joined, settle, with_baseline, with_both
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import Tolerance, parse_tolerances
from pytest_aorta.verdict.verdicts import (
    Decided,
    NotApplicable,
    Note,
    Open,
    Reason,
    ReferenceKind,
    VerdictReference,
    Verdicts,
)
from tests.unit.builders import (
    CHANGED,
    INCONCLUSIVE,
    MISSING,
    PASS,
    REGRESSION,
    UNRECORDED,
    baseline_of,
    compared,
    each_of,
    launches_near,
    make_baseline,
    make_facts,
    make_verdict,
    on_cpu,
    stored,
    with_p50,
)

BASELINE = baseline_of(*launches_near(10.0, 10))
TIMES = {"step_time_p50": Tolerance(0.05)}


def stored_comparison(max_launches: int, baseline=BASELINE, marked=None) -> StoredComparison:
    return StoredComparison("case", BASELINE.config, baseline, marked or {}, max_launches)


def paired_comparison(max_pairs: int) -> PairedComparison:
    return PairedComparison("case", TIMES, ["step_time_p50"], max_pairs)


def settled(p50s: list[float], max_launches: int = 5):
    """Return the verdict on the median and the number of launches; each launch has the next of ``p50s``."""
    left = [with_p50(make_facts(), p50) for p50 in p50s]
    comparing = with_baseline(stored_comparison(max_launches), left.pop(0))
    verdicts = settle(comparing, lambda side: left.pop(0))
    return verdicts["step_time_p50"].outcome, len(p50s) - len(left)


# Each launch is slow, but they differ so much that the change could be noise.
SLOW_AND_NOISY = [10.5, 13.0, 10.4, 12.0, 10.6, 14.0, 10.4, 13.0, 10.5, 12.0, 10.6, 14.0, 10.4]


@pytest.mark.parametrize(("allowed", "made"), [(1, 1), (2, 1), (3, 3), (4, 3), (13, 13)])
def test_launches_end_at_the_last_look_that_is_allowed(allowed, made):
    assert settled(SLOW_AND_NOISY, allowed) == (INCONCLUSIVE, made)


def test_launches_end_where_none_that_is_left_could_decide():
    assert settled([12.0, 9.0, 12.0], 13) == (INCONCLUSIVE, 3)


def test_decided_rows_stay_while_another_is_open():
    first = make_facts(final_loss=2.0)
    later = [with_p50(make_facts(final_loss=9.0), p50) for p50 in (9.0, 12.0)]
    baseline = baseline_of(*launches_near(10.0, 10, final_loss=2.0))
    marked = {"final_loss": Tolerance(0.05), "step_time_p50": Tolerance(0.05)}
    comparison = stored_comparison(5, baseline, marked)
    verdicts = settle(with_baseline(comparison, with_p50(first, 12.0)), lambda side: later.pop())
    assert later == []
    assert (verdicts["final_loss"].outcome, verdicts["final_loss"].launches) == (PASS, 1)


def test_time_that_got_worse_beside_an_exact_difference_is_decided():
    slow = with_p50(make_facts(weight_hashes={"10": "f" * 16}), 12.0)
    verdicts = settle(with_baseline(stored_comparison(5), slow), lambda side: slow)
    assert [row.outcome for row in verdicts.failing()] == [REGRESSION] * 2


def test_launch_that_ends_an_iteration_does_not_end_the_comparison():
    with pytest.raises(StopIteration):
        settle(in_pairs(paired_comparison(6)), lambda side: next(iter(())))


def pairs(
    candidate_p50s: tuple[float, ...], reference_p50: float, max_pairs: int, made: int, *, reference_first: bool = False
):
    """Return the verdict, and the order of the launched sides, after ``made`` launches of both."""
    order: list[str] = []
    candidate_p50 = cycle(candidate_p50s)

    def launch(side: Side):
        order.append("new" if side is Side.CANDIDATE else "old")
        return with_p50(make_facts(), next(candidate_p50) if side is Side.CANDIDATE else reference_p50)

    there = [make_facts()] * made
    comparing = in_pairs(paired_comparison(max_pairs), there, there, reference_first=reference_first)
    verdicts = settle(comparing, launch)
    assert order.count("new") == order.count("old")
    return verdicts["step_time_p50"], order


@pytest.mark.parametrize(("reference_first", "expected"), [(False, ["old", "new"]), (True, ["new", "old"])])
def test_launches_that_are_there_are_the_first_pair_and_the_next_has_the_other_order(reference_first, expected):
    row, order = pairs((10.0,), 10.0, 6, made=1, reference_first=reference_first)
    assert (row.outcome, row.launches) == (PASS, 2)
    assert order == expected


@pytest.mark.parametrize("allowed", [2, 3, 4, 6])
def test_pairs_end_at_the_most_that_are_allowed(allowed):
    row, order = pairs((12.0, 9.0), 10.0, allowed, made=0)
    assert row.state == Decided(INCONCLUSIVE)
    assert len(order) == 2 * allowed


def is_left_to_pairs(comparison: StoredComparison, first) -> bool:
    """Return whether an A/B is launched after a first launch."""
    return next(with_both(comparison, first, "main"), None) is Side.CANDIDATE


@pytest.mark.parametrize(("most", "expected"), [(5, True), (1, False)])
def test_metric_that_no_launch_could_decide_is_left_to_an_a_b(most, expected):
    few = baseline_of(*launches_near(10.0, 3, deviation=0.05, seed=2))
    assert is_left_to_pairs(stored_comparison(most, few, TIMES), make_facts()) is expected


def test_metric_of_a_workload_that_the_baseline_leaves_out_is_decided_by_an_a_b():
    good, worse = (make_facts(metrics={"accuracy": value}) for value in (0.9, 0.5))
    baseline = make_baseline(launches=stored(good), left_out={"accuracy": "too noisy"})
    comparison = stored_comparison(3, baseline, parse_tolerances({"accuracy": "-5%"}, "here"))
    verdicts = settle(with_both(comparison, worse, "main"), lambda side: worse if side is Side.CANDIDATE else good)
    assert verdicts["accuracy"].outcome is REGRESSION


@pytest.mark.parametrize(("marked", "expected"), [(TIMES, True), ({}, False)])
def test_marked_time_of_another_machine_is_left_to_an_a_b(marked, expected):
    baseline = baseline_of(on_cpu(block="f" * 12))
    assert is_left_to_pairs(stored_comparison(5, baseline, marked), on_cpu()) is expected


def test_verdicts_of_an_a_b_take_the_places_of_the_stored_ones():
    open_row = make_verdict(Open())
    stays = make_verdict(PASS, metric="weight_hash")
    reference = VerdictReference(ReferenceKind.AB, "main")
    paired = make_verdict(REGRESSION, detail="why", reference=reference)
    verdicts = joined(Verdicts("case", (open_row, stays), (Note("a"),)), Verdicts("A/B", (paired,), (Note("b"),)))
    assert [row.outcome for row in verdicts.rows] == [REGRESSION, PASS]
    assert (verdicts.case, verdicts.notes) == ("case", (Note("b"),))
    assert "A/B with main" in verdicts["step_time_p50"].reason


FILE = Path("/repo/baselines/nvidia-h200-x2-nccl/x.json")
CONFIG = {"steps": 20, "dtype": "float32"}


def text_of(
    baseline: Baseline | None,
    config: dict[str, object] = CONFIG,
    test: str = "tests/test_a.py::test_x",
    marked: dict[str, Tolerance] | None = None,
    num_launches: int = 1,
    commit: tuple[str, ...] = (),
    **facts: object,
) -> list[str]:
    launches = [make_facts(**facts)] * num_launches
    marked = marked or {"peak_memory_bytes": Tolerance(0.02)}
    comparison = StoredComparison("tests/test_a.py::test_x::fsdp", config, baseline, marked, num_launches, str(FILE))
    verdicts = comparison.judge(launches)
    failing = verdicts.failing({MISSING})
    case = "tests/test_a.py::test_x::fsdp"
    ended = compared(
        case, *launches, platform="cpu-x1-gloo", workload="toy", baseline=str(FILE), notes=(Note("a note"),)
    )
    again = Repeated(test, ["--aorta-gpus=2"], commit, has_later=bool(commit), is_stored=baseline is not None)
    return comparison_text(ended.replace(suspect=1), failing, again).splitlines()


def test_test_id_with_brackets_can_be_pasted_into_a_shell():
    lines = text_of(None, metrics={"peak_memory_bytes": 1.0}, test="tests/test_a.py::test_x[a b]")
    assert lines[-1].startswith("  accept    pytest 'tests/test_a.py::test_x[a b]' ")


SLOW = dict.fromkeys(("mean", "p50", "p99", "tail5"), 40.0)


@each_of("commit", {"no commit": (), "a commit": ("a1b2c3d", "4 days ago")})
def test_slower_step_says_what_confirms_finds_and_accepts_it(commit):
    first, measured, *facts = text_of(
        make_baseline(), marked={"step_time_p50": Tolerance(0.05)}, num_launches=3, commit=commit, step_time_ms=SLOW
    )
    assert first.endswith("(10 -> 40 ms, limit 5%), suspect rank 1")
    assert measured.startswith("  measured  toy on cpu-x1-gloo, 20 steps, 3 launches, 95% +")
    test = "tests/test_a.py::test_x --aorta-gpus=2"
    shown = dict(fact.split(maxsplit=1) for fact in facts)
    assert shown["baseline"].endswith(str(FILE))
    advised = {"cause": "a note", "confirm": f"pytest {test} --aorta-ab={commit[0] if commit else 'HEAD'}"}
    advised |= {"find": f"aorta bisect a1b2c3d HEAD -- {test}"} if commit else {}
    assert {name: shown[name] for name in ("cause", "confirm", "find") if name in shown} == advised
    assert f"pytest {test} --update-baselines --aorta-record=replace" in shown["accept"]


def test_other_number_of_steps_is_one_line_also_for_a_metric_that_needs_more():
    long = make_facts(num_steps=100)
    lines = text_of(baseline_of(long), num_steps=99, metrics={"peak_memory_bytes": 1.0})
    assert "recorded with 100 measured steps, the test has 99" in lines[0]
    assert lines[1].startswith("  measured")


def test_metric_that_the_launch_lost_is_named_beside_a_missing_baseline():
    lines = text_of(None)
    assert "the launch has no peak_memory_bytes" in lines[0]
    assert "no baseline" in lines[1]
    assert lines[-1].endswith(" --update-baselines")


def test_largest_change_comes_first_and_all_that_is_not_recorded_in_one_line():
    rows = [
        *(make_verdict(UNRECORDED, metric=name, detail="no baseline") for name in ("a", "b")),
        *(make_verdict(REGRESSION, metric=name, delta=delta) for name, delta in (("c", 0.1), ("d", -0.5))),
    ]
    first, second, missing, measured, *_ = comparison_text(compared("case", make_facts()), rows).splitlines()
    assert (first.split()[1], second.split()[1]) == ("d", "c")
    assert "no baseline" in missing
    assert measured.startswith("  measured")


def test_cause_that_several_metrics_share_is_said_once():
    names = {"scheduled_step_ms": "why; at a", "overlap_ratio": "hot; why; at a; slow", "flops": "mm"}
    rows = [make_verdict(REGRESSION, metric=name, detail=detail) for name, detail in names.items()]
    lines = comparison_text(compared("case", make_facts()), rows).splitlines()
    causes = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  cause")]
    assert causes == ["scheduled_step_ms, overlap_ratio: why; at a", "overlap_ratio: hot; slow", "flops: mm"]


def test_cost_that_went_down_stands_beside_a_regression_as_it_may_be_its_cause():
    fewer = make_verdict(CHANGED, metric="collectives", baseline=5, value=4, delta=-0.2, detail="gone")
    failing = make_verdict(REGRESSION, metric="weight_hash")
    text = comparison_text(compared("case", make_facts(), rows=(fewer, failing)), [failing])
    assert re.search(r"  changed +collectives .*\(5 -> 4\): gone", text)


@pytest.mark.parametrize(
    ("version", "state", "command"),
    [
        ("main", Open(), "confirm   pytest a::b --aorta-ab=main --aorta-max-launches=12"),
        ("", Open(), "confirm   pytest a::b --aorta-max-launches=12"),
        ("main", NotApplicable(Reason.OLD_CPU_TIMES), ""),
        ("main", NotApplicable(Reason.UNMARKED_CPU_TIMES), "then pytest a::b --aorta-ab=main"),
        ("", NotApplicable(Reason.OLD_CPU_TIMES), "confirm   pytest a::b --aorta-ab=HEAD"),
    ],
)
def test_commands_are_those_of_a_run_with_or_without_another_version(version, state, command):
    row = make_verdict(state, metric="step_time_p50")
    ended = compared("case", make_facts(), rows=(row,), baseline="x.json")
    text = comparison_text(ended, [row], Repeated("a::b", version=version))
    assert command in text
    assert text.count("pytest ") == bool(command)


def test_command_names_the_devices_that_the_run_could_see(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert "CUDA_VISIBLE_DEVICES=2,3" in Repeated("a::b").command()


@pytest.mark.parametrize(
    ("version", "ends"),
    [
        ("main", "main HEAD"),
        ("with:torch==2.12.1", f"with:torch==2.12.1 python:{sys.executable} --over=packages"),
        ("main with:torch==2.12.1", None),
        ("env:NCCL_ALGO=Ring", None),
        ("HEAD", None),
    ],
)
def test_failed_ab_tells_how_the_sides_differ_and_what_finds_the_change(version, ends):
    there = make_facts(weight_hashes={"4": "a" * 16})
    there = there.replace(provenance=there.provenance.replace(side=f"{version}: torch 2.12.1 -> 2.13.0"))
    here = make_facts(weight_hashes={"4": "b" * 16})
    pairs = PairedComparison("case", parse_tolerances({"weight_hash": "exact"}, "x"), ["weight_hash"], 1, version)
    failing = pairs.judge([here], [there]).failing({MISSING})
    sides = [compared("case", facts, side=side) for facts, side in ((here, Side.CANDIDATE), (there, Side.REFERENCE))]
    launches = tuple(launch for side in sides for launch in side.launches)
    ended = sides[0].replace(launches=launches, workload="toy", platform="cpu-x1-gloo", baseline=str(FILE))
    lines = comparison_text(ended, failing, Repeated("test_a.py::test_x", version=version)).splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert shown["baseline"].startswith(version)
    assert shown["differs"].endswith("2.12.1 -> 2.13.0")
    assert shown.get("find") == (f"aorta bisect {ends} -- test_a.py::test_x" if ends else None)
