from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.options import FAIL_ON_NOTHING, OPTIONS, FailOn, make_options

BY_NAME = {option.name: option for option in OPTIONS}
VALUES = {
    "gpus": st.integers(0, 10**6),
    "timeout": st.floats(1e-6, 604800),
    "fail_on": st.frozensets(st.sampled_from(FailOn)),
    "ab": st.text().filter(lambda text: text.strip() and not text.startswith("-") and text != "python:"),
    "device": st.sampled_from(BY_NAME["device"].choices),
}


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_word_of_a_value_gives_the_value_again(name, data):
    value = data.draw(VALUES[name])
    flag, _, text = BY_NAME[name].word(value).partition("=")
    assert (flag, BY_NAME[name].parse(text, "")) == (f"--aorta-{name.replace('_', '-')}", value)


def test_word_of_a_switch_is_its_flag_and_of_no_verdict_is_none():
    assert BY_NAME["require_gpus"].word(True) == "--aorta-require-gpus"
    assert BY_NAME["fail_on"].word(frozenset()) == f"--aorta-fail-on={FAIL_ON_NOTHING}"


def test_options_that_write_are_those_of_files_and_of_recording():
    assert {option.name for option in OPTIONS if option.writes} == {
        "update_baselines", "reset_baselines", "force_baseline", "launches", "results", "report", "markdown", "history",
        "progress",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["a.txt", "/.md", "md", ""])
def test_markdown_is_a_file_that_is_named_so(text):
    with pytest.raises(ArgumentTypeError, match=r"a file whose name ends in \.md"):
        BY_NAME["markdown"].type(text)


def test_baselines_that_can_not_be_written_are_refused_before_they_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(run.os, "access", lambda path, mode: path != tmp_path)
    values = {option.name: option.default for option in OPTIONS} | {"baselines": "stored/here"}
    make_options(values, tmp_path)
    expected = rf"--aorta-baselines=stored/here: {tmp_path} can't be written, and --update-baselines writes there"
    with pytest.raises(SpecError, match=expected):
        make_options(values | {"update_baselines": True}, tmp_path)
    (tmp_path / "stored").mkdir()
    make_options(values | {"update_baselines": True}, tmp_path)
