"""The prose lint: its findings, the senses that it allows, and the files that it reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("docs_prose", ROOT / "docs" / "prose.py")
assert _SPEC is not None
assert _SPEC.loader is not None
prose = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(prose)


@pytest.fixture
def check(tmp_path):
    """Return a function that writes a file and returns its findings as (line, word)."""

    def write_and_check(name: str, text: str) -> list[tuple[int, str]]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return [(finding.line, finding.word) for finding in prose.check(path, tmp_path)]

    return write_and_check


@pytest.mark.parametrize("word", ["Of", "What", "Where", "That", "Which", "Whether"])
@pytest.mark.parametrize("folder", ["pytest_aorta", "workloads", "benchmarks", "docs", "tests/unit"])
def test_a_docstring_may_not_open_with_these_words(check, folder, word):
    assert check(f"{folder}/a.py", f'def f():\n    """{word} a launch."""\n') == [(2, word)]


@pytest.mark.parametrize(
    "source",
    [
        '"""Whether a launch passed."""\n',
        'class A:\n    """Whether a launch passed."""\n',
        'async def f():\n    """Whether a launch passed."""\n',
        'class A:\n    def f(self):\n        """\n        Whether a launch passed."""\n',
    ],
)
def test_docstrings_of_modules_classes_and_methods_are_read(check, source):
    assert [word for _, word in check("pytest_aorta/a.py", source)] == ["Whether"]


@pytest.mark.parametrize(
    "text", ["Return whether it passed.", "Whatever fails, fails in the test.", "Offset in bytes."]
)
def test_other_openings_are_allowed(check, text):
    assert check("pytest_aorta/a.py", f'"""{text}"""\n') == []


@pytest.mark.parametrize(
    "text",
    [
        "launches of one sitting",
        "a new epoch",
        "the anchor moves",
        "the spread of launches",
        "values scatter",
        "a loud machine",
        "a quieter machine",
        "what it told",
        "ranks are told apart",
        "another weather",
        "outliers are drawn\nin",
        "a share of steps",
        "rank 1 is the slow one",
        "the rank that waits least",
        "a red test",
        "the run is green",
        "as the driver knows",
        "the centre",
        "the optimiser",
        "analysed",
    ],
)
def test_a_page_may_not_contain_these_words(check, text):
    assert [line for line, _ in check("docs/page.md", f"# Title\n\n{text}\n")] == [3]


@pytest.mark.parametrize(
    "text",
    [
        "reduce-scatter and `reduce_scatter`",
        "this scatter reads the buffer",
        "ranks spread evenly over two nodes",
        "for epoch in range(3):",
        "pip install --quiet",
        "two training epochs",
        "seconds since the epoch",
        "the key `epoch` of `launches[].epoch`",
        "[a page](read-a-red.md)",
        "tests share a host",
        "the tolerance of --aorta-new-epoch",
        "noise, otherwise, exercise, precise, raised",
    ],
)
def test_names_and_other_senses_are_allowed(check, text):
    assert check("docs/page.md", text) == []
    assert check("pytest_aorta/a.py", f"# {text}\n") == []


def test_docstrings_messages_and_comments_of_code_are_read_and_names_are_not(check):
    source = (
        '"""Return the noise\n\nof one sitting."""\n'
        "spread = row['spread']  # the spread of launches\n"
        "message = f'{spread:.3f} in {1 + 1} sittings'\n"
        "other = (\n    'of a '\n    'new epoch'\n)\n"
    )
    assert check("pytest_aorta/a.py", source) == [(3, "sitting"), (4, "spread"), (5, "sittings"), (8, "epoch")]
    assert check("benchmarks/a.py", source) == []


def test_descriptions_of_schemas_and_workloads_and_texts_of_the_report_are_read(check):
    assert check("pytest_aorta/a.json", '{"epoch": 1,\n"description": "the epoch of a launch"}') == [(2, "epoch")]
    assert check("pytest_aorta/a.js", 'const told = colour("muted"), x = ["a", "share of steps"];') == [(1, "share of")]
    assert check("workloads/a/default.yaml", "spread: 1  # its spread\nb: {description: the anchor}") == [
        (1, "spread"),
        (2, "anchor"),
    ]


def test_a_finding_names_file_line_word_and_the_word_to_write(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("A new\nepoch.\n", encoding="utf-8")
    assert prose.main([str(page)], tmp_path) == 1
    assert capsys.readouterr().out == "page.md:2: epoch: revision\n"


def test_pages_fragments_code_schemas_and_helpers_of_tests_are_among_the_files():
    names = {path.relative_to(ROOT).as_posix() for path in prose.files()}
    assert {
        "README.md",
        "pyproject.toml",
        "dev",
        "conftest.py",
        "examples/ci/Jenkinsfile",
        ".github/workflows/ci.yml",
        "docs/tutorial.md",
        "docs/prose.py",
        "changelog.d/README.md",
        "pytest_aorta/__init__.py",
        "pytest_aorta/common/schemas/baseline.schema.json",
        "pytest_aorta/report/page/page.js",
        "workloads/fsdp/default.yaml",
        "tests/browser/chromium.py",
    } <= names
    assert not any("/vendor/" in name for name in names)
