import json
from xml.etree import ElementTree

import pytest

from pytest_aorta.result.provenance import block_id
from pytest_aorta.session.history import speed_folder
from pytest_aorta.verdict.attribution import SPEED_CASE
from tests.integration.conftest import ALONE_AND_NIGHTLY_ON_XDIST
from tests.unit.builders import each_of, read_json
from tests.unit.sample_history import make_entry, make_launch, write_history


def text_of(result: pytest.RunResult) -> str:
    return result.stdout.str()


def test_verbose_second_run_passes_and_shows_every_verdict(recorded):
    result = recorded.run("-v", shows="  measured *step_time_mean *10 ms *-", passed=2)
    result.stdout.fnmatch_lines(
        [
            "*= aorta =*",
            "test_toy::test_speed",
            "  pass *step_time_p50 *10 -> 10 ms *+0.00% [[]-*%, +*%] *limit 100%",
            "  pass *weight_hash *000000000000 -> 000000000000 *- *limit exact",
            "test_toy::test_weights",
            "  pass *step_time_p50 *",
            "  pass *step_time_mean *10 -> 10 ms *+0.00% * *limit 200%",
            "  pass *weight_hash *",
            "aorta: 2 tests OK, 5 metrics unchanged, 2 launches*",
        ]
    )


CAUGHT = """
import pytest
from pytest_aorta import ComparisonFailed

def test_speed(workload):
    with pytest.raises(ComparisonFailed, match="Regression: step_time_p50") as regression:
        workload.check(workload.run("toy"))
    assert regression.value.metrics == ("step_time_p50",)
"""


def test_missing_baseline_is_no_regression_that_a_test_can_catch(project):
    project.test_file(CAUGHT.replace(', match="Regression: step_time_p50"', ""))
    project.run(failed=1, shows="FAILED *test_speed - Missing: no baseline*")


def test_regression_that_a_test_catches_passes_and_is_counted_apart(recorded):
    recorded.test_file(CAUGHT)
    recorded.plant(slowdown=3)
    result = recorded.run("--junitxml=report.xml", "--aorta-markdown=out.md", passed=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["aorta: 1 test OK, 1 metric unchanged, 1 regression caught by its test, 3 launches*"])
    assert not [line for line in result.outlines if line.startswith(("test_toy::", "ERROR"))]
    headline = recorded.read("out.md").splitlines()[0]
    assert headline.endswith("pytest-aorta: 1 of 1 test passed, 1 regression caught by its test")
    assert "CROSS" not in headline
    assert 'name="aorta.step_time_p50.verdict" value="expected regression"' in recorded.read("report.xml")
    recorded.run("-v", shows="  expected regression  step_time_p50 *")


@each_of(
    "fault, message",
    {
        "no regression": ({}, "*DID NOT RAISE*ComparisonFailed*"),
        "of two metrics": ({"slowdown": 3, "weight_hash": "f" * 16}, "*AssertionError: *weight_hash*"),
        "a failed launch": ({"raises": 1}, "*LaunchError: *rank 1 failed first: ValueError: boom"),
    },
)
def test_regression_of_a_test_that_fails_is_not_caught(recorded, fault, message):
    recorded.test_file(CAUGHT)
    recorded.plant(**fault)
    result = recorded.run(shows=f"E  {message}", failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "caught" not in next(line for line in result.outlines if line.startswith("aorta: 1 of 1 test"))


def test_regression_of_a_test_that_xfails_is_no_caught_one(recorded):
    recorded.one_test("workload.check(workload.run('toy'))", "@pytest.mark.xfail(strict=True)")
    recorded.run("--update-baselines")
    recorded.plant(slowdown=3)
    assert recorded.run(xfailed=1).ret == 0


def test_slowdown_fails_exactly_its_test_and_names_the_metric(recorded):
    recorded.plant(slowdown=3, only="test-speed")
    shows = [
        "*_ test_speed _*",
        "E  *Regression: step_time_p50 +200% (10 -> 30 ms, limit 100%)",
        "E  *measured  toy on cpu-x2-gloo, 4 steps, 3 launches, 95% +*% to +*%",
        f"E  *baseline  {recorded.baselines}/cpu-x2-gloo/test-toy-py-test-speed-toy-*.json",
        "FAILED test_toy.py::test_speed - Regression: step_time_p50 +200% *",
    ]
    result = recorded.run("--junitxml=report.xml", shows=shows, passed=1, failed=1)
    assert "Regression: weight_hash" not in text_of(result)
    suite = ElementTree.parse(recorded.path / "report.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    case = next(case for case in suite if case.get("name") == "test_speed")
    assert case.find("failure").get("message").startswith("Regression: step_time_p50 +200% ")
    properties = {entry.get("name"): entry.get("value") for entry in case.find("properties")}
    assert properties["aorta.step_time_p50"].startswith("Regression: step_time_p50 +200% (10 -> 30 ms, ")
    assert properties["aorta.weight_hash"].startswith("Pass: weight_hash")
    recorded.plant()
    recorded.run(passed=2)


@each_of("is_committed", {"never committed": False, "committed": True})
def test_deleted_baseline_fails_its_test_and_says_how_to_record_it(recorded, is_committed):
    if is_committed:
        for words in (["init", "-q"], ["add", "baselines"], ["commit", "-qm", "old"]):
            recorded.git(*words)
    recorded.baseline_files()[0].unlink()
    shows = [
        "E  *Missing: no baseline",
        f"E  *baseline  {'*ago, deleted since, ' if is_committed else ''}/*/baselines/cpu-x2-gloo/*.json",
        "E  *accept    pytest test_toy.py::test_* --update-baselines",
        "FAILED test_toy.py::test_* - Missing: no baseline",
    ]
    recorded.run(shows=shows, passed=1, failed=1)
    assert len(recorded.baseline_files()) == 1


@pytest.mark.parametrize(
    ("fail_on", "outcome"),
    [("none", "passed"), ("inconclusive,improved", "passed"), ("not-applicable,missing", "failed")],
)
def test_missing_baseline_fails_the_test_where_it_is_listed_and_is_never_recorded(project, fail_on, outcome):
    project.test_file()
    shown = "aorta: 2 * 5 missing, *"
    project.run(f"--aorta-fail-on={fail_on}", shows=shown, **{outcome: 2})
    assert project.baseline_files() == []


@pytest.mark.parametrize("fail_on", ["none", "improved"])
def test_metric_that_a_launch_lost_fails_whatever_missing_baselines_do(recorded, fail_on):
    recorded.plant(weight_hash=None, only="test-speed")
    recorded.run(
        f"--aorta-fail-on={fail_on}",
        passed=1,
        failed=1,
        shows="E  *Missing: weight_hash, the launch has no weight_hash",
    )


def test_test_of_numbers_is_no_pass_with_another_torch(recorded):
    recorded.plant(torch="2.12.0")
    fact = "other environment: torch '2.11.0' -> '2.12.0'"
    shows = [
        "*_ test_weights _*",
        f"E  *Not applicable: weight_hash, {fact}",
        "E  *moved     environment: torch 2.11.0 -> 2.12.0; to settle it: pytest *_weights --aorta-ab=with:torch==*",
        "E  *compare   pytest test_toy.py::test_weights --aorta-ab=python:PATH",
        "E  *accept    pytest test_toy.py::test_weights --update-baselines --aorta-record=replace  # replaces *",
        f"aorta: 1 of 2 tests failed, 3 metrics unchanged, 2 not compared (weight_hash: {fact[:30]}*",
    ]
    recorded.run(shows=shows, passed=1, failed=1)
    total = f"aorta: 1 test OK, 1 metric unchanged, 1 not compared (weight_hash: {fact}), 1 launch*"
    recorded.run("-k", "test_speed", shows=total, passed=1)
    recorded.run("--aorta-fail-on=not-applicable", failed=2, shows=f"E  *Not applicable: weight_hash, {fact}")


@pytest.mark.parametrize(
    ("is_own", "shows"), [(True, "E  *moved     machine: GEMM 5 -> 6 ms (+20%) in *"), (False, [])]
)
def test_slower_machine_is_told_by_its_speed_check(learned, monkeypatch, is_own, shows):
    monkeypatch.setenv("XDG_CACHE_HOME", str(learned.path / "cache"))
    block = block_id() if is_own else "f" * 12
    checks = [
        make_launch({"step_time_p50": 9.0, "time_compute_ms": ms}, measured_at=f"{year}-01-01T00:00:00Z", block=block)
        for year, ms in ((2026, 5.0), (2099, 6.0))
    ]
    write_history(speed_folder(), [make_entry(case=SPEED_CASE, launches=tuple(checks))])
    learned.plant(step_ms=13.0)
    result = learned.run(shows=shows, failed=1)
    assert ("moved" in text_of(result)) is is_own


@pytest.mark.parametrize("asks", ["numerics", "tolerance(weight_hash='exact')"])
def test_bits_that_a_marker_names_are_compared_in_an_ab_of_another_torch(versioned, asks):
    versioned.one_test("workload.check(workload.run('toy'))", f"@pytest.mark.{asks}")
    versioned.run("--update-baselines", passed=1)
    versioned.plant(candidate={"torch": "2.12.0"})
    versioned.run("--aorta-ab=HEAD", shows="aorta: 1 test OK, *", passed=1)
    versioned.plant(candidate={"torch": "2.12.0", "weight_hash": "f" * 16})
    shows = [
        "E  *Regression: weight_hash (000000000000 -> ffffffffffff, *",
        "E  *moved *environment: torch 2.11.0 -> 2.12.0",
    ]
    versioned.run("--aorta-ab=HEAD", shows=shows, failed=1)


GONE = {
    "costs": lambda facts: facts.pop("costs"),
    "costs of a rank": lambda facts: facts["costs"][0].update(ranks=[0]),
    "a metric": lambda facts: facts["metrics"].pop("peak_memory_bytes"),
    "a hash": lambda facts: facts["weight_hashes"].pop("3"),
}


@each_of("remove", GONE)
def test_what_was_recorded_and_is_gone_from_the_file_fails_the_test(project, remove):
    hashes = {"3": "1" * 16, "4": "2" * 16}
    counted = {"operators": {"aten::mm": 3}, "flops": {"aten::mm": 8}}
    project.plant(metrics={"peak_memory_bytes": 2.0 * 2**20}, costs=counted, weight_hashes=hashes)
    project.one_test("workload.check(workload.run('toy'))")
    project.run("--update-baselines", passed=1)
    project.run(passed=1)
    [path] = project.baseline_files()
    document = read_json(path)
    for stored in document["launches"]:
        remove(stored["facts"])
    path.write_text(json.dumps(document))
    project.run(shows="E  *BaselineError: *.json: $.launches: * recorded*; restore the file, or *", failed=1)


def test_changed_number_of_steps_hides_no_change_and_replaces_nothing_unasked(project):
    project.plant(weight_hashes={"1": "1" * 16, "4": "2" * 16})
    project.one_test("workload.check(workload.run('toy'))")
    project.run("--update-baselines", passed=1)
    project.plant(steps=5, weight_hashes={"1": "1" * 16, "5": "3" * 16})
    count = "the baseline was recorded with 4 measured steps, the test has 5"
    again = "--update-baselines --aorta-record=replace"
    moved = "E  *moved     method: measured steps 4 -> 5; to settle it: pytest *--aorta-ab=*"
    shows = [
        f"E  *Missing: {count}",
        moved,
        f"E  *accept    pytest test_toy.py::test_one {again}  # replaces the baseline",
    ]
    project.run(shows=shows, failed=1)
    project.run("--update-baselines", shows=["E  *not added to the stored baseline*", f"E  *{count}"], failed=1)
    project.plant(steps=5, weight_hashes={"1": "f" * 16, "5": "3" * 16})
    project.run(
        shows=["E  *Regression: weight_hash *", f"E  *Missing: {count}", "E  *cause *after step 1; *"], failed=1
    )
    project.run(*again.split(), passed=1)
    project.run(passed=1)


def test_improvement_passes_and_says_that_the_baseline_is_stale(project):
    project.plant(metrics={"peak_memory_bytes": 2.0 * 2**20})
    project.one_test("workload.check(workload.run('toy'))")
    project.run("--update-baselines", passed=1)
    project.plant(metrics={"peak_memory_bytes": 1.0 * 2**20})
    shows = [
        "test_toy::test_one: Improved: peak_memory_bytes -50.0% (2 -> 1 MiB, limit 2%); the baseline is stale; *",
        "aorta: 1 test, 1 improved, 2 metrics unchanged, 3 launches*",
    ]
    project.run(shows=shows, passed=1)


BROKEN = """
@pytest.fixture
def broken():
    yield
    raise ValueError("teardown")

@pytest.mark.usefixtures("broken")"""


@each_of(
    "body, marks, line, outcomes",
    {
        "failed": (
            "workload.check(result); assert False",
            "",
            "not recorded, because the test failed: *",
            {"failed": 1},
        ),
        "failed in its teardown": (
            "workload.check(result)",
            BROKEN,
            "not recorded, because the test failed: *",
            {"passed": 1, "errors": 1},
        ),
        "planted fault": (
            "workload.check(workload.run('toy', fault={'slowdown': 2}))",
            "",
            "E  *not recorded: the config plants a fault*",
            {"failed": 1},
        ),
        "lost metric": (
            "workload.check(result)",
            "@pytest.mark.tolerance(final_loss='1%')",
            "E  *Missing: final_loss, *",
            {"failed": 1},
        ),
    },
)
def test_test_that_does_not_pass_records_nothing_and_says_so(project, body, marks, line, outcomes):
    project.one_test(f"result = workload.run('toy'); {body}", marks)
    project.run("--update-baselines", shows=line, **outcomes)
    assert project.baseline_files() == []


def test_test_that_is_run_again_starts_afresh(recorded):
    rerun = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item):
    for _ in range(2):
        for report in runtestprotocol(item, log=False):
            item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
    recorded.write("conftest.py", recorded.read("conftest.py") + rerun)
    recorded.run("-k", "test_speed", shows="aorta: 2 tests OK, 4 metrics unchanged, *", passed=2)


def test_labelled_checks_have_baselines_of_their_own(project):
    checked = "assert workload.check(result, label=label)['step_time_p50'].outcome == 'pass'"
    project.one_test(f"result = workload.run('toy')\n    for label in 'ab': {checked}")
    for options in (["--update-baselines"], []):
        project.run(*options, "--aorta-baselines=stored", shows="aorta: *, baselines stored", passed=1)
    assert len(list(project.path.glob("stored/*/*.json"))) == 2


COMPARE = "workload.compare(workload.run('toy', {}), workload.run('toy'))"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            "step_ms=30",
            "Regression: step_time_p50 +200% (10 -> 30 ms, limit 100%)",
        ),
        ("weight_hash='f' * 16", "Regression: weight_hash (000000000000 -> ffffffffffff, *"),
        ("weight_hash=None", "Missing: weight_hash, the launch has no weight_hash"),
    ],
)
def test_comparison_of_two_launches_fails_with_the_metric(project, config, line):
    project.one_test(COMPARE.format(config))
    project.run(shows=f"E  *{line}", failed=1)


def test_unreadable_baseline_fails_its_test_and_is_not_overwritten(recorded):
    path = next(path for path in recorded.baseline_files() if "speed" in path.name)
    path.write_text('{"schema_version": 1}')
    shows = [f"E  *BaselineError: {path}: schema_version is 1, but this pytest-aorta reads version 6; *"]
    result = recorded.run(shows=shows, passed=1, failed=1)
    assert "functools" not in text_of(result)
    recorded.run("--update-baselines", shows=f"E  *BaselineError: {path}: *", passed=1, failed=1)
    assert path.read_text() == '{"schema_version": 1}'


def test_baselines_of_a_deleted_test_and_of_a_deleted_file_are_reported(recorded):
    recorded.test_file(recorded.read("test_toy.py").replace("def test_weights", "def test_heights"))
    unused = "baselines/*.json: unused: the test test_toy.py::test_weights does not exist; delete the file*"
    recorded.run("--aorta-fail-on=none", shows=unused)
    (recorded.path / "test_toy.py").rename(recorded.path / "test_other.py")
    assert text_of(recorded.run("--aorta-fail-on=none")).count("does not exist; delete the file") == 2


IN_CLASS = """
class TestToy:
    def test_inner(self, workload):
        workload.check(workload.run("toy"))

def test_plain():
    pass
"""


@pytest.mark.parametrize(
    "arguments",
    [["test_toy.py::test_plain"], ["-k", "test_plain"], ["--deselect", "test_toy.py::TestToy"], ["test_other.py"]],
)
def test_baseline_of_a_test_that_was_not_selected_is_no_orphan(project, arguments):
    project.test_file(IN_CLASS)
    project.write("test_other.py", "def test_other(): pass")
    project.run("--update-baselines", passed=3)
    assert "delete the file" not in text_of(project.run(*arguments))


def test_collection_alone_reads_no_baseline(recorded):
    for path in recorded.baseline_files():
        path.write_text("not read")
    assert "not valid JSON" not in text_of(recorded.run("--collect-only"))
    assert text_of(recorded.run()).count("not valid JSON") >= 2


def test_baseline_of_a_test_that_passed_last_time_is_no_orphan(recorded):
    recorded.plant(slowdown=3, only="test-speed")
    recorded.pytester.runpytest_inprocess().assert_outcomes(passed=1, failed=1)
    result = recorded.pytester.runpytest_inprocess("--lf")
    result.assert_outcomes(failed=1)
    assert "delete the file" not in text_of(result)


COMPARES_ON_GPUS = """
def test_labels(workload, distributed_world):
    workload.check(workload.run("toy"), label=distributed_world.device.value)

def test_on_gpus(workload, distributed_world):
    if distributed_world.device == "cuda":
        workload.check(workload.run("toy"))
"""


def test_baseline_of_a_platform_that_the_test_did_not_run_on_is_no_orphan(project):
    project.test_file(COMPARES_ON_GPUS)
    project.gpus(2)
    project.run("--update-baselines", "--aorta-launches=2", passed=2)
    project.gpus(0)
    assert "delete the file" not in text_of(project.run("--aorta-fail-on=none"))


WRONG_PARAMETER = '    @pytest.mark.parametrize("x", [1])\n    def test_wrong(self): pass\n'
WRONG_MARKER = "@pytest.mark.world(ranks=2)\ndef test_wrong(workload): pass\n"


@ALONE_AND_NIGHTLY_ON_XDIST
@each_of("before, after", {"error in the class": ("", WRONG_PARAMETER), "wrong marker": (WRONG_MARKER, "")})
def test_baseline_of_a_test_that_could_not_be_collected_is_no_orphan(project, workers, before, after):
    inner, plain = IN_CLASS.split("def test_plain")
    project.test_file(IN_CLASS)
    project.run("--update-baselines", "--aorta-launches=2", passed=2)
    project.test_file(f"import pytest\n{before}{inner}{after}\ndef test_plain{plain}")
    for more in ([], ["--continue-on-collection-errors"]):
        result = project.run(*workers, *more)
        assert "test_wrong" in text_of(result)
        assert "delete the file" not in text_of(result)


UNMARKED = "{}\ndef test_one(workload): workload.check(workload.run('toy'))"


COMPARES_NOTHING = {
    "no hash": (
        {"weight_hash": None},
        "add @pytest.mark.tolerance(step_time_p50='10%'), then pytest *::test_one --aorta-ab=HEAD",
    ),
    "not reproducible": (
        {"facts": {"bitwise_reproducible": False}},
        "call torch.manual_seed(0) and *, then pytest *::test_one --update-baselines *",
    ),
}


@each_of("facts, remedy", COMPARES_NOTHING)
def test_test_that_compares_nothing_fails_with_the_step_that_makes_it_compare(versioned, facts, remedy):
    project = versioned
    project.write("test_toy.py", UNMARKED.format(""))
    project.plant()
    project.run("--update-baselines", passed=1)
    project.plant(**facts)
    shows = ["E  *Not recorded, since nothing would be compared: *", "E  *next      *, then pytest *--update-baselines"]
    project.run("--update-baselines", "--aorta-record=replace", failed=1, shows=shows)
    project.run("--update-baselines", "--aorta-record=replace", "--aorta-fail-on=none", passed=1)
    shows = ["E  *Nothing compared: *", f"E  *next      {remedy}"]
    project.run(failed=1, shows=shows)
    project.run("--aorta-fail-on=none", passed=1, shows="aorta: 1 test OK, 1 metric unchanged, *")
    # What the remedy says.
    project.plant()
    if "weight_hash" in facts:
        project.write("test_toy.py", UNMARKED.format("import pytest\n@pytest.mark.tolerance(step_time_p50='10%')"))
        project.plant(**facts, slowdown=9, reference={"slowdown": 1})
        project.run("--aorta-ab=HEAD", failed=1, shows="E  *Regression: step_time_p50 +800% (10 -> 90 ms, *")
    else:
        project.run("--update-baselines", "--aorta-record=replace", passed=1)
        project.plant(weight_hash="f" * 16)
        project.run(failed=1, shows="E  *Regression: weight_hash *")


def test_metric_that_a_marker_names_is_compared_or_fails_with_the_remedy(project):
    project.one_test("workload.check(workload.run('toy'))", "@pytest.mark.tolerance(weight_hash='exact')")
    project.run("--update-baselines", passed=1)
    project.plant(torch="2.12.0")
    again = ["--update-baselines", "--aorta-record=replace"]
    line = "Not applicable: weight_hash, other environment: torch '2.11.0' -> '2.12.0'*"
    project.run(failed=1, shows=[f"E  *{line}", f"E  *accept    pytest *::test_one {' '.join(again)}*"])
    project.run(*again, passed=1)
    project.run(passed=1)


def test_failure_names_every_metric_that_got_worse_and_does_not_blame_the_machine(recorded):
    recorded.plant(weight_hash="f" * 16, slowdown=4.24, only="test-speed")
    shows = ["E  *Regression: weight_hash *", "E  *Regression: step_time_p50 +324% (10 -> 42.4 ms, *"]
    result = recorded.run(shows=shows, passed=1, failed=1)
    assert "suspect the machine" not in text_of(result)


COSTS = {"operators": {"aten::mm": 100}, "host_copies": {}}
COPIES = COSTS | {"host_copies": {"aten::_local_scalar_dense": 1}}
LINE = "train.py:43 print(loss)"


def test_changed_cost_is_named_with_its_new_line_by_the_launch_that_failed(project):
    project.one_test("workload.check(workload.run('toy'))")
    known = {"operators": {"aten::mm": {"train.py:40 model(x)": 100}}}
    project.plant(costs=COSTS | {"places": known})
    project.run("--update-baselines", passed=1)
    project.plant(costs=COPIES | {"places": known | {"host_copies": {"aten::_local_scalar_dense": {LINE: 1}}}})
    reads = f"the host reads a value 0 -> 1 times a step (.item(), print, float) in {LINE}"
    lines = [f"E  *{reads}", f"E  *cause     + aten::_local_scalar_dense x 1 ({LINE})", "aorta: *, 1 launch*"]
    project.run(shows=lines, failed=1)


def test_cost_that_changed_within_its_limit_is_named_and_does_not_count_as_unchanged(project):
    project.one_test("workload.check(workload.run('toy'))")
    project.plant(costs={"operators": {"aten::mm": 200}})
    project.run("--update-baselines", passed=1)
    project.plant(costs={"operators": {"aten::mm": 200, "aten::sin": 1}})
    named = "test_toy::test_one: operators 200 -> 201, within its limit of 1%: + aten::sin x 1"
    project.run(shows=[named, "aorta: 1 test OK, * unchanged, 1 within its limit, *"], passed=1)


def test_names_for_annotations_are_those_of_the_package(recorded):
    recorded.test_file(
        """
from pytest_aorta import Comparison, DistributedWorld, LaunchPlan, Outcome, Verdicts, WorkloadRunner

def test_speed(workload: WorkloadRunner, distributed_world: DistributedWorld):
    assert isinstance(workload, WorkloadRunner)
    assert isinstance(distributed_world, DistributedWorld)
    verdicts: Verdicts = workload.check(workload.run("toy"))
    assert isinstance(verdicts, Verdicts)
    assert verdicts["step_time_p50"].outcome is Outcome.PASS
    assert repr(verdicts).startswith("<test_toy.py::test_speed::toy: Pass: step_time_p50 ")
    assert {one.__module__.partition(".")[0] for one in (Comparison, LaunchPlan)} == {"pytest_aorta"}
"""
    )
    recorded.run(passed=1)


@each_of(
    "marks, platforms",
    {
        "one": ("@pytest.mark.world(size=3)", "cpu-x3-gloo"),
        "two": ("@pytest.mark.world(size=4)\ndef test_four(workload): pass\n", "cpu-x2-gloo and cpu-x4-gloo"),
        "none": ("@pytest.mark.world(size=2, device='cuda')", ""),
    },
)
def test_header_shows_the_platforms_that_tests_ask_for(project, marks, platforms):
    project.test_file(f"import pytest\n\n{marks}\ndef test_one(workload, request): pass\n")
    [line] = [line for line in project.run().outlines if line.startswith("aorta: no GPU")]
    assert line.partition(", platform ")[2].partition(", ")[0] == platforms


def test_test_without_a_baseline_is_decided_by_the_other_version(versioned):
    versioned.one_test("workload.check(workload.run('toy'))")
    versioned.plant(costs=COSTS)
    versioned.run("--aorta-ab=HEAD", shows=["aorta: 1 test OK, 3 metrics unchanged, *"], passed=1)
    versioned.plant(costs=COSTS, candidate={"costs": COPIES})
    shows = ["E  *the host reads a value 0 -> 1 times a step *", "E  *baseline  HEAD, launched in turn with this code"]
    result = versioned.run("--aorta-ab=HEAD", shows=shows, failed=1)
    assert "# replaces" not in text_of(result)


def test_without_anything_to_compare_no_baseline_is_advised(project):
    project.plant(weight_hash=None)
    project.write("test_toy.py", UNMARKED.format(""))
    result = project.run(shows="E  *Nothing compared: no metric *tolerance(step_time_p50=*", failed=1)
    assert "--update-baselines" not in text_of(result)


def test_side_with_other_variables_is_launched_also_if_the_baseline_decides(project):
    project.one_test("workload.check(workload.run('toy'))")
    project.plant(costs=COPIES)
    project.run("--update-baselines", passed=1)
    project.plant(costs=COSTS, candidate={"costs": COPIES})
    project.run(shows="aorta: 1 test OK, *", passed=1)
    shows = ["E  *the host reads a value 0 -> 1 times a step *", "E  *baseline  env:NCCL_ALGO=Ring, launched in turn *"]
    project.run("--aorta-ab=env:NCCL_ALGO=Ring", shows=shows, failed=1)
