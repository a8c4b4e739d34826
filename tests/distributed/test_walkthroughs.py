"""Pages followed from top to bottom: files are written, commands run, and their output equals the page's.

A file is a fenced block below a line that ends with its name in backticks and a colon. A command is a line with ``$``
in a ``console`` block; the lines below it are its whole output, with other times and hashes, and with anything in the
place of ``...``. A ``sh`` block contains commands that are not run, without output.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.docs.transcripts import difference

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w./-]+)`:\s*$")
FAILED = 1


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``file`` is the name in the line before the block."""

    language: str
    text: str
    file: str | None


def blocks(page: Path) -> Iterator[Block]:
    text, end = page.read_text(encoding="utf-8"), 0
    for fence in FENCE.finditer(text):
        named = FILE.search(text[end : fence.start()])
        yield Block(fence[1], fence[2], named[1] if named else None)
        end = fence.end()


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    who = {
        f"GIT_{role}_{what}": "test@example.invalid" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    beside = str(Path(sys.executable).parent)
    environment = os.environ | who | {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
    # Run pytest with this interpreter, which may have no `pytest` script beside it.
    command = re.sub(r"^pytest\b", f"{sys.executable} -m pytest -p no:cacheprovider", command)
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def follow(console: str, folder: Path) -> None:
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        done = run(command, folder)
        problem = difference(shown, done.stdout)
        assert problem is None, f"$ {command}\n{problem}\n{done.stdout}{done.stderr}"
        is_red = any(line.startswith("E  ") for line in shown.splitlines())
        assert done.returncode == (FAILED if is_red else 0), f"$ {command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", [pytest.param("tutorial.md", marks=pytest.mark.extended), "add-a-workload.md"])
def test_page_works_as_written(page, tmp_path):
    followed = 0
    for block in blocks(DOCS / page):
        if block.language == "console":
            follow(block.text, tmp_path)
            followed += 1
        elif block.language == "sh":
            assert all(line.startswith("$ ") for line in block.text.splitlines()), (
                f"output is not checked:\n{block.text}"
            )
        else:
            assert block.file, f"no file name before:\n{block.text}"
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    assert followed >= 2
