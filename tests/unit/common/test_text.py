import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.text import did_you_mean, is_harness, is_library, visible, without_harness


def test_name_with_one_wrong_character_is_suggested_before_longer_names():
    hint = did_you_mean(["step"], ["step_ms", "steps", "num_steps"])
    assert re.findall(r"'\w+'", hint) == ["'steps'"]


@given(st.lists(st.text(max_size=20), max_size=5), st.lists(st.text(max_size=20), max_size=5))
def test_only_known_names_are_suggested(unknown, known):
    hint = did_you_mean(unknown, known)
    assert hint == "" or any(repr(name) in hint for name in known)


@given(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.characters(categories=["Cc"]))))
def test_visible_text_has_no_control_characters_and_is_else_the_same(text):
    shown = visible(text)
    assert {char for char in shown if unicodedata.category(char) == "Cc"} <= {"\n", "\t"}
    parts = [
        rf"\x{ord(char):02x}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text
    ]
    assert shown == "".join(parts)
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("file", "harness", "library"),
    [
        ("/site/pytest_aorta/launch/process/rank.py", True, True),
        ("/site/pytest_aorta/worker/lifecycle.py", True, True),
        ("<frozen runpy>", True, True),
        ("<frozen importlib._bootstrap_external>", True, True),
        ("/usr/lib/python3.11/importlib/__init__.py", True, True),
        ("/site-packages/torch/distributed/run.py", True, True),
        ("/site-packages/torch/distributed/elastic/agent/server/api.py", True, True),
        ("/site-packages/torch/distributed/launcher/api.py", True, True),
        ("/site-packages/torch/distributed/distributed_c10d.py", False, True),
        ("/site-packages/aorta_workloads/fsdp/__init__.py", False, True),
        ("/usr/lib/python3.11/threading.py", False, True),
        ("<string>", False, True),
        # As inductor names a file after a hash of its source.
        (f"/tmp/torchinductor_me/ab/c{'ab2' * 17}.py", False, True),
        (f"/home/me/c{'ab1' * 17}.py", False, False),
        ("/home/me/pytest_aorta/train.py", False, False),
        ("/home/me/runpy.py", False, False),
        ("train.py", False, False),
    ],
)
def test_files_of_the_harness_and_of_libraries_are_told_from_the_users_own(file, harness, library):
    assert (is_harness(file), is_library(file)) == (harness, library)


def test_frames_of_the_harness_are_cut_out_of_a_text():
    begin = "loading\nTraceback (most recent call last):\n"
    agent = '  File "/p/torch/distributed/elastic/agent/api.py", line 3, in run\n    return self._invoke()\n    ^^^\n'
    own = '  File "/home/me/train.py", line 9, in main\n    load()\n'
    frozen = '  File "<frozen runpy>", line 88, in _run_code\n'
    assert without_harness(f"{begin}{agent}{own}{frozen}ValueError: boom") == f"{begin}{own}ValueError: boom"
