"""The composite action for GitHub and the component for GitLab, run with a project as the runners do."""

import pytest

from tests.integration.ci_runner import Action, run_template

PASSED, FAILED = "\N{WHITE HEAVY CHECK MARK} pytest-aorta: 1 of 1 test passed", "\N{CROSS MARK} pytest-aorta: 1 of 1"
UPLOAD, COMMENT = "actions/upload-artifact@v4", "marocchino/sticky-pull-request-comment@v2"
GITHUB_RUN = {"GITHUB_SERVER_URL": "https://hub.test", "GITHUB_REPOSITORY": "octo/repo", "GITHUB_RUN_ID": "3"}
GITLAB_JOB = {"CI_JOB_URL": "https://lab.test/jobs/5"}
QUIET = "-p no:cacheprovider"
# Shell code, if an input became a part of a script.
INJECTED = "-p no:cacheprovider -o 'addopts=-p no:rerunfailures' -k '$(touch injected) or `touch injected` or test_one'"


@pytest.fixture
def github(learned):
    """The job of a pull request, in a project whose one test passes."""
    return lambda event="pull_request": Action(learned.path, GITHUB_RUN | {"THE_TOKEN": "ghs_actions"}, event)


@pytest.fixture(params=["github", "gitlab"])
def job(request, github, learned):
    """A function that runs the job of a service with arguments of pytest, and its folder of findings and their link."""
    if request.param == "github":
        link = "https://hub.test/octo/repo/actions/runs/3"
        return lambda arguments: github().run(pytest_args=arguments), learned.path / "runner/aorta/aorta", link

    def run(arguments):
        return run_template(learned.path, GITLAB_JOB, requirements="", pytest_args=arguments)

    return run, learned.path / "aorta/aorta", "https://lab.test/jobs/5/artifacts/browse/aorta/aorta"


def test_job_keeps_the_exit_code_and_writes_the_findings(job, learned):
    run, folder, link = job
    done = run(QUIET)
    assert done.code == 0, done.text
    assert {path.name for path in folder.iterdir()} >= {"aorta.md", "aorta.findings.json", "report.html", "junit.xml"}
    findings = (folder / "aorta.md").read_text(encoding="utf-8")
    assert findings.startswith(f"## {PASSED}")
    assert findings.endswith(f"[Report, results and logs]({link})\n")
    learned.plant(step_ms=13.0)
    assert run(QUIET).code == 1
    findings = (folder / "aorta.md").read_text(encoding="utf-8")
    assert findings.startswith(f"## {FAILED}")
    assert "<pre>pytest test_toy.py::test_one</pre>" in findings


def test_arguments_are_words_and_never_run_as_shell_code(job, learned):
    run, *_ = job
    done = run(INJECTED)
    assert list(learned.path.rglob("injected")) == []
    assert "Wrong expression passed to '-k'" in done.text
    assert done.code == 4


def test_run_without_findings_says_so(job):
    run, folder, _ = job
    assert run("--no-such-option").code == 4
    said = "pytest ended with exit code 4 and wrote no findings"
    assert said in (folder / "aorta.md").read_text(encoding="utf-8")


def test_action_uploads_and_comments(github, learned):
    done = github().run(pytest_args=QUIET)
    assert (done.outputs["outcome"], done.outputs["exit-code"]) == ("passed", "0")
    folder = learned.path / "runner/aorta/aorta"
    commented = {"header": "aorta", "path": f"{folder}/aorta.md", "GITHUB_TOKEN": "ghs_actions"}
    assert done.used == {UPLOAD: {"name": "aorta", "path": str(folder)}, COMMENT: commented}
    assert PASSED in done.summary
    assert learned.path.joinpath(done.outputs["report"]).stat().st_size > 10_000
    learned.plant(step_ms=13.0)
    done = github().run(pytest_args=QUIET, report="false", baselines="; touch injected")
    assert (done.code, done.outputs["outcome"], done.outputs["exit-code"]) == (1, "failed", "1")
    assert COMMENT in done.used
    assert list(learned.path.rglob("injected")) == []


@pytest.mark.parametrize(("event", "comment"), [("push", "true"), ("pull_request", "false")])
def test_push_and_unwanted_comment_are_not_posted(github, event, comment):
    done = github(event).run(pytest_args=QUIET, report="false", comment=comment, python_version="3.12")
    assert done.code == 0
    assert set(done.used) == {UPLOAD, "actions/setup-python@v5"}


@pytest.mark.parametrize("given", [{"name": "../up"}, {"pytest_args": "'open"}, {"requirements": "absent.txt"}])
def test_wrong_input_fails_the_job_before_any_test(github, given):
    done = github().run(**given)
    assert done.code != 0
    assert done.outputs["exit-code"] == ""
    assert done.used == {}
