"""The composite action for GitHub and the component for GitLab, run with a project as the runners do."""

import pytest

from tests.integration.ci_runner import Action, run_template

PASSED, FAILED = "\N{WHITE HEAVY CHECK MARK} pytest-aorta: 1 of 1 test passed", "\N{CROSS MARK} pytest-aorta: 1 of 1"
UPLOAD, COMMENT = "actions/upload-artifact@v4", "marocchino/sticky-pull-request-comment@v2"
GITHUB_RUN = {"GITHUB_SERVER_URL": "https://hub.test", "GITHUB_REPOSITORY": "octo/repo", "GITHUB_RUN_ID": "3"}
GITLAB_JOB = {"CI_JOB_URL": "https://lab.test/jobs/5"}
PLAIN = {"requirements": "", "report": False, "pytest_args": "-p no:cacheprovider"}
# Shell code, if an input became a part of a script.
INJECTED = "-p no:cacheprovider -o 'addopts=-p no:rerunfailures' -k '$(touch injected) or `touch injected` or test_one'"


@pytest.fixture
def github(learned):
    """The job of a pull request, in a project whose one test passes."""
    return lambda event="pull_request": Action(learned.path, GITHUB_RUN | {"THE_TOKEN": "ghs_actions"}, event)


def test_action_uploads_and_comments_and_keeps_the_exit_code(github, learned):
    done = github().run(pytest_args="-p no:cacheprovider")
    assert done.code == 0, done.text
    assert (done.outputs["outcome"], done.outputs["exit-code"]) == ("passed", "0")
    folder = learned.path / "runner/aorta/aorta"
    commented = {"header": "aorta", "path": f"{folder}/aorta.md", "GITHUB_TOKEN": "ghs_actions"}
    assert done.used == {UPLOAD: {"name": "aorta", "path": str(folder)}, COMMENT: commented}
    assert PASSED in done.summary
    findings = (folder / "aorta.md").read_text(encoding="utf-8")
    assert findings.startswith(f"## {PASSED}")
    assert findings.endswith("[Report, results and logs](https://hub.test/octo/repo/actions/runs/3)\n")
    assert learned.path.joinpath(done.outputs["report"]).stat().st_size > 10_000
    learned.plant(step_ms=13.0)
    done = github().run(pytest_args="-p no:cacheprovider", report="false")
    assert (done.code, done.outputs["outcome"], done.outputs["exit-code"]) == (1, "failed", "1")
    assert "<pre>pytest test_toy.py::test_one</pre>" in (folder / "aorta.md").read_text(encoding="utf-8")
    assert COMMENT in done.used


def test_arguments_of_the_action_are_words_and_never_run_as_shell_code(github, learned):
    done = github().run(pytest_args=INJECTED, name="gpu", report="false", baselines="; touch injected")
    assert list(learned.path.rglob("injected")) == []
    assert "Wrong expression passed to '-k'" in done.text
    assert done.code == 4


def test_run_without_findings_is_a_comment_that_says_so(github, learned):
    done = github().run(pytest_args="--no-such-option", report="false")
    assert (done.code, done.outputs["outcome"], done.outputs["exit-code"]) == (4, "failed", "4")
    said = "pytest ended with exit code 4 and wrote no findings"
    assert said in (learned.path / "runner/aorta/aorta/aorta.md").read_text(encoding="utf-8")
    assert said in done.summary


@pytest.mark.parametrize(("event", "comment"), [("push", "true"), ("pull_request", "false")])
def test_push_and_unwanted_comment_are_not_posted(github, event, comment):
    done = github(event).run(pytest_args="-p no:cacheprovider", report="false", comment=comment, python_version="3.12")
    assert done.code == 0
    assert set(done.used) == {UPLOAD, "actions/setup-python@v5"}


@pytest.mark.parametrize("given", [{"name": "../up"}, {"pytest_args": "'open"}, {"requirements": "absent.txt"}])
def test_wrong_input_fails_the_job_before_any_test(github, given):
    done = github().run(**given)
    assert done.code != 0
    assert done.outputs["exit-code"] == ""
    assert done.used == {}


def test_component_keeps_the_exit_code_and_writes_the_findings(learned):
    done = run_template(learned.path, GITLAB_JOB, requirements="", pytest_args="-p no:cacheprovider")
    assert done.code == 0, done.text
    folder = learned.path / "aorta/aorta"
    assert {path.name for path in folder.iterdir()} >= {"aorta.md", "aorta.findings.json", "report.html", "junit.xml"}
    findings = (folder / "aorta.md").read_text(encoding="utf-8")
    assert findings.startswith(f"## {PASSED}")
    assert findings.endswith("[Report, results and logs](https://lab.test/jobs/5/artifacts/browse/aorta/aorta)\n")
    learned.plant(step_ms=13.0)
    assert run_template(learned.path, GITLAB_JOB, **PLAIN).code == 1
    assert (folder / "aorta.md").read_text(encoding="utf-8").startswith(f"## {FAILED}")


def test_component_without_findings_says_so(learned):
    done = run_template(learned.path, GITLAB_JOB, **PLAIN | {"pytest_args": "--no-such-option"})
    assert done.code == 4
    assert "wrote no findings" in (learned.path / "aorta/aorta/aorta.md").read_text(encoding="utf-8")


def test_component_never_runs_arguments_as_shell_code(learned):
    run_template(learned.path, GITLAB_JOB, **PLAIN | {"pytest_args": INJECTED})
    assert list(learned.path.rglob("injected")) == []
