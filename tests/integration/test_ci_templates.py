"""The composite action for GitHub and the component for GitLab, run with a project and a server of comments."""

from __future__ import annotations

import json
import re

import pytest

from pytest_aorta.cli.report.comment import marker_of
from tests.integration.ci_runner import ARTIFACT_URL, Action, run_template
from tests.integration.code_host import ACTIONS, NUMBER, PROJECT, PROJECT_ID, READ_ONLY, REPOSITORY, serving

PASSED, FAILED = "\N{WHITE HEAVY CHECK MARK} pytest-aorta: 1 of 1 test passed", "\N{CROSS MARK} pytest-aorta: 1 of 1"
UPLOAD = "actions/upload-artifact@v4"


@pytest.fixture
def server():
    with serving() as host:
        yield host


@pytest.fixture
def github(learned, server, monkeypatch):
    """The job of a pull request, in a project whose one test passes."""

    def job(token: str = ACTIONS, event: str = "pull_request") -> Action:
        file = learned.path / "event.json"
        file.write_text(json.dumps({"pull_request": {"number": NUMBER}} if event == "pull_request" else {}))
        variables = {"GITHUB_ACTIONS": "true", "GITHUB_API_URL": server.url, "GITHUB_REPOSITORY": REPOSITORY,
                     "GITHUB_EVENT_NAME": event, "GITHUB_EVENT_PATH": str(file), "THE_TOKEN": token}  # fmt: skip
        return Action(learned.path, variables, event)

    for name in ("GITHUB_TOKEN", "GH_TOKEN", "GITLAB_CI", "GITLAB_TOKEN", "CI_JOB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    return job


@pytest.fixture
def gitlab(learned, server, monkeypatch):
    """The variables of a job of a merge request."""
    for name in ("GITHUB_ACTIONS", "GITHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    return {
        "GITLAB_CI": "true", "GITLAB_TOKEN": PROJECT, "CI_API_V4_URL": f"{server.url}/api/v4",
        "CI_PROJECT_ID": str(PROJECT_ID), "CI_MERGE_REQUEST_IID": str(NUMBER), "CI_JOB_URL": "https://lab.test/jobs/5",
    }  # fmt: skip


def test_action_comments_uploads_and_summarizes_and_the_next_run_updates_the_comment(github, learned, server):
    done = github().run(pytest_args="-p no:cacheprovider")
    assert done.code == 0, done.text
    assert (done.outputs["outcome"], done.outputs["exit-code"]) == ("passed", "0")
    assert done.used == {UPLOAD: {"name": "aorta", "path": f"{learned.path}/runner/aorta/aorta"}}
    assert PASSED in done.summary
    (body,) = server.bodies()
    assert body.startswith(f"{marker_of('aorta')}\n## {PASSED}")
    assert body.endswith(f"[Report, results and logs](<{ARTIFACT_URL}>)\n")
    assert learned.path.joinpath(done.outputs["report"]).stat().st_size > 10_000
    learned.plant(step_ms=13.0)
    done = github().run(pytest_args="-p no:cacheprovider")
    assert (done.code, done.outputs["outcome"], done.outputs["exit-code"]) == (1, "failed", "1")
    (body,) = server.bodies()
    assert f"## {FAILED} test failed" in body
    assert "<pre>pytest test_toy.py::test_one</pre>" in body


def test_arguments_are_words_and_never_run_as_shell_code(github, learned):
    marker = learned.path / "injected"
    given = (
        f"-p no:cacheprovider -o 'addopts=-p no:rerunfailures' -k '$(touch {marker}) or `touch {marker}` or test_one'"
    )
    done = github().run(pytest_args=given, name="gpu", comment="false", report="false", baselines="; touch injected")
    assert not marker.exists()
    assert "Wrong expression passed to '-k'" in done.text
    assert done.code == 4


def test_run_without_findings_is_a_comment_that_says_so(github, server):
    done = github().run(pytest_args="--no-such-option", report="false")
    assert (done.code, done.outputs["outcome"], done.outputs["exit-code"]) == (4, "failed", "4")
    assert "pytest ended with exit code 4 and wrote no findings" in server.bodies()[0]
    assert "pytest ended with exit code 4 and wrote no findings" in done.summary


@pytest.mark.parametrize(("required", "code"), [("false", 0), ("true", 1)])
def test_read_only_token_of_a_fork_is_a_warning_unless_the_comment_is_required(github, server, required, code):
    done = github(READ_ONLY).run(pytest_args="-p no:cacheprovider", report="false", require_comment=required)
    assert done.outputs["outcome"] == "passed"
    kind = "error" if code else "warning"
    assert re.search(
        rf"^::{kind} title=pytest-aorta::aorta: GitHub: .*status 403.*workflow_run", done.text, re.MULTILINE
    )
    assert PASSED in done.summary
    assert READ_ONLY not in done.text
    assert server.comments == []


def test_push_has_no_comment(github, server):
    done = github(event="push").run(pytest_args="-p no:cacheprovider", report="false", python_version="3.12")
    assert done.code == 0
    assert server.requests == []
    assert done.used["actions/setup-python@v5"] == {"python-version": "3.12"}


@pytest.mark.parametrize("given", [{"name": "../up"}, {"pytest_args": "'open"}, {"requirements": "absent.txt"}])
def test_wrong_input_fails_the_job_before_any_test(github, server, given):
    done = github().run(**given)
    assert done.code != 0
    assert done.outputs["exit-code"] == ""
    assert (done.used, server.requests) == ({}, [])


def test_component_comments_and_updates_and_keeps_the_exit_code(gitlab, learned, server):
    given = {"requirements": "", "pytest_args": "-p no:cacheprovider"}
    done = run_template(learned.path, gitlab, **given)
    assert done.code == 0, done.text
    (body,) = server.bodies()
    assert body.startswith(f"{marker_of('aorta')}\n## {PASSED}")
    assert body.endswith("[Report, results and logs](<https://lab.test/jobs/5/artifacts/browse/aorta/aorta>)\n")
    assert {path.name for path in (learned.path / "aorta/aorta").iterdir()} >= {"aorta.md", "report.html", "junit.xml"}
    learned.plant(step_ms=13.0)
    assert run_template(learned.path, gitlab, **given).code == 1
    (body,) = server.bodies()
    assert f"## {FAILED} test failed" in body


@pytest.mark.parametrize(("required", "code"), [(False, 0), (True, 1)])
def test_component_without_permission_warns_unless_the_comment_is_required(gitlab, learned, required, code):
    gitlab["GITLAB_TOKEN"] = "glpat-expired"
    given = {"requirements": "", "report": False, "pytest_args": "-p no:cacheprovider", "require_comment": required}
    done = run_template(learned.path, gitlab, **given)
    assert done.code == code
    assert "WARNING: no comment was written on the merge request" in done.text
    assert "glpat-expired" not in done.text


def test_component_outside_of_a_merge_request_writes_no_comment(gitlab, learned, server):
    del gitlab["CI_MERGE_REQUEST_IID"]
    done = run_template(learned.path, gitlab, requirements="", report=False, pytest_args="--no-such-option")
    assert done.code == 4
    assert server.requests == []
    assert "wrote no findings" in (learned.path / "aorta/aorta/aorta.md").read_text()


def test_component_never_runs_arguments_as_shell_code(gitlab, learned):
    given = "-p no:cacheprovider -k '$(touch injected) or `touch injected` or test_one'"
    run_template(learned.path, gitlab, requirements="", report=False, comment=False, pytest_args=given)
    assert not (learned.path / "injected").exists()
