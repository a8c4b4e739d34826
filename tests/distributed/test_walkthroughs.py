"""Pages followed from top to bottom: files are written, commands are run as copied, their output equals the page's.

A file is a fenced block below a line that ends with its name in backticks and a colon, or a file that is included.
A command is a line of a ``sh`` block, or one with ``$`` in a ``console`` block; the lines below the latter are its
whole output, with other times and hashes, and with anything in the place of ``...``.
"""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fresh import ROOT, Fresh, Shell
from tests.integration.ci_runner import Workflow, read_yaml, run_template
from tests.unit.builders import git, write
from tests.unit.docs.transcripts import difference

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\{?\w*\}?) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w./-]+)`[^`]*:\s*$")
FAILED = 1
COMMENT = "marocchino/sticky-pull-request-comment@v2"
GITHUB_RUN = {"GITHUB_SERVER_URL": "https://hub.test", "GITHUB_REPOSITORY": "octo/repo", "GITHUB_RUN_ID": "3"}
GITHUB_RUN |= {"GITHUB_ACTIONS": "true"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``file`` is the name in the line before the block."""

    language: str
    text: str
    file: str | None


def blocks(page: Path) -> Iterator[Block]:
    text, end = page.read_text(encoding="utf-8"), 0
    for fence in FENCE.finditer(text):
        named = FILE.search(text[end : fence.start()])
        is_included = fence[1] == "{literalinclude}"
        content = (page.parent / fence[2]).read_text(encoding="utf-8") if is_included else fence[3]
        yield Block(fence[1], content, named[1] if named else None)
        end = fence.end()


def follow(page: Path, shell: Shell) -> list[str]:
    """Write the files of a page and run its commands in order; return the blocks that were run."""
    followed = []
    for block in blocks(page):
        if block.language == "console":
            follow_console(block.text, shell)
            followed.append(block.text)
        elif block.language == "sh" and not block.text.startswith("./dev "):
            done = shell.run(block.text)
            # On a busy machine, a slow rank may be no finding.
            is_told = block.text.startswith("aorta selftest") and "11 faults planted in 1 test" in done.stdout
            assert done.returncode == 0 or is_told, f"{block.text}\n{done.stdout}{done.stderr}"
            followed.append(block.text)
        elif block.file:
            write(shell.folder / block.file, block.text)
    return followed


def follow_console(console: str, shell: Shell) -> None:
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        done = shell.run(command)
        problem = difference(shown, done.stdout)
        assert problem is None, f"$ {command}\n{problem}\n{done.stdout}{done.stderr}"
        is_red = any(line.startswith("E  ") for line in shown.splitlines())
        assert done.returncode == (FAILED if is_red else 0), f"$ {command}\n{done.stdout}{done.stderr}"


def test_page_on_workloads_works_as_written(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    # The Python of these tests may have no script `pytest` beside it.
    (programs / "pytest").write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest -p no:cacheprovider "$@"\n')
    (programs / "pytest").chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    assert len(follow(DOCS / "add-a-workload.md", Shell(tmp_path / "project", environment))) >= 2


@pytest.mark.parametrize("page", ["github.md", "gitlab.md"])
def test_whole_files_of_a_page_are_those_that_it_commits(page):
    found = list(blocks(DOCS / page))
    names = {Path(block.file or "").parts[0] for block in found if block.language == "{literalinclude}"}
    (command,) = (block.text.splitlines()[0] for block in found if block.text.startswith("git add "))
    assert names == set(command.split()[2:])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    return Fresh(tmp_path_factory.mktemp("fresh") / "environment")


@pytest.fixture
def project(fresh, tmp_path):
    """A shell in a repository with the tutorial's script, whose main branch is that of a remote one."""
    shell = fresh.shell(tmp_path / "project")
    script = next(block.text for block in blocks(DOCS / "tutorial.md") if block.file == "train.py")
    write(shell.folder / "train.py", script)
    assert shell.run("python3 -m venv .venv && . .venv/bin/activate").returncode == 0
    (shell.folder / ".gitignore").write_text(".venv\nrunner\n.pytest-aorta\n__pycache__\n")
    git(tmp_path, "init", "--quiet", "--bare", "origin")
    git(shell.folder, "init", "--quiet", "-b", "main")
    git(shell.folder, "remote", "add", "origin", str(tmp_path / "origin"))
    git(shell.folder, "add", "--all")
    git(shell.folder, "commit", "--quiet", "--message", "Train")
    git(shell.folder, "push", "--quiet", "--set-upstream", "origin", "main")
    return shell


@pytest.mark.extended
def test_tutorial_works_by_copying(fresh, tmp_path):
    assert len(follow(DOCS / "tutorial.md", fresh.shell(tmp_path / "home"))) >= 6


@pytest.mark.extended
def test_readme_and_page_on_installation_work_by_copying(project):
    followed = [text for page in (ROOT / "README.md", DOCS / "install.md") for text in follow(page, project)]
    assert [text.split()[0] for text in followed] == ["pip", "pytest", "pip", "aorta"]
    done = project.run("aorta run --workload fsdp --steps 5 --gpus 0 && pytest --aorta-report=report.html")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.folder / "report.html").stat().st_size > 10_000


@pytest.fixture
def tested(project, tmp_path):
    """The project with a test and its baseline, and a program in place of GitHub's."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "gh").write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/gh"\n')
    (programs / "gh").chmod(0o755)
    project.environment["PATH"] += f"{os.pathsep}{programs}"
    done = project.run("pip install pytest-aorta && aorta init train.py -- --steps 20 && pytest --update-baselines")
    assert done.returncode == 0, done.stdout + done.stderr
    git(project.folder, "add", "test_train.py", "pytest.ini", "baselines")
    return project


def on_a_runner(project: Shell, page: str, home: Path) -> dict[str, str]:
    """Follow a page, and return the variables of a runner, whose environment has what the job installs."""
    follow(DOCS / page, project)
    assert not git(project.folder, "status", "--porcelain")
    assert git(project.folder, "log", "--format=%s", "origin/main", "-1").startswith("Test training on")
    assert project.run(f"python3 -m venv {home}/runner && . {home}/runner/bin/activate").returncode == 0
    return project.environment


@pytest.mark.extended
@pytest.mark.parametrize(
    ("edit", "verdict", "says"),
    [
        ("", "\N{WHITE HEAVY CHECK MARK} pytest-aorta: 1 of 1 test passed", "1 test OK"),
        ("print(loss.item())", "\N{CROSS MARK} pytest-aorta: 1 of 1 test failed", "::error file=train.py,line=27,"),
    ],
)
def test_page_on_github_works_by_copying_and_its_job_comments(tested, tmp_path, edit, verdict, says):
    variables = on_a_runner(tested, "github.md", tmp_path)
    assert (tmp_path / "gh").read_text().startswith("workflow run baselines --ref main -f lane=numerics")
    script = tested.folder / "train.py"
    script.write_text(script.read_text().replace("loss.backward()", f"loss.backward(); {edit}"))
    values = {"github.base_ref": "main", "vars.AORTA_REPOSITORY": "owner/pytest-aorta"}
    job = Workflow(tested.folder, variables | GITHUB_RUN, values, "pull_request")
    done = job.run_job("github-pull-request.yml", "numerics")
    assert done.code == bool(edit), done.text
    assert says in done.text
    assert Path(done.used[COMMENT]["path"]).read_text(encoding="utf-8").startswith(f"## {verdict}")


@pytest.mark.extended
def test_page_on_gitlab_works_by_copying_and_its_job_runs(tested, tmp_path):
    variables = on_a_runner(tested, "gitlab.md", tmp_path)
    (included,) = read_yaml(tested.folder / ".gitlab-ci.yml")["include"]
    done = run_template(tested.folder, variables | {"CI_JOB_URL": "https://lab.test/jobs/5"}, **included["inputs"])
    assert done.code == 0, done.text
    findings = (tested.folder / "aorta/numerics/aorta.md").read_text(encoding="utf-8")
    assert findings.startswith("## \N{WHITE HEAVY CHECK MARK} pytest-aorta: 1 of 1 test passed")


@pytest.mark.extended
def test_workflow_records_baselines_on_the_runner(tested, tmp_path):
    variables = on_a_runner(tested, "github.md", tmp_path)
    job = Workflow(tested.folder, variables, {"inputs.lane": "numerics", "inputs.reset": "true"}, "workflow_dispatch")
    done = job.run_job("github-baselines.yml", "record")
    assert done.code == 0, done.text
    assert (
        "updated cpu-x2-gloo: test_train.py::test_train::train.py (baseline 2: 2 launches, 4 in the file)" in done.text
    )
    assert "  loss: " not in done.text  # bits are as before
    assert git(tested.folder, "diff", "--name-only").startswith("baselines/cpu-x2-gloo/")
