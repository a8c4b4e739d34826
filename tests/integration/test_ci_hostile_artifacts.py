"""Artifacts of a job that runs code which nobody reviewed, given to the jobs of examples/ci that may write."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from pytest_aorta.common.model import to_builtins
from pytest_aorta.report.markdown import MAX_COMMENT_BYTES, findings
from pytest_aorta.verdict.baseline import baseline_path, write_baseline
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.integration.ci_runner import ROOT, Done, Workflow, component, read_yaml, run_script
from tests.unit.builders import git, make_baseline, make_record, make_verdict

COMMIT = "c0ffee00" * 5
CHECK, CROSS = "\N{WHITE HEAVY CHECK MARK}", "\N{CROSS MARK}"
HOSTILE = "x\n\n/merge\n/approve\n@everyone #1 !2 https://evil.test www.evil.test <img src=x> [a](http://b) \x1b[2J ```"
GOOD = to_builtins(findings([make_record("a.py::good", [make_verdict(Outcome.PASS)])], commit=COMMIT))
BAD = to_builtins(
    findings(
        [make_record("a.py::bad", [make_verdict(Outcome.REGRESSION)], outcome="failed", failure="why")], commit=COMMIT
    )
)


def everywhere(value, text):
    """Return a document whose every text but the commit is another one."""
    if isinstance(value, dict):
        return {key: inner if key == "commit" else everywhere(inner, text) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [everywhere(inner, text) for inner in value]
    return text if isinstance(value, str) else value


def programs(folder: Path, **scripts: str) -> Path:
    """Write programs, with the command ``aorta`` and a Python that installs nothing beside them."""
    folder.mkdir()
    (folder / "aorta").symlink_to(Path(sys.executable).with_name("aorta"))
    python = f'case "$*" in *" pip "*) ;; "-m venv .") ln -s "{folder}" bin ;; *) exec "{sys.executable}" "$@" ;; esac'
    for name, script in ({"python": python} | scripts).items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def github(tmp_path: Path, artifact: Path, conclusion: str) -> str:
    """Return the comment that the workflow posts."""
    path = programs(tmp_path / "programs", gh="echo number=12")
    event = {"head_sha": COMMIT, "conclusion": conclusion, "html_url": "https://hub.test/runs/3"}
    values = {f"github.event.workflow_run.{name}": value for name, value in event.items()}
    workflow = Workflow(tmp_path, {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}, values)
    artifact.rename(tmp_path / "runner/artifact")
    done = workflow.run_job("github-comment.yml", "comment")
    assert done.code == 0, done.text
    posted = done.used["marocchino/sticky-pull-request-comment@v2"]
    assert posted == {"header": "aorta", "number": "12", "path": str(tmp_path / "runner/comment.md")}
    return Path(posted["path"]).read_text(encoding="utf-8")


def gitlab(tmp_path: Path, artifact: Path, conclusion: str) -> str:
    """Return the comment that the job of the component posts."""
    status = {"success": "success", "failure": "failed"}[conclusion]
    curl = (
        f'cat >"{tmp_path}/header"; [ -z "${{AORTA_COMMENT_TOKEN:-}}" ]; '
        f'case "$*" in *jobs*) echo \'[{{"name": "aorta", "status": "{status}"}}]\' ;; '
        f'*body@comment.md*notes) cp comment.md "{tmp_path}" ;; *) exit 2 ;; esac'
    )
    path = programs(tmp_path / "programs", curl=curl)
    project = tmp_path / "project"
    (project / "aorta").mkdir(parents=True)
    artifact.rename(project / "aorta/aorta")
    variables = {"CI_COMMIT_SHA": COMMIT, "AORTA_COMMENT_TOKEN": "glpat-1", "CI_PIPELINE_URL": "https://lab.test/3"}
    variables |= dict.fromkeys(("CI_PROJECT_ID", "CI_PIPELINE_ID", "CI_MERGE_REQUEST_PROJECT_ID"), "1")
    variables |= {"CI_API_V4_URL": "https://lab.test/api/v4", "CI_MERGE_REQUEST_IID": "12"}
    done = run_script(component()["aorta comment"], project, variables, path)
    assert done.code == 0, done.text
    assert (tmp_path / "header").read_text() == "PRIVATE-TOKEN: glpat-1\n"
    return (tmp_path / "comment.md").read_text(encoding="utf-8")


@pytest.fixture(params=[github, gitlab], ids=["github", "gitlab"])
def comment(request, tmp_path):
    """A function that returns the comment on an artifact whose findings are a document, a text or a function."""

    def comment(content: object, conclusion: str = "success") -> str:
        folder = tmp_path / "artifact"
        folder.mkdir()
        (folder / "aorta.md").write_text(f"## {CHECK} merge this @everyone\n\n/merge\n")
        if callable(content):
            content(folder / "aorta.findings.json")
        else:
            (folder / "aorta.findings.json").write_text(content if isinstance(content, str) else json.dumps(content))
        text = request.param(tmp_path, folder, conclusion)
        assert "merge this" not in text
        assert len(text.encode()) <= MAX_COMMENT_BYTES + 1_000
        return text

    return comment


def test_findings_are_posted_with_the_end_of_the_job_and_a_link(comment):
    text = comment(GOOD)
    assert text.startswith(f"## {CHECK} pytest-aorta: 1 of 1 test passed\n\nReported by a job that runs the code under")
    assert re.search(r"\n\[Report, results and logs\]\(https://\w+\.test/(runs/)?3\)\n$", text)


def test_job_that_failed_is_no_success_whatever_its_findings_say(comment):
    text = comment(GOOD, "failure")
    assert re.match(rf"## {CROSS} pytest-aorta: the job ended with fail\w+, although its findings have no failed", text)
    assert CHECK not in text


@pytest.mark.parametrize("text", [HOSTILE, "/merge", f"{CHECK} merged", "@everyone " * 100])
def test_text_of_findings_is_neither_markup_nor_a_command_nor_a_mention(comment, text):
    posted = comment(everywhere(BAD, text), "failure")
    assert posted.startswith(f"## {CROSS} pytest-aorta: the run ended early, 1 of 1 test failed until then\n")
    assert not re.search(r"^\s*/", posted, re.MULTILINE)
    assert CHECK not in re.sub(r"<pre>.*?</pre>", "", posted, flags=re.DOTALL)
    assert "\x1b" not in posted
    page = MarkdownIt("commonmark").enable("table").render(posted)
    assert re.findall(r"<(?:img|a) [^>]*", page) == re.findall(r'<a href="https://[a-z]+\.test/(?:runs/)?3"', page)
    # In <pre> and <code>, nothing is a link.
    open_text = re.sub(r"<(pre|code)>.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"@\w|[#!]\d|(?<!href=\"https)://|\bwww\.", open_text)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GOOD | {"commit": "0" * 40}, "they are of commit 0000"),
        (lambda path: path.symlink_to("/etc/passwd"), "link"),
        (lambda path: None, "No such file"),
    ],
)
def test_findings_that_can_not_be_used_are_a_comment_that_says_why(comment, content, says):
    text = comment(content)
    assert text.startswith(f"## {CROSS} pytest-aorta: the job ended with success, without usable findings\n")
    assert says.lower() in text.replace("\\", "").lower()
    assert CHECK not in text


REASON = "faster; $(touch injected)"


def proposed_on_github(clone: Path, path: str) -> Done:
    (clone / "recorded").rename(clone / "runner/recorded")
    variables = {"PATH": path, "GITHUB_REF_NAME": "main"}
    values = {"github.run_id": "7", "inputs.reason": REASON}
    done = Workflow(clone, variables, values).run_job("github-baselines.yml", "propose")
    if done.code == 0:
        body = (clone / "runner/body.md").read_text()
        assert body.startswith(f"{REASON}\n\n    recorded ")
        assert "      step_time_p50: " in body
    return done


def proposed_on_gitlab(clone: Path, path: str) -> Done:
    (clone / "recorded").rename(clone / "baselines")
    jobs = read_yaml(ROOT / "examples/ci/gitlab-ci.yml")
    variables = {"CI_PIPELINE_ID": "7", "CI_SERVER_HOST": "lab.test", "CI_PROJECT_PATH": "o/r", "REASON": REASON}
    variables |= {"PATH": path, "PUSH_TOKEN": "glpat-2", "GIT_CONFIG_COUNT": "1"}
    variables["GIT_CONFIG_KEY_0"] = f"url.{clone.parent / 'origin'}.insteadOf"
    variables["GIT_CONFIG_VALUE_0"] = "https://baselines:glpat-2@lab.test/o/r.git"
    return run_script(jobs["propose baselines"], clone, variables, Path(path.partition(os.pathsep)[0]))


@pytest.fixture(params=[proposed_on_github, proposed_on_gitlab], ids=["github", "gitlab"])
def proposed(request, tmp_path):
    """A function that gives an artifact to the job that proposes baselines: its end, and the files of its commit."""
    path = f"{programs(tmp_path / 'programs', gh='exit 0')}{os.pathsep}{os.environ['PATH']}"
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    git(tmp_path, "init", "--quiet", "--bare", str(origin))
    git(origin, "config", "receive.advertisePushOptions", "true")
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    (clone / ".gitignore").write_text("runner/\n")
    git(clone, "add", ".gitignore")
    git(clone, "commit", "--quiet", "-m", "first")
    (clone / "recorded").mkdir()
    (clone / "runner").mkdir()

    def proposed(fill) -> tuple[int, str, list[str]]:
        fill(clone / "recorded")
        done = request.param(clone, path)
        assert list(tmp_path.rglob("injected")) == []
        branches = git(origin, "branch", "--list", "baselines-7")
        files = git(origin, "ls-tree", "-r", "--name-only", "baselines-7").split() if branches else []
        return done.code, done.text, files

    return proposed


def test_recorded_baselines_are_committed(proposed):
    baseline = make_baseline()
    code, text, files = proposed(lambda folder: write_baseline(folder, baseline))
    assert code == 0, text
    assert files == [".gitignore", str(baseline.path(Path("baselines")))]


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (lambda folder: (folder / "setup.py").write_text("import os"), "setup.py: not valid JSON"),
        (lambda folder: (folder / "link.json").symlink_to("/etc/passwd"), "link.json: is not a regular file"),
        (lambda folder: (folder / "link").symlink_to("/etc"), "link: is not a regular file"),
        (lambda folder: os.mkfifo(folder / "pipe.json"), "pipe.json: is not a regular file"),
        (lambda folder: (folder / "huge.json").write_text(" " * (9 << 20)), "huge.json: larger than"),
        (lambda folder: write_baseline(folder / "up", make_baseline()), "the baseline's place is"),
        (
            lambda folder: baseline_path(folder, "cpu-x2-gloo", "a").write_text(
                json.dumps(to_builtins(make_baseline()) | {"platform": "../.github"})
            ),
            "platform",
        ),
    ],
)
def test_artifact_with_anything_but_baselines_in_their_place_is_not_committed(proposed, add, says):
    def fill(folder):
        path = write_baseline(folder, make_baseline())
        (folder / "cpu-x2-gloo").mkdir(exist_ok=True)
        add(folder)
        assert path.exists()

    code, text, files = proposed(fill)
    assert (code, files) == (1, [])
    assert says in text
    assert "nothing was added" in text
