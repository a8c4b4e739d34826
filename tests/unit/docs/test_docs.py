"""The pages: the reference names everything that a user can write, links have targets, examples compile."""

import argparse
import ast
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from pytest_aorta.cli import run as run_command
from pytest_aorta.cli.main import COMMANDS
from pytest_aorta.plan.options import OPTIONS
from pytest_aorta.plan.workloads import find_workload, workload_places
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Reason
from tests.unit.builders import schema

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]


def page_text(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_every_public_name_of_the_rank_side_is_on_the_page_of_the_api():
    tree = ast.parse((ROOT / "pytest_aorta/worker/__init__.py").read_text(encoding="utf-8"))
    public = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    names = re.findall(r":: pytest_aorta\.[\w.]*?\.(\w+)(?:\(\))?$", page_text("api"), re.M)
    assert set(ast.literal_eval(public)) - set(names) == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("reference", f"| {outcome.value} |") for outcome in Outcome),
        *(("read-a-failure", f"| {reason} |") for reason in Reason),
        *(("command", f"`aorta {command.name}") for command in COMMANDS),
    ],
)
def test_every_verdict_reason_and_subcommand_is_on_its_page(name, text):
    assert text in page_text(name)


def test_every_option_of_a_run_is_on_its_page():
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    flags = {action.option_strings[0] for action in parser._actions if action.option_strings} - {"-h"}
    assert {flag for flag in flags if f"`{flag}" not in page_text("command")} == set()


def test_numbers_that_pages_and_messages_suggest_for_options_are_allowed():
    options = {option.flag: option for option in OPTIONS}
    found = set()
    for source in (*PAGES, *(ROOT / "pytest_aorta").rglob("*.py")):
        found |= set(re.findall(r"(--aorta-[a-z-]+)=(\d+)\b", source.read_text(encoding="utf-8")))
    for flag, number in found:
        options[flag].read(number)
    assert len(found) > 5


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@functools.cache
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


@functools.cache
def config_keys() -> dict[str, set[str]]:
    """Map each workload to its config keys."""
    return {name: set(find_workload(name, []).properties) for name in workload_places([])}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python_and_yaml(page):
    for code in fenced(page, "python"):
        compile(code, page.name, "exec")
    for text in fenced(page, "yaml"):
        yaml.safe_load(text)


@pytest.mark.parametrize("name", ["options", "ini-keys", "markers", "metrics", "config-keys", "schemas"])
def test_generated_table_is_in_one_page_and_each_row_has_a_meaning(name):
    assert sum(f"<!-- generated: {name} -->" in page.read_text(encoding="utf-8") for page in PAGES) == 1
    rows = [line.split(" | ") for line in generator().TABLES[name]().splitlines() if line.startswith("| `")]
    assert len(rows) >= 2
    column = 1 if name == "metrics" else -1
    assert [row[0] for row in rows if not row[column].strip(" |")] == []


@pytest.mark.parametrize("module", ["edits", "causes", "schedules"])
def test_sentence_without_a_row_on_the_page_of_failures_is_an_error(module, monkeypatch):
    generator()
    failures = sys.modules["docs.failures"]
    heading, (_, *kept) = failures.MEANINGS[module]
    monkeypatch.setitem(failures.MEANINGS, module, (heading, tuple(kept)))
    with pytest.raises(ValueError, match=rf"verdict/{module}.py, .* has a row or a sentence alone"):
        failures.failures()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_tables_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == generator().current(text), "run: python docs/generate.py"


def test_schemas_of_structs_are_current():
    for name in generator().SCHEMAS:
        assert schema(f"{name}.schema.json") == json.loads(generator().current_schema(name)), "run docs/generate.py"


# An operator may have an underscore: its name is its schema's.
PRIVATE = re.compile(r"(torch|functorch)\b(?!\.ops\.)[\w.]*\._(?!_)")
ALIASES = {"dist": "torch.distributed", "nn": "torch.nn", "fx": "torch.fx"}


def reached(path):
    """Yield what a module imports or reaches from torch, by dotted name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            yield f"{ALIASES.get(root, root)}.{rest}"


@pytest.mark.parametrize(
    ("folder", "modules"),
    [
        ("workloads", {"common/torch_private.py", "passes/torch_private.py"}),
        ("pytest_aorta/worker", {"torch_private.py"}),
    ],
)
def test_private_interfaces_of_torch_are_in_modules_that_say_what_replaces_them(folder, modules):
    paths = (ROOT / folder).rglob("*.py")
    assert {str(path.relative_to(ROOT / folder)) for path in paths if any(map(PRIVATE.match, reached(path)))} == modules
