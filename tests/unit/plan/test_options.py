import os
import shlex
from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.options import (
    FAIL_ON_NOTHING,
    OPTIONS,
    FailOn,
    Recording,
    make_options,
)

BY_NAME = {option.name: option for option in OPTIONS}
VALUES = {
    "gpus": st.integers(0, 10**6),
    "timeout": st.floats(1e-6, 604800),
    "fail_on": st.frozensets(st.sampled_from(FailOn)),
    "ab": st.text().filter(lambda text: text.strip() and not text.startswith("-") and ":" not in text).map(shlex.quote),
    "launcher": st.sampled_from(BY_NAME["launcher"].choices),
    "profiler": st.just("torch"),
}


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_word_of_a_value_gives_the_value_again(name, data):
    value = data.draw(VALUES[name])
    flag, _, text = BY_NAME[name].word(value).partition("=")
    assert (flag, BY_NAME[name].type(text)) == (f"--aorta-{name.replace('_', '-')}", value)


def test_word_of_a_switch_is_its_flag_and_of_no_verdict_is_none():
    words = [BY_NAME[name].word(value) for name, value in (("no_locate", True), ("fail_on", frozenset()))]
    assert words == ["--aorta-no-locate", f"--aorta-fail-on={FAIL_ON_NOTHING}"]


INTEGER, SECONDS = "an integer of 0 or more", "a number of seconds above 0 and up to 604800 (a week)"
FAIL_ON = "a comma-separated list of inconclusive, marked-inconclusive, not-applicable, improved, missing, or none"
SIDE = "words of a side, quoted as for a shell: a branch, tag or commit, python:PATH of an"
RECORD = "replace, noisy:REASON, or replace,noisy:REASON"


@pytest.mark.parametrize(
    ("name", "texts", "allowed"),
    [
        ("gpus", ["two", "-1", "1.5", "²", "9" * 5000], INTEGER),
        ("timeout", ["0", "-5", "inf", "nan", "5s", ""], SECONDS),
        ("fail_on", ["warn", "missing,", "none,missing", "regression"], FAIL_ON),
        ("baselines", ["", " "], "a folder"),
        ("markdown", ["findings.txt", "out/.md", "md", ""], "a file whose name ends in .md"),
        ("max_launches", ["1", "13"], "an integer from 2 to 12"),
        ("launches", ["x", "0"], "an integer from 1 to 50"),
        ("record", ["", "noisy:", "noisy: ", "replaced", "replace,", "noisy"], RECORD),
        ("ab", ["-f", " ", "python:", "'", "main v1", "lock:a lock:b", "with:-r", "env:NCCL_ALGO", "env:=1"], SIDE),
    ],
)
def test_text_that_is_not_allowed_is_refused_with_what_is(name, texts, allowed):
    for text in texts:
        with pytest.raises(ArgumentTypeError) as caught:
            BY_NAME[name].type(text)
        assert str(caught.value).startswith("got ")
        assert f"allowed is {allowed}" in str(caught.value) or f"one of {allowed}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "recording"),
    [
        ("replace", Recording(replaces=True)),
        ("noisy: shared, slow machine", Recording(reason="shared, slow machine")),
        ("replace,noisy:replace it", Recording(replaces=True, reason="replace it")),
    ],
)
def test_recording_replaces_or_takes_noisy_launches_or_both(text, recording):
    assert BY_NAME["record"].type(text) == recording


def test_baselines_that_can_not_be_written_are_refused_before_they_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    values = {"baselines": BY_NAME["baselines"].type("stored/here")}
    make_options(values, tmp_path)
    with pytest.raises(SpecError, match=rf"^--aorta-baselines=.*stored/here: {tmp_path} can't be written"):
        make_options(values | {"update_baselines": True}, tmp_path)
    (tmp_path / "stored").mkdir()
    make_options(values | {"update_baselines": True}, tmp_path)
