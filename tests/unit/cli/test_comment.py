"""The text of the comment on a pull request."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.cli.report.client import Client, checked_token
from pytest_aorta.cli.report.comment import Link, comment_body, cut, marker_of
from pytest_aorta.cli.report.comment import _key as parse_key
from pytest_aorta.common.errors import UsageError
from pytest_aorta.report.markdown import MAX_COMMENT_BYTES, markdown
from pytest_aorta.session.record import TestRecord

LINES = st.lists(
    st.sampled_from(
        ["<details><summary>a</summary>", "</details>", "<pre>", "</pre>", "```", "text", "x" * 200, "\N{BUG}", ""]
    ),
    max_size=60,
)


@given(LINES, st.integers(400, 3_000))
def test_cut_text_fits_begins_as_the_whole_and_says_what_is_missing(lines, limit):
    text = "\n".join(lines)
    shown = cut(text, limit)
    assert len(shown) <= max(limit, 1)
    if len(text.rstrip()) + 1 <= limit:
        assert shown == text.rstrip() + "\n"
    else:
        kept, whole = re.search(r"\*Cut: ([\d,]+) of ([\d,]+) characters", shown).groups()
        assert int(whole.replace(",", "")) == len(text.rstrip()) + 1
        assert shown.startswith(text[: int(kept.replace(",", ""))])


def test_elements_that_the_cut_leaves_open_are_closed():
    text = "<details><summary>a</summary>\n\n<pre>" + "x\n" * 2_000 + "</pre>\n\n</details>\n"
    shown = cut(text, 1_000)
    assert shown.count("<details>") == shown.count("</details>") == 1
    assert shown.index("</pre>") < shown.index("</details>") < shown.index("*Cut")


def test_fence_that_the_cut_leaves_open_is_closed():
    assert cut("```sh\n" + "x\n" * 2_000 + "```\n", 1_000).count("```") == 2


@given(st.integers(0, 40), st.integers(0, 20_000))
def test_markdown_of_a_run_is_never_cut(tests, length):
    failed = [TestRecord(f"a.py::{n}", outcome="failed", failure="<" * length) for n in range(tests)]
    text = markdown(failed, max_bytes=MAX_COMMENT_BYTES)
    body = comment_body(marker_of("k" * 64), text, [Link("HTML report", "https://ci.test/" + "x" * 2_000)], 65_536)
    assert len(body) <= 65_536
    assert "*Cut:" not in body


def test_marker_is_the_first_line_and_links_are_escaped_and_last():
    body = comment_body(marker_of("gpu"), "## title\n", [Link("a]b", "https://c/d"), Link("e", "https://f")], 1_000)
    assert body.splitlines() == [
        "<!-- pytest-aorta comment: gpu -->", "## title", "", "[a\\]b](<https://c/d>) \N{MIDDLE DOT} [e](<https://f>)",
    ]  # fmt: skip


@given(st.text(max_size=70))
def test_key_can_not_end_the_marker(text):
    try:
        marker = marker_of(parse_key(text))
    except ArgumentTypeError:
        return
    assert marker.count("--") == 2
    assert marker.isascii()
    assert "\n" not in marker


def test_token_is_in_neither_the_repr_of_a_client_nor_the_error_about_it():
    assert "secret" not in repr(Client("GitHub", "https://a", "secret", {"Authorization": "Bearer secret"}))
    with pytest.raises(UsageError) as raised:
        checked_token("two secrets", "GITHUB_TOKEN")
    assert "secret" not in str(raised.value)
