"""Adapters, which turn a script's log into a rank's facts."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import ResultError
from pytest_aorta.plan.adapter import (
    TORCHTITAN_PATTERN,
    Adapter,
    AdapterError,
    Record,
    adapted,
    log_records,
    make_adapter,
    read_records,
)
from pytest_aorta.plan.workloads import CommandLine, read_workload
from pytest_aorta.result.facts import launch_facts
from pytest_aorta.result.reading import collect_result
from tests.unit.builders import ENDED_WELL, make_plan, rank_values, replace, write_ranks

PATTERN = r"step (?P<step>\d+): loss (?P<loss>\S+) in (?P<step_time_ms>[\d.]+) ms"
LOGGED = Adapter("log", PATTERN)
BY_TOKENS = Adapter("log", "(?P<step>)(?P<tokens_per_s>)", tokens_per_step=(2048,))
BY_MOMENTS = Adapter("log", "(?P<step>)(?P<timestamp>)", warmup=1)
TITAN_LINE = (
    "[titan] 2026-11-21 17:04:{second:06.3f} - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  8.03245  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.4567  \x1b[36mmemory:  1.50GiB(1.08%)  \x1b[34mtps: {tps:,}  "
    "\x1b[36mtflops: 1,012.34  \x1b[35mmfu: 10.20%\x1b[39m"
)


def titan_log(tps=(100, 2048, 4096), tokens=2048) -> str:
    lines = ["[titan] 2026-11-21 17:04:00,000 - root - INFO - Training starts at step 1"]
    second = 1.0
    for step, rate in enumerate(tps, 1):
        second += tokens / rate if step > 1 else 0
        lines.append(TITAN_LINE.format(second=second, step=step, tps=rate).replace(".", ",", 1))
    lines.append(lines[-1].replace("step:", "validate step:"))
    return "\n".join(lines)


def records(*values: dict, first: int = 1, stride: int = 1) -> list[Record]:
    return [
        Record(first + stride * number, entry.pop("moment", None), entry)
        for number, entry in enumerate(dict(value) for value in values)
    ]


def megatron_log() -> str:
    """Return lines in the form that the last rank of Megatron-LM printed in April 2025, one for each step."""
    line = (
        " [2025-04-13 23:41:{step:02}] iteration {step:8d}/      12 | consumed samples: {samples:12d} | elapsed "
        "time per iteration (ms): {ms} | learning rate: 9.998165E-05 | global batch size:    16 | lm loss: "
        "1.0{step:02}69E+01 | loss scale: 1.0 | grad norm: 2.3{step:02} |{zeros} "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    zeros = {0: "", 1: " num zeros: 881.0 |"}
    steps = [line.format(step=step, samples=16 * step, ms=800.5 + step, zeros=zeros[step % 2]) for step in range(1, 13)]
    validation = " validation loss at iteration 12 | lm loss value: 8.889540E+00 | lm loss PPL: 7.255679E+03 | "
    return "\n".join(["training ...", *steps, "(min, max) time across ranks (ms):", validation])


def test_recipe_for_megatron_reads_the_log_of_the_last_rank(tmp_path):
    [recipe] = [
        block
        for block in re.findall(r"```yaml\n(.*?)```", Path("docs/frameworks.md").read_text(), re.DOTALL)
        if "pretrain_gpt" in block
    ]
    folder = tmp_path / "workloads" / "megatron"
    folder.mkdir(parents=True)
    (tmp_path / "pretrain_gpt.py").touch()
    (folder / "default.yaml").write_text(recipe)
    adapter = make_adapter(read_workload("megatron", folder, None).adapter, {"steps": 12})
    assert [adapter.is_read(rank, 4) for rank in range(4)] == [False, False, False, True]
    found = adapted(adapter, log_records(adapter.pattern, megatron_log(), "x"), "x")
    assert found.step_times_ms == [800.5 + step for step in range(6, 13)]
    assert (found.loss[0], found.grad_norm[-1], found.metrics) == (10.0669, 2.312, {})


def test_match_that_is_no_number_is_reported():
    with pytest.raises(AdapterError, match=r"a line matches, but a value is not a number: .*'abc'"):
        log_records(PATTERN, "step 1: loss abc in 1 ms", "x")


@pytest.mark.parametrize(("adapter", "read", "times", "clock"), [
    (LOGGED, records({"step_time_ms": 9.0}), [9.0], "logged step_time_ms"),
    (Adapter("log", "(?P<step>)(?P<step_time_s>)"), records({"step_time_s": 0.5}), [500.0], "logged step_time_s"),
    (BY_TOKENS, records({"tokens_per_s": 4096.0}, {"tokens_per_s": 1024.0}), [500.0, 2000.0], "logged tokens_per_s"),
    (BY_MOMENTS, records({"moment": 1.0}, {"moment": 1.5}, {"moment": 2.25}), [500.0, 750.0], "moments of logging"),
    (replace(LOGGED, every=10), records({"step_time_ms": 3.0}, {"step_time_ms": 4.0}, first=10, stride=10),
     [3.0, 4.0], "logged step_time_ms"),
])  # fmt: skip
def test_step_times_come_from_the_best_quantity_that_is_logged(adapter, read, times, clock):
    found = adapted(adapter, read, "x")
    assert (found.step_times_ms, found.environment["step_clock"]) == (times, clock)
    assert (found.loss, found.grad_norm) == ([], [])
    assert found.environment.get("steps_per_step_time", 1) == adapter.every


def test_steps_before_the_measured_ones_are_left_out():
    read = records(*({"step_time_ms": ms, "loss": ms} for ms in (9.0, 1.0, 2.0)))
    found = adapted(replace(LOGGED, warmup=1), read, "x")
    assert (found.step_times_ms, found.loss) == ([1.0, 2.0], [1.0, 2.0])


@pytest.mark.parametrize(("gib", "peak"), [((2, 1), {"peak_memory_bytes": 2.0 * 2**30}), ((-1.0, -0.0), {})])
def test_metrics_are_means_and_peaks_and_a_peak_that_the_script_can_not_tell_is_absent(gib, peak):
    rates = (10.0, 30.0)
    rows = [
        {"step_time_ms": 1.0, "tokens_per_s": rate, "peak_memory_gib": value}
        for rate, value in zip(rates, gib, strict=True)
    ]
    assert adapted(LOGGED, records(*rows), "x").metrics == {"tokens_per_s": 20.0} | peak


STEP = {"step_time_ms": 3.0}


@pytest.mark.parametrize(
    ("adapter", "values", "steps", "said"),
    [
        (LOGGED, [STEP, STEP], {"first": 10, "stride": 10}, "step 20 follows step 10, and every 1 is expected; have "),
        (LOGGED, [STEP, STEP], {"first": 10, "stride": 10}, "or say so with `every: 10`"),
        (LOGGED, [STEP, STEP], {"stride": 0}, "step 1 follows step 1"),
        (replace(LOGGED, last_step=5), [STEP, STEP], {}, "the last step logged is 2, expected is 5"),
        (replace(LOGGED, warmup=2), [STEP, STEP], {}, "2 steps are logged and 2 of them are warm-up"),
        (LOGGED, [STEP | {"loss": 1.0}, STEP], {}, "step 2 has no loss"),
        (LOGGED, [STEP | {"loss": math.nan}], {}, "loss of step 1 is nan"),
        (LOGGED, [STEP | {"loss": math.inf}], {}, "loss of step 1 is inf"),
        (BY_MOMENTS, [{"moment": 1.0}, {"moment": 0.5}], {}, "times of logging are missing or go backwards"),
        (BY_MOMENTS, [{"moment": 1.0}, {"moment": None}], {}, "times of logging are missing or go backwards"),
        (BY_TOKENS, [{"tokens_per_s": 0.0}], {}, "tokens_per_s is missing or 0"),
    ],
)
def test_records_that_give_no_measurement_are_refused_with_the_reason(adapter, values, steps, said):
    with pytest.raises(AdapterError) as caught:
        adapted(adapter, records(*values, **steps), "the log")
    assert str(caught.value).startswith("the log: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({}, "kind log needs a pattern"),
        ({"pattern": "(?P<step>"}, "is not a regular expression"),
        ({"pattern": "(?P<loss>)"}, "it has to have a group (?P<step>...)"),
        ({"pattern": "(?P<step>)"}, "step times are missing: none of "),
        ({"pattern": "(?P<step>)(?P<tokens_per_s>)"}, "tokens_per_s together with the key tokens_per_step"),
        ({"pattern": "(?P<step>)(?P<timestamp>)"}, "warmup is 0; step times are differences of logging times"),
        ({"pattern": PATTERN, "every": "0"}, '$.every: got "0"; Expected `int` >= 1'),
        ({"pattern": PATTERN, "warmup": -5}, "$.warmup: got -5; Expected `int` >= 0"),
        ({"pattern": PATTERN, "warmup": "many"}, '$.warmup: got "many"; Expected `int`'),
        ({"pattern": PATTERN, "tokens_per_step": [-1]}, "$.tokens_per_step[0]: got -1; Expected `int` >= 0"),
        ({"pattern": PATTERN.replace("loss>", "Loss>")}, "names ['Loss']: allowed are lower case letters"),
        ({"kind": "tensorboard"}, '$.kind: got "tensorboard"'),
    ],
)
def test_adapter_that_can_tell_nothing_is_refused_before_a_launch(block, said):
    with pytest.raises(AdapterError) as caught:
        make_adapter({"kind": "log"} | block, {})
    assert said in str(caught.value)


def test_torchtitan_lines_are_read_with_colours_and_validation_is_left_out():
    found = log_records(TORCHTITAN_PATTERN, titan_log(), "x")
    assert [record.step for record in found] == [1, 2, 3]
    assert found[0].values == {
        "loss": 8.03245,
        "grad_norm": 1.4567,
        "peak_memory_reserved_gib": 1.5,
        "tokens_per_s": 100.0,
        "model_tflops": 1012.34,
    }
    assert log_records(TORCHTITAN_PATTERN, titan_log().replace("1.50GiB(1.08%)", "-0.00GiB(-0.00%)"), "x")
    assert found[1].moment_s - found[0].moment_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("extra", "clock"), [({}, "moments of logging"), ({"tokens_per_step": ["{batch}", 1024]}, "logged tokens_per_s")]
)
def test_torchtitan_log_gives_step_times(tmp_path, extra, clock):
    log = tmp_path / "output.log"
    log.write_text(titan_log())
    adapter = make_adapter(
        {"kind": "torchtitan", "warmup": 1, "last_step": "{steps}"} | extra, {"batch": 2, "steps": 3}
    )
    found = adapted(adapter, *read_records(adapter, log))
    assert found.environment["step_clock"] == clock
    assert found.step_times_ms == pytest.approx([1000.0, 500.0])
    assert found.metrics["peak_memory_reserved_bytes"] == 1.5 * 2**30


def test_log_of_a_file_of_its_own_that_is_absent_is_reported(tmp_path):
    adapter = replace(LOGGED, file=str(tmp_path / "train.log"))
    with pytest.raises(AdapterError, match=r"train\.log: can't be read: No such file"):
        read_records(adapter, tmp_path)


@given(
    st.lists(st.floats(0.001, 1e6), min_size=1, max_size=20),
    st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs", "Cc"])), max_size=5),
)
def test_every_logged_step_time_comes_back_whatever_else_is_in_the_log(times, noise):
    lines = [f"step {step}: loss 1 in {ms:.6f} ms" for step, ms in enumerate(times, 1)]
    text = "\n".join([*(f"# {line}" for line in noise), *lines])
    found = adapted(LOGGED, log_records(PATTERN, text, "x"), "x")
    assert found.step_times_ms == pytest.approx(times, abs=1e-6)


LOGGED_YAML = f"""
description: a script that logs
command: {{module: train}}
adapter: {{kind: log, pattern: '{PATTERN}', ranks: RANKS}}
config: {{steps: {{type: integer, default: 3, description: steps}}}}
"""


def logged_plan(tmp_path: Path, ranks: str):
    folder = tmp_path / "logged"
    folder.mkdir(exist_ok=True)
    (folder / "default.yaml").write_text(LOGGED_YAML.replace("RANKS", ranks))
    return make_plan(tmp_path, name="logged", spec=read_workload("logged", folder, None), script=None)


def test_result_has_the_first_rank_alone_where_no_other_logs_and_lacks_no_rank_where_all_do(tmp_path):
    write_ranks(tmp_path, rank_values(), {"measured": False})
    result = collect_result(logged_plan(tmp_path, "first"), ENDED_WELL)
    assert (result.world_size, result.rank_step_times_ms) == (2, [[1.0, 2.0, 3.0]])
    assert result.rank_metrics == {"tokens_per_s": [100.0]}
    assert launch_facts(result).step_time_ms["p50"] == 2.0
    with pytest.raises(ResultError, match=r"result invalid: .*1/result\.json"):
        collect_result(logged_plan(tmp_path, "all"), ENDED_WELL)


def test_plan_of_a_command_tells_ranks_what_to_run_and_to_read(tmp_path):
    plan = logged_plan(tmp_path, "all")
    assert plan.program() == CommandLine("train", (), {})
    assert [plan.adapter(rank).pattern for rank in (0, 1)] == [PATTERN, PATTERN]
