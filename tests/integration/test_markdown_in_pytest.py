"""--aorta-markdown: the findings of a run as a file, each failure with the command that reproduces it."""

import html
import re
import shlex

import pytest

from pytest_aorta.cli.main import main
from tests.unit.builders import git


def commands(text: str) -> list[list[str]]:
    """Return the words of the commands that reproduce the failures."""
    found = re.findall(r"Reproduce it:\n\n<pre>(.*?)</pre>", text, re.DOTALL)
    return [shlex.split(html.unescape(command)) for command in found]


def test_file_has_the_verdict_the_finding_and_the_provenance(learned):
    learned.plant(step_ms=[13.0, 13.01, 13.02])
    learned.run("--aorta-markdown=out/aorta.md", shows="markdown: *out/aorta.md", failed=1)
    text = learned.read("out/aorta.md")
    assert text.startswith("## \N{CROSS MARK} pytest-aorta: 1 of 1 test failed\n")
    line = r"- **test\_toy.py::test\_one**: Regression: step\_time\_p50 \+30.1% \(10 \-&gt; 13.01 ms, limit 5%\)"
    assert line in text
    assert r"- **torch**: 2.11.0" in text
    assert r"- **command**: pytest \-p no:cacheprovider \-\-aorta\-markdown=out/aorta.md" in text


def test_failed_assertion_is_listed_by_its_error_and_not_by_its_code(project):
    project.test_file("def test_one(workload):\n    assert workload.run('toy').world_size == 99\n")
    project.run("--aorta-markdown=aorta.md", failed=1)
    lines = project.read("aorta.md").splitlines()
    assert next(line for line in lines if line.startswith("- **")).endswith(r": AssertionError: assert 2 == 99")


def test_command_of_a_failure_fails_in_the_same_way_and_writes_nothing(versioned):
    versioned.gpus(2)
    versioned.test_file(
        "import pytest\n\n@pytest.mark.parametrize('x', ['a b'])\ndef test_one(workload, x):\n    "
        "workload.compare('toy', {'workload': 'toy', 'step_ms': 20.0})\n"
    )
    (versioned.path / "workloads").rename(versioned.path / "mine")
    given = [
        "--aorta-ab=HEAD",
        "-o",
        "aorta_workloads=mine",
        "--aorta-fail-on=improved,missing",
        "--aorta-timeout=99.5",
    ]
    written = ["--aorta-markdown=aorta.md", "--aorta-results=kept"]
    versioned.run(*given, *written, "-m", "not overlap", failed=1)
    ((program, *words),) = commands(versioned.read("aorta.md"))
    assert (program, words[0]) == ("pytest", "test_toy.py::test_one[a b]")
    options = ["--aorta-timeout=99.5", "--aorta-fail-on=improved,missing", "--aorta-ab=HEAD"]
    assert words[1:] == ["-m", "not overlap", *options, "-o", "aorta_workloads=mine"]
    (versioned.path / "aorta.md").unlink()
    versioned.run(*words, failed=1)
    assert not (versioned.path / "aorta.md").exists()


def test_comment_from_the_data_beside_the_file_is_the_file_with_one_more_paragraph(versioned):
    versioned.test_file("def test_one(workload): workload.compare('toy', {'workload': 'toy', 'step_ms': 20.0})\n")
    versioned.run("--aorta-markdown=aorta.md", failed=1)
    commit = git(versioned.path, "rev-parse", "HEAD").strip()
    given = (f"--commit={commit}", "--conclusion=failure", f"--output={versioned.path / 'comment.md'}")
    assert main(["comment", str(versioned.path / "aorta.findings.json"), *given]) == 0
    first, _, *rest = versioned.read("comment.md").split("\n\n")
    assert [first, *rest] == versioned.read("aorta.md").split("\n\n")


def test_run_that_passes_has_three_lines_and_the_provenance(learned):
    learned.run("--aorta-markdown=aorta.md", passed=1)
    text = learned.read("aorta.md")
    assert text.startswith("## \N{WHITE HEAVY CHECK MARK} pytest-aorta: 1 of 1 test passed\n\n1 ")
    assert text.count("<details>") == 1


def test_file_of_an_earlier_run_is_removed_and_replaced_even_without_a_launch(project):
    file, data = project.write("aorta.md", "## all passed\n"), project.write("aorta.findings.json", "{}")
    # A process that is killed in a test leaves no file, from which a job could comment the verdict of an earlier run.
    exist = f"map(os.path.exists, ({str(file)!r}, {str(data)!r}))"
    project.test_file(f"import os.path\n\ndef test_plain(): assert not any({exist})\n")
    project.run("--collect-only", "--aorta-markdown=aorta.md")
    assert file.read_text() == "## all passed\n"
    project.run("--aorta-markdown=aorta.md", passed=1)
    assert "0 of 0 tests passed" in file.read_text()


@pytest.mark.parametrize("code", [None, 0, 1, 7])
def test_run_that_a_test_ends_says_so_and_is_no_success_whatever_its_exit_code(project, code):
    project.test_file(
        "import pytest\ndef test_first(workload): workload.run('toy')\n"
        f"def test_exit(): pytest.exit('the GPU is lost', returncode={code})\n"
        "def test_last(workload): workload.run('toy')\n"
    )
    assert project.run("--aorta-markdown=out.md").ret == (pytest.ExitCode.INTERRUPTED if code is None else code)
    text = project.read("out.md")
    assert "the run ended early, 0 of 1 test failed until then" in text
    assert "ended by pytest.exit: the GPU is lost; 1 test, " in text


@pytest.mark.parametrize(
    ("end", "by", "code"),
    [
        ("pytest.exit('enough', returncode=0)", "pytest.exit: enough", pytest.ExitCode.OK),
        ("import os; os.kill(os.getpid(), 15)", "SIGTERM", pytest.ExitCode.INTERRUPTED),
    ],
)
def test_recording_that_is_ended_says_so_and_claims_nothing_of_launches(project, end, by, code):
    project.one_test(f"workload.run('toy'); {end}")
    shows = f"recording was ended by {by}; run it again for the tests that had not ended"
    assert project.run("--aorta-markdown=out.md", "--update-baselines", shows=shows).ret == code
    text = project.read("out.md")
    assert f"the run ended early, 0 of 0 tests failed until then\n\nended by {by}\n" in text
    assert "no test launched" not in text


def test_interrupted_run_whose_file_can_not_be_written_is_still_interrupted(project):
    project.test_file(
        "import pytest\n\ndef test_one(workload): workload.run('toy')\n\n"
        f"def test_two(): {project.obstacle('file')}; pytest.exit('enough')\n"
    )
    result = project.run("--aorta-markdown=file/aorta.md")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["ERROR *file/aorta.md: not written: *"])


def test_run_with_a_file_that_can_not_be_imported_has_failed(learned):
    learned.write("test_broken.py", "import nothing_of_this_name\n")
    options = ("--continue-on-collection-errors", "--aorta-markdown=aorta.md", "--aorta-report=out/report.html")
    learned.run(*options, passed=1, errors=1)
    text = learned.read("aorta.md")
    assert text.startswith("## \N{CROSS MARK} pytest-aorta: 1 of 2 tests failed\n")
    assert "No module named 'nothing_of_this_name'" in text
    assert learned.summary()["tests"] == {"passed": 1, "error": 1}
