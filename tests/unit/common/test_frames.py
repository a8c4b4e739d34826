from __future__ import annotations

import pytest

from pytest_aorta.common.text import is_harness, is_library, without_harness


@pytest.mark.parametrize(
    "file",
    [
        "/site/pytest_aorta/launch/process/rank.py",
        "/site/pytest_aorta/worker/lifecycle.py",
        "<frozen runpy>",
        "<frozen importlib._bootstrap_external>",
        "/usr/lib/python3.11/importlib/__init__.py",
        "/site-packages/torch/distributed/run.py",
        "/site-packages/torch/distributed/elastic/agent/server/api.py",
        "/site-packages/torch/distributed/launcher/api.py",
    ],
)
def test_file_that_starts_ranks_is_of_the_harness(file):
    assert is_harness(file)
    assert is_library(file)


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/pytest_aorta/train.py",
        "/home/me/runpy.py",
        "/site-packages/torch/distributed/distributed_c10d.py",
        "/site-packages/aorta_workloads/fsdp/__init__.py",
        "<string>",
    ],
)
def test_file_of_a_script_or_library_is_not_of_the_harness(file):
    assert not is_harness(file)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/me/train.py", False),
        ("train.py", False),
        ("/usr/lib/python3.11/threading.py", True),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("<string>", True),
    ],
)
def test_library_is_told_from_the_users_own_code(file, expected):
    assert is_library(file) is expected


def test_frames_of_the_harness_are_cut_out_of_a_text():
    text = (
        "loading\n"
        "Traceback (most recent call last):\n"
        '  File "/p/torch/distributed/elastic/agent/api.py", line 3, in run\n'
        "    return self._invoke()\n"
        "           ^^^^^^^^^^^^^^\n"
        '  File "/home/me/train.py", line 9, in main\n'
        "    load()\n"
        '  File "<frozen runpy>", line 88, in _run_code\n'
        "ValueError: boom"
    )
    assert without_harness(text) == (
        "loading\n"
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 9, in main\n'
        "    load()\n"
        "ValueError: boom"
    )
