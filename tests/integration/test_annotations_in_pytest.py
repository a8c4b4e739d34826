"""Annotations of GitHub and GitLab on the failures of a run."""

import json

import pytest


@pytest.fixture
def annotated(project, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path))
    project.write("src/train.py", "x = 1\n")
    return project


def test_failure_is_annotated_at_the_test_and_at_the_line_that_it_names(annotated):
    message = "bo%m\\nat train.py:1 and /usr/lib/other.py:3 and src/train.py:7"
    body = f"workload.run('toy', fault={{'raises': 1, 'message': '{message}'}})"
    annotated.test_file(
        f"import pytest\n\n@pytest.mark.parametrize('kind', ['a:b,c'])\ndef test_one(workload, kind):\n    {body}\n"
    )
    lines = annotated.run(failed=1).stdout.lines
    said = "toy on 2 cpu ranks: rank exception: rank 1 failed first: ValueError: bo%25m"
    title = "test_toy.py%3A%3Atest_one[a%3Ab%2Cc]"
    assert [line for line in lines if line.startswith("::")] == [
        f"::error file=src/train.py,line=7,title={title}::{said}",
        f"::error file=test_toy.py,line=3,title={title}::{said}",
    ]


def test_annotations_are_those_that_the_service_shows(annotated, monkeypatch):
    annotated.test_file(
        "import pytest\n\n@pytest.mark.parametrize('n', range(12))\ndef test_one(workload, n): workload.run('none')\n"
    )
    found = [
        line for line in annotated.run(failed=12).stdout.lines if line.startswith("::error file=test_toy.py,line=3,")
    ]
    assert len(found) == 10
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert "::error" not in annotated.run(failed=12).stdout.str()


def test_gitlab_shows_failures_at_the_same_lines_in_the_diff(project, monkeypatch):
    monkeypatch.setenv("GITLAB_CI", "true")
    monkeypatch.setenv("CI_PROJECT_DIR", str(project.path))
    project.write("src/train.py", "x = 1\n")
    project.test_file(
        "def test_one(workload): workload.run('toy', fault={'raises': 0, 'message': 'at src/train.py:7'})\n"
    )
    project.run("--aorta-markdown=out/aorta.md", failed=1)
    named, test = json.loads(project.read("out/aorta.codequality.json"))
    assert [one["location"] for one in (named, test)] == [
        {"path": "src/train.py", "lines": {"begin": 7}},
        {"path": "test_toy.py", "lines": {"begin": 1}},
    ]
    assert named["description"].startswith("test_toy.py::test_one: toy on 2 cpu ranks: rank exception: rank 0")
    assert named["fingerprint"] != test["fingerprint"]
    project.test_file("def test_one(workload): pass\n")
    project.run("--aorta-markdown=out/aorta.md", passed=1)
    assert json.loads(project.read("out/aorta.codequality.json")) == []
