"""Rounds, budget and tables of the ablation of the Llama benchmark, with launches that only return numbers."""

import json

import pytest

from benchmarks.training.ablation import Ablation, Lever
from benchmarks.training.llama import LEVERS
from benchmarks.training.programs import Measured, Program
from pytest_aorta.common.errors import LaunchError

PLAIN, OTHER = Program("plain", "llama_fsdp2"), Program("other", "llama_simple_fsdp")
FAST, SAME, SLOW = (Lever(name, PLAIN, PLAIN.with_keys(name)) for name in ("fast", "same", "slow"))
LAST = Lever("last", OTHER, OTHER.with_keys("last"))
STEP_MS = {"plain": 100.0, "plain, fast": 80.0, "plain, same": 100.1, "plain, slow": 125.0, "other": 50.0}


class Launcher:
    """Launches that take 10 s each; a program whose step time is unknown fails."""

    def __init__(self):
        self.launched, self.now_s = [], 0.0

    def __call__(self, program):
        self.launched.append(program.name)
        self.now_s += 10
        if program.name not in STEP_MS:
            raise LaunchError(f"rank 0 of {program.name} failed\nwith a traceback")
        step_ms = STEP_MS[program.name] + 0.01 * len(self.launched)
        return Measured([step_ms], step_ms, 8192 / step_ms * 1e3, 41.5, 50.0, 12.5, 12.25)


@pytest.fixture
def launch():
    return Launcher()


@pytest.fixture
def table(launch, tmp_path):
    return Ablation(1000.0, tmp_path, "cuda", clock=lambda: launch.now_s)


def test_a_round_launches_the_reference_between_two_levers_and_the_next_one_in_reverse(table, launch):
    table.run_round((FAST, SLOW), launch, reverse=False)
    table.run_round((FAST, SLOW), launch, reverse=True)
    table.run_round((FAST,), launch, reverse=True)

    assert launch.launched == [
        *("plain, fast", "plain", "plain, slow"),
        *("plain, slow", "plain", "plain, fast"),
        *("plain", "plain, fast"),
    ]
    assert [len(effect.pairs) for effect in table.effects.values()] == [3, 2]


def test_no_launch_starts_that_is_not_expected_to_end_within_the_budget(table, launch):
    table.budget_s = 55.0
    for _ in range(3):
        table.run_round((FAST, SLOW), launch, reverse=False)
    # 30 of 55 s are gone, and three launches would take 30; two take 20.
    assert launch.now_s == 30
    table.run_round((SAME,), launch, reverse=False)

    assert launch.now_s == 50
    assert table.is_measured(SAME)
    table.run_round((LAST,), launch, reverse=False)
    assert not table.is_measured(LAST)
    assert f"- not measured: {LAST.name}, for which the budget had no time" in table.text()


def test_a_lever_that_failed_is_reported_once_and_not_launched_again(table, launch):
    assert table.run_round((LAST,), launch, reverse=False) == ["last: rank 0 of other, last failed\nwith a traceback"]
    assert table.run_round((LAST,), launch, reverse=False) == []

    assert launch.launched == ["other, last", "other"]
    assert "| last | other | 0 | failed: rank 0 of other, last failed |" in table.text()


def test_tables_name_what_is_faster_slower_and_not_shown(table, launch):
    for number in range(3):
        for levers in ((FAST, SAME), (SLOW,)):
            table.run_round(levers, launch, reverse=number % 2 == 1)
    table.left_out["absent"] = "which needs 2 GPUs"

    lines = table.text().splitlines()

    verdicts = {line.split(" | ")[0]: line.split(" | ")[4] for line in lines if line.startswith("| ")}
    assert verdicts["| fast"] == "faster"
    assert verdicts["| same"] == "no difference shown"
    assert verdicts["| slow"] == "slower"
    row = next(line for line in lines if line.startswith("| fast"))
    assert row.endswith("| 41.5 GiB to 41.5 GiB | 50.0 GiB to 50.0 GiB | 12.250; 12.250 |")
    assert "| plain | 6 | 100.1 ms | 81,8" in table.text()
    assert lines[-1] == "- left out: absent, which needs 2 GPUs"


def test_files_hold_every_launch_even_if_the_run_ends_in_the_middle(table, launch, tmp_path):
    table.run_round((FAST,), launch, reverse=False)
    written = json.loads((tmp_path / "llama.json").read_text())

    assert [program["program"] for program in written["programs"]] == ["plain, fast", "plain"]
    assert written["programs"][0]["measured"][0]["step_p50_ms"] == pytest.approx(80.01)
    low, high = written["levers"][0]["change"][1:]
    assert low < -0.19 < high
    assert (tmp_path / "llama.md").read_text() == table.text()


def test_levers_have_names_of_their_own_and_change_something():
    assert len({lever.name for lever in LEVERS}) == len(LEVERS)
    assert all(lever.program != lever.reference for lever in LEVERS)
    assert len({lever.program.name for lever in LEVERS if lever.min_gpus == 1}) >= 10
