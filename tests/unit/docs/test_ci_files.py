"""The CI files that users copy: valid for their service, with sound shell code and existing options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pytest_aorta.plan.options import OPTIONS

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.is_file())
GITHUB = sorted([*ROOT.glob("examples/ci/github-*.yml"), *ROOT.glob(".github/workflows/*.yml")])
SCRIPTS = [*sorted((ROOT / "examples").rglob("*.sh")), ROOT / "dev", ROOT / ".ci/run"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = {option.flag for option in OPTIONS if not option.ini_only}


def tool(name: str, *arguments: str, text: str | None = None) -> str:
    """Return the output of a checker; empty if it finds nothing."""
    beside = Path(sys.executable).parent / name
    done = subprocess.run([beside, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_github_workflows_have_its_schema():
    assert tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, GITHUB)) == ""


def test_gitlab_pipeline_has_its_schema():
    schema = ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]
    assert tool("check-jsonschema", *schema, str(ROOT / "examples/ci/gitlab-ci.yml")) == ""


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_shell_code_of_a_workflow_is_sound(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    code = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert code
    assert [tool("shellcheck", "--shell=bash", "-", text=text) for text in code] == [""] * len(code)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_script_is_sound(path):
    assert tool("shellcheck", str(path)) == ""


@pytest.mark.parametrize("path", [*EXAMPLES, *PAGES], ids=lambda path: path.name)
def test_every_option_that_is_named_exists(path):
    text = path.read_text(encoding="utf-8")
    named = {f"--{name}" for name in re.findall(r"(?<![\w-])--((?:aorta|update)-[a-z-]*[a-z])(?![\w*…-])", text)}
    assert named <= FLAGS


@pytest.mark.parametrize("path", [*EXAMPLES, *PAGES], ids=lambda path: path.name)
def test_every_ini_key_that_is_named_exists(path):
    named = set(re.findall(r"(?:-o |^)(aorta_[a-z_]+) ?=", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= {option.ini for option in OPTIONS}
