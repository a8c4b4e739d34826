"""The pages: the reference names everything that a user can write, links have targets, examples compile."""

import argparse
import ast
import functools
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from pytest_aorta.cli import run as run_command
from pytest_aorta.cli.main import COMMANDS, main
from pytest_aorta.plan.options import OPTIONS
from pytest_aorta.plan.workloads import find_workload, workload_places
from pytest_aorta.result import measurements
from pytest_aorta.session import history
from pytest_aorta.verdict import baseline
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import NotApplicable
from tests.unit.builders import schema
from tests.unit.docs.transcripts import difference

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
        *(("read-a-failure", f"| {reason} |") for reason in NotApplicable),
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


def test_lists_of_workloads_are_those_that_the_command_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "125")
    shown = page_text("command").partition("## `aorta workloads`")[2].partition("```console\n")[2].partition("```")[0]
    for part in shown.split("$ aorta ")[1:]:
        command, _, transcript = part.partition("\n")
        assert main(command.split()) == 0
        assert difference(transcript, capsys.readouterr().out) is None


def test_page_of_the_files_has_their_versions():
    rows = [line.split(" | ") for line in page_text("schemas").splitlines()]
    versions = {row[0].removeprefix("| "): row[2].strip(" |") for row in rows if len(row) == 3}
    files = {"`result.json`": measurements, "a baseline": baseline, "a line of the history": history}
    assert {name: versions[name] for name in files} == {name: str(of.SCHEMA_VERSION) for name, of in files.items()}


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


def test_every_module_that_the_architecture_names_exists():
    named = re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+\.(?:py|json))`", page_text("architecture"))
    folders = (ROOT / "pytest_aorta", ROOT)
    assert len(named) > 20
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def tuning_rows():
    """Return the code in each cell of the table of knobs, by row."""
    table = page_text("tuning").split("## Knobs")[1].split("Options of FSDP1")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    return [[re.findall("`([^`]+)`", cell) for cell in row] for row in rows]


@functools.cache
def config_keys() -> dict[str, set[str]]:
    """Map each workload to its config keys."""
    return {name: set(find_workload(name, []).properties) for name in workload_places([])}


@pytest.mark.parametrize("row", tuning_rows(), ids=lambda row: row[0][0])
def test_knob_of_the_tuning_table_is_a_config_key_in_a_test_that_its_row_names(row):
    knobs, _, shown = row
    keys = set().union(*config_keys().values())
    assert set(knobs) <= {*config_keys(), *keys}
    files = {name for name in shown if name.endswith(".py")}
    paths = [path for name in files for path in (ROOT / "tests").rglob(name)]
    assert {path.name for path in paths} == files
    texts = [path.read_text(encoding="utf-8") for path in paths]
    assert not files or [knob for knob in knobs if knob in keys and not any(knob in text for text in texts)] == []
    assert files or knobs == ["steps", "warmup", "profile_steps"]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_tables_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == generator().current(text), "run: python docs/generate.py"


def test_schemas_of_structs_are_current():
    for name in generator().SCHEMAS:
        assert schema(f"{name}.schema.json") == json.loads(generator().current_schema(name)), "run docs/generate.py"


WORKLOADS = ROOT / "workloads"
PRIVATE = re.compile(r"(torch|functorch)\b.*\._")


def imported(path):
    """Yield what a module imports, by dotted name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_two_modules_import_private_interfaces_of_torch():
    found = {
        str(path.relative_to(WORKLOADS)) for path in WORKLOADS.rglob("*.py") if any(map(PRIVATE.match, imported(path)))
    }
    assert found == {"common/torch_private.py", "passes/torch_private.py"}
