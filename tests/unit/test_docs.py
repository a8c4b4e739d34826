"""The pages: the reference names everything a user can write, links lead somewhere, examples are code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from pytest_aorta.decision import Outcome
from pytest_aorta.markers import MARKERS
from pytest_aorta.metrics import METRICS
from pytest_aorta.options import OPTIONS

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]
NAMES = [name for option in OPTIONS for name in (option.flag, option.ini)] + list(METRICS)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_and_metric_is_in_the_reference(name):
    assert f"`{name}" in REFERENCE


@pytest.mark.parametrize("marker", MARKERS)
def test_every_marker_is_in_the_reference(marker):
    assert f"`{marker}" in REFERENCE


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_verdict_is_in_the_reference(outcome):
    assert f"| {outcome.value} |" in REFERENCE


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = [part.split(")")[0].partition("#")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]]
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python_and_yaml(page):
    for code in fenced(page, "python"):
        compile(code, page.name, "exec")
    for text in fenced(page, "yaml"):
        yaml.safe_load(text)


@pytest.mark.parametrize("name", ["options", "markers", "metrics", "config-keys", "schemas"])
def test_generated_table_is_in_one_page(name):
    assert sum(f"<!-- generated: {name} -->" in page.read_text(encoding="utf-8") for page in PAGES) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_tables_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == generator().current(text), "run: python docs/generate.py"
