"""The text of the comment on a pull request."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError, Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.cli.report.client import ApiError, Client, checked_token
from pytest_aorta.cli.report.comment import Link, comment_body, cut, marker_of
from pytest_aorta.cli.report.comment import _key as parse_key
from pytest_aorta.cli.report.hosts import GitHub
from pytest_aorta.cli.report.pull_request import find_host
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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "body", "user", "login", "number", "pull_request", "issue", "workflow_run", "event"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(VALUES)
def test_answer_of_any_form_is_a_comment_or_an_error(document):
    host = GitHub(Client("GitHub", "https://a", "secret", {}), "o/r", 1)
    try:
        comment = host._comment(document)
    except ApiError:
        return
    assert type(comment.number) is int
    assert isinstance(comment.body, str)


@given(VALUES, st.sampled_from(["pull_request", "issue_comment", "workflow_run", "push", ""]))
def test_event_of_any_form_gives_a_number_or_wrong_usage(tmp_path_factory, document, name):
    file = tmp_path_factory.getbasetemp() / "event.json"
    file.write_text(json.dumps(document))
    variables = {"GITHUB_ACTIONS": "true", "GITHUB_TOKEN": "x", "GITHUB_REPOSITORY": "o/r"}
    event = {"GITHUB_EVENT_NAME": name, "GITHUB_EVENT_PATH": str(file)}
    arguments = Namespace(service=None, repository=None, number=None, wait=1.0)
    try:
        host = find_host(arguments, variables | event)
    except UsageError:
        return
    assert type(host.number) is int
    assert host.number > 0
