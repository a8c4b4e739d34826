import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_aorta.session.history import read_history


def in_page(project) -> dict:
    """Return the data of the page's script."""
    text = project.read("out/report.html")
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def test_report_shows_the_verdicts_of_a_session_beside_its_baseline(learned):
    learned.plant(step_ms=[13.0, 13.01, 13.02])
    learned.run("--aorta-report=out/report.html", shows="report: *out/report.html", failed=1)
    plots = in_page(learned)["plots"]["0-0"]
    assert [launch["side"] for launch in plots["launches"]] == ["candidate"] * 3
    assert [band["name"] for band in plots["bands"]] == ["stored baseline\xa01"]
    assert "Regression: step_time_p50 " in learned.read("out/report.html")
    assert learned.summary()["entries"][0]["verdicts"]["step_time_p50"] == "regression"


def test_report_of_baselines_that_are_recorded_holds_them_against_nothing(gpu):
    gpu.plant(step_ms=[10.0, 10.01, 9.99])
    gpu.run("--update-baselines", "--aorta-launches=3", "--aorta-report=out/report.html", passed=1)
    plots = in_page(gpu)["plots"]["0-0"]
    assert (len(plots["launches"]), plots["bands"]) == (3, [])


def test_ab_in_one_test_shows_the_launches_of_both_sides(gpu):
    gpu.one_test("workload.compare({'workload': 'toy', 'step_ms': 10.0}, {'workload': 'toy', 'step_ms': 10.01})")
    gpu.run("--aorta-report=out/report.html")
    plots = in_page(gpu)["plots"]["0-0"]
    assert [band["name"] for band in plots["bands"]] == ["A/B reference"]
    sides = [launch["side"] for launch in plots["launches"]]
    assert sides.count("candidate") == sides.count("reference") >= 2


def test_reference_version_that_settles_a_verdict_is_the_other_side(versioned):
    versioned.gpus(2)
    versioned.one_test("workload.check(workload.run('toy'))")
    versioned.plant(step_ms=[10.0, 10.02, 9.98, 10.01])
    versioned.run("--update-baselines", "--aorta-launches=4", passed=1)
    versioned.plant(step_ms=[10.6])
    versioned.run("--aorta-ab=HEAD", "--aorta-report=out/report.html")
    plots = in_page(versioned)["plots"]["0-0"]
    assert [launch["side"] for launch in plots["launches"]].count("reference") >= 2
    # The stored baseline still decides the exact metrics.
    assert [band["name"] for band in plots["bands"]] == ["A/B reference HEAD", "stored baseline\xa01"]


def test_rank_that_failed_is_the_evidence(project):
    project.test_file()
    project.plant(raises=1)
    project.run("--aorta-report=out/report.html", failed=2)
    text = project.read("out/report.html")
    assert "rank 1 failed first: ValueError: boom" in text
    assert "train.py:7" in text
    assert text.count("1 failed launch") == 2


def test_failure_of_the_test_itself_is_reported_with_its_location(project):
    project.one_test("workload.run('toy'); assert 1 == 2")
    project.run("--aorta-report=out/report.html", failed=1)
    text = project.read("out/report.html")
    assert "test_toy.py:5: AssertionError" in text


def test_broken_result_is_a_warning_in_terminal_and_page(learned):
    learned.one_test(
        "workload.check(workload.run('toy'));"
        "import pathlib; [p.write_text('{') for p in pathlib.Path('kept').rglob('01-toy*/result.json')]"
    )
    learned.run(
        "--aorta-results=kept",
        "--aorta-report=out/report.html",
        shows="WARNING: result left out of the report: *result.json: not valid JSON*",
    )
    assert "not valid JSON" in learned.read("out/report.html")


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--aorta-report=file/report.html", "ERROR *file/report.html: not written: *"),
        ("--aorta-markdown=file/aorta.md", "ERROR *file/aorta.md: not written: *"),
        ("--aorta-history=file", "ERROR --aorta-history: *file/*.jsonl: not written: *"),
    ],
)
def test_file_that_can_not_be_written_fails_the_run_and_leaves_the_summary(learned, option, line):
    learned.one_test(f"workload.check(workload.run('toy')); {learned.obstacle('file')}")
    result = learned.run(option, shows=["aorta: 1 test OK, *", line], passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_report_without_its_packages_is_a_usage_error_before_any_test(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    project.test_file()
    project.ini("aorta_report = report.html")
    project.refused(shows="ERROR: a report needs jinja2; pip install 'pytest-aorta[[]report[]]'")


def test_workers_of_xdist_leave_one_report_and_one_file_of_the_history(project, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "step.md"))
    project.write("test_a.py", "def test_a(workload): workload.check(workload.run('toy'), label='a')\n")
    project.write("test_b.py", "def test_b(workload): workload.check(workload.run('toy'))\n")
    project.write("test_c.py", "def test_c(workload): workload.run('toy')\n")
    reports = ("--aorta-report=out/report.html", "--aorta-history=history", f"--junitxml={project.path}/junit.xml")
    result = project.run_apart("-n2", "--dist=loadfile", *reports, passed=1, failed=2)
    text = project.read("out/report.html")
    assert text.count('class="test-entry"') == 3
    assert "WARNING" not in result.stdout.str()
    assert project.read("step.md").count("## ") == 1
    assert len(in_page(project)["plots"]) == 2
    cases = ElementTree.parse(project.path / "junit.xml").iter("testcase")
    names = {node.get("name") for case in cases for node in case.iter("property")}
    assert {"aorta.tokens_per_s.value", "aorta.weight_hash.verdict", "aorta.step_time_p50.value"} <= names
    entries, problems = read_history(project.path / "history")
    assert (sorted(entry.test for entry in entries), problems) == (["test_a.py::test_a", "test_b.py::test_b"], [])
    assert len(list((project.path / "history").iterdir())) == 1
