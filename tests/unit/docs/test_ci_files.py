"""The CI files that users copy: valid for their service, with sound shell code and existing options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pytest_aorta.plan.options import OPTIONS
from tests.integration.ci_runner import component, read_yaml

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.is_file() and path.suffix != ".pyc")
ACTION, TEMPLATE = ROOT / "action.yml", ROOT / "examples/ci/aorta.yml"
ACTION_YAML = read_yaml(ACTION)
GITHUB = sorted([*ROOT.glob("examples/ci/github-*.yml"), *ROOT.glob(".github/workflows/*.yml")])
SCRIPTS = [*sorted((ROOT / "examples").rglob("*.sh")), ROOT / "dev", ROOT / ".ci/run"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = {option.flag for option in OPTIONS if not option.ini_only}


def tool(name: str, *arguments: str, text: str | None = None) -> str:
    """Return the output of a checker; empty if it finds nothing."""
    beside = Path(sys.executable).parent / name
    done = subprocess.run([beside, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


GITLAB_SCHEMA = ["vendor.gitlab-ci", "--data-transform", "gitlab-ci"]


def test_files_have_the_schemas_of_their_services(tmp_path):
    jobs = tmp_path / "jobs.yml"
    jobs.write_text(yaml.safe_dump(component(tags=["gpu"])))
    for schema, files in (
        (["vendor.github-workflows"], GITHUB),
        (["vendor.github-actions"], [ACTION]),
        (["vendor.buildkite"], [ROOT / "examples/ci/buildkite.yml"]),
        (GITLAB_SCHEMA, [*sorted((ROOT / "examples/ci").glob("gitlab-*.yml")), jobs]),
    ):
        assert tool("check-jsonschema", "--builtin-schema", *schema, *map(str, files)) == ""


def test_examples_give_the_action_and_the_component_inputs_that_they_have():
    workflow = read_yaml(ROOT / "examples/ci/github-pull-request.yml")
    steps = [
        step for job in workflow["jobs"].values() for step in job["steps"] if "pytest-aorta" in step.get("uses", "")
    ]
    assert steps
    assert {name for step in steps for name in step["with"]} <= set(ACTION_YAML["inputs"])
    (included,) = read_yaml(ROOT / "examples/ci/gitlab-ci.yml")["include"]
    assert set(included["inputs"]) <= set(next(yaml.safe_load_all(TEMPLATE.read_text()))["spec"]["inputs"])


def test_component_and_action_use_every_input_and_no_other():
    spec, jobs = yaml.safe_load_all(TEMPLATE.read_text(encoding="utf-8"))
    assert set(re.findall(r"\$\[\[ inputs\.([\w-]+) \]\]", yaml.safe_dump(jobs))) == set(spec["spec"]["inputs"])
    assert set(re.findall(r"inputs\.([\w-]+)", yaml.safe_dump(ACTION_YAML["runs"]))) == set(ACTION_YAML["inputs"])


def test_token_of_the_action_reaches_the_comment_alone_and_inputs_reach_no_script():
    steps = ACTION_YAML["runs"]["steps"]
    assert [step["with"]["header"] for step in steps if "token" in yaml.safe_dump(step)] == ["${{ inputs.name }}"]
    assert [step["run"] for step in steps if "${{" in step.get("run", "")] == []


def test_shell_code_in_yaml_is_sound():
    jobs = [job for path in GITHUB for job in read_yaml(path)["jobs"].values()]
    code = [step["run"] for job in (*jobs, ACTION_YAML["runs"]) for step in job["steps"] if "run" in step]
    heredocs = [component()[job]["script"][0] for job in ("aorta", "aorta comment")]
    code += [*heredocs, *(text.split("<<'END'\n")[1].rpartition("END")[0] for text in heredocs)]
    assert len(code) > 10
    assert [text for text in code if tool("shellcheck", "--shell=bash", "-", text=text)] == []


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_job_that_runs_tests_keeps_no_credentials_and_may_not_write(path):
    workflow = read_yaml(path)
    for job in workflow["jobs"].values():
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
        permissions = job.get("permissions", workflow.get("permissions"))
        if "pytest -m" in yaml.safe_dump(job) or "pytest-args" in yaml.safe_dump(job):
            assert permissions["contents"] == "read"


def test_tokens_of_gitlab_are_those_of_an_environment_in_jobs_that_run_no_tests():
    jobs = component() | read_yaml(ROOT / "examples/ci/gitlab-ci.yml")
    with_token = {name: job for name, job in jobs.items() if "_TOKEN" in yaml.safe_dump(job)}
    assert set(with_token) == {"aorta comment", "propose baselines"}
    assert all(job["environment"]["action"] == "access" for job in with_token.values())
    assert "-m pytest" not in yaml.safe_dump(with_token)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_script_is_sound(path):
    assert tool("shellcheck", str(path)) == ""


@pytest.mark.parametrize("path", [*EXAMPLES, *PAGES, ACTION], ids=lambda path: path.name)
def test_every_option_and_ini_key_that_is_named_exists(path):
    text = path.read_text(encoding="utf-8")
    named = {f"--{name}" for name in re.findall(r"(?<![\w-])--((?:aorta|update)-[a-z-]*[a-z])(?![\w*…-])", text)}
    assert named <= FLAGS
    keys = set(re.findall(r"(?:-o |^)(aorta_[a-z_]+) ?=", text, re.MULTILINE))
    assert keys <= {option.key for option in OPTIONS if option.ini}
