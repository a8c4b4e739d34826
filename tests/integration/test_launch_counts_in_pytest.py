"""The number of launches for a noisy metric, the outcome, and the report of a run."""

from xml.etree import ElementTree

import pytest

from tests.unit.builders import each_of

# Slowdowns by launch: after three launches, no further launch could decide.
RESTLESS = [1.07, 1, 1.2, 0.9, 1.02]


def text_of(result: pytest.RunResult) -> str:
    return result.stdout.str()


@pytest.fixture
def restless(learned):
    learned.plant(slowdown=RESTLESS)
    return learned


def assert_inconclusive(result: pytest.RunResult) -> None:
    assert result.ret == 0
    assert result.parseoutcomes() == {"inconclusive": 1}


@pytest.mark.parametrize(
    ("slowdown", "launched", "outcome"),
    [
        (1.04, 1, "pass"),
        ([1.07, 1], 3, "pass"),
        (1.2, 3, "regression"),
        (0.8, 3, "improved"),
        (RESTLESS, 3, "inconclusive"),
    ],
)
def test_launches_are_as_many_as_a_verdict_needs(learned, slowdown, launched, outcome):
    learned.plant(slowdown=slowdown)
    learned.run("-v", shows=[f"  {outcome} *step_time_p50 * limit 5%*", f"aorta: 1 *test*, {launched} launch*"])


@pytest.mark.parametrize(("option", "launched"), [(2, 1), (7, 3)])
def test_option_limits_the_launches_and_fewer_than_three_never_fail(learned, option, launched):
    learned.plant(slowdown=1.2 if option < 3 else [*RESTLESS, 1.3, 0.8])
    result = learned.run(f"--aorta-max-launches={option}")
    assert_inconclusive(result)
    result.stdout.fnmatch_lines([f"aorta: 1 test, 1 inconclusive, 1 metric unchanged, {launched} launch*"])


def test_exact_metric_is_final_with_one_launch(learned):
    learned.plant(weight_hash="f" * 16)
    result = learned.run(
        shows=["E  *Regression: weight_hash *", "aorta: 1 of 1 test failed, 1 regression, *"], failed=1
    )
    assert "WARNING" not in text_of(result)
    assert "--aorta-ab" not in text_of(result)


def test_inconclusive_test_passes_with_a_letter_a_count_and_a_warning(restless):
    result = restless.run("--junitxml=report.xml")
    assert_inconclusive(result)
    suite = ElementTree.parse(restless.path / "report.xml").getroot()[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["1", "0", "0", "0"]
    properties = {entry.get("name"): entry.get("value") for entry in suite[0].find("properties")}
    assert properties["aorta.step_time_p50"].startswith("Inconclusive: step_time_p50 +7.0% (10 -> 10.7 ms, limit 5%)")
    restless.run("-v", shows="test_toy.py::test_one INCONCLUSIVE *")
    result.stdout.fnmatch_lines(
        [
            "test_toy.py I *",
            "test_toy::test_one: Inconclusive: step_time_p50 +7.0% (*); further launches could not decide",
            "WARNING: speed was not decided; --aorta-ab=REF or --aorta-max-launches=12 can decide; *-inconclusive*",
            "aorta: 1 test, 1 inconclusive, 1 metric unchanged, 3 launches*",
            "*= 1 inconclusive in *",
        ]
    )


def test_strict_run_fails_an_inconclusive_test_and_says_what_to_do(restless):
    shows = [
        "E  *Inconclusive: step_time_p50 +7.0% (10 -> 10.7 ms, limit 5%)",
        "E  *measured  toy on toy-gpu-x2-nccl, 4 steps, 3 launches, 95% *% to +*%",
        "E  *cause     further launches could not decide",
        "E  *confirm   pytest *::test_one --aorta-fail-on=inconclusive --aorta-ab=HEAD",
    ]
    restless.run("--aorta-fail-on=inconclusive", shows=shows, failed=1)


def test_xdist_carries_inconclusive(restless):
    pytest.importorskip("xdist")
    result = restless.pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n1", timeout=150)
    assert_inconclusive(result)
    result.stdout.fnmatch_lines(["WARNING: speed was not decided; *", "aorta: 1 test, 1 inconclusive, *"])


def test_inconclusive_test_neither_stops_a_run_nor_is_a_last_failure(restless):
    source = restless.read("test_toy.py")
    restless.write("test_toy.py", source + "\ndef test_two(): assert False\n")
    first = restless.pytester.runpytest_inprocess("-x")
    assert first.parseoutcomes() == {"inconclusive": 1, "failed": 1}
    again = restless.pytester.runpytest_inprocess("--lf")
    assert again.parseoutcomes()["failed"] == 1
    assert "inconclusive" not in again.parseoutcomes()


def test_regression_reports_everything_that_is_known(gpu):
    stable = {"waits": {"0": 2.0, "1": 2.0}}
    gpu.plant(**stable)
    gpu.run("--update-baselines", passed=1)
    gpu.plant(slowdown=1.2, waits={"0": 4.0, "1": 2.0})
    shows = [
        "E  *rank 1 is late: others wait 2 ms/step longer for it than in the baseline",
        "E  *Regression: step_time_p50 +20.0% (10 -> 12 ms, limit 5%), suspect rank 1",
        "E  *measured  toy on toy-gpu-x2-nccl, 4 steps, 3 launches, 95% +1*% to +2*%",
        f"E  *baseline  {gpu.baselines}/toy-gpu-x2-nccl/test-toy-py-test-one-toy-*.json",
        "E  *confirm   pytest test_toy.py::test_one --aorta-ab=HEAD",
        "E  *accept    pytest test_toy.py::test_one --update-baselines --aorta-record=replace  # replaces the baseline",
        "test_toy::test_one",
        "  regression *step_time_p50 *10 -> 12 ms * +20.0% [[]+1*%, +2*%]  limit 5%",
        "  note: rank 1 is late: others wait *",
        "FAILED test_toy.py::test_one - rank 1 is late: others wait *",
    ]
    gpu.run("-v", shows=shows, failed=1)


def test_growth_of_memory_is_reported_also_of_a_test_that_passes(learned):
    learned.plant(memory_growth=0.5)
    learned.run(shows="aorta: 1 test OK, 2 metrics unchanged, * [[]-v for 1 note[]]", passed=1)
    learned.run("-v", shows="  note: memory grows within a launch by at least *%; look for a leak")


def test_improvement_fails_where_asked_and_says_how_to_record_it(learned):
    learned.plant(slowdown=0.8)
    learned.run(passed=1)
    shows = [
        "E  *Improved: step_time_p50 -20.0% (10 -> 8 ms, limit 5%)",
        "E  *accept    pytest *::test_one * --update-baselines --aorta-record=replace  # replaces the baseline",
    ]
    learned.run("--aorta-fail-on=improved", shows=shows, failed=1)


FURTHER_FAILURES = {
    "raises": (
        {"by_launch": {"2": {"raises": 1}}},
        ["--aorta-results=kept"],
        [
            "LaunchError: toy on 2 cuda ranks: rank exception: rank 1 failed first: ValueError: boom",
            "plan, logs and stacks: */kept/test-toy-py-test-one-*/02-toy-*",
        ],
    ),
    "own checks": (
        {"by_launch": {"2": {"wrong": 1}}},
        [],
        ["WorkloadFailed: toy: 1 of its own checks failed on toy-gpu-x2-nccl"],
    ),
    "reference": (
        {"reference": {"raises": 0}},
        ["--aorta-ab=HEAD"],
        ["LaunchError: toy at HEAD on 2 cuda ranks: rank exception: rank 0 failed first: *"],
    ),
}


@each_of("fault, options, lines", FURTHER_FAILURES)
def test_further_launch_that_fails_fails_the_test_with_its_evidence(versioned_gpu, fault, options, lines):
    versioned_gpu.plant(slowdown=1.2, **fault)
    versioned_gpu.run(
        *options, shows=[*(f"E  *{line}" for line in lines), "aorta: 1 of 1 test failed, *, * launches*"], failed=1
    )


COMPARE = "workload.compare(workload.run('toy', step_ms={}), workload.run('toy'))"


@pytest.mark.parametrize(
    ("step_ms", "arguments", "launched", "outcome"),
    [(10.1, [], 4, "pass"), (12, [], 6, "regression"), (10.7, ["--aorta-max-launches=2"], 4, "inconclusive")],
)
def test_comparison_launches_both_in_alternating_order_until_there_is_a_verdict(
    gpu, step_ms, arguments, launched, outcome
):
    gpu.one_test(COMPARE.format(step_ms))
    lines = [f"  {outcome} *step_time_p50 * limit 5%*", f"aorta: 1 *test*, {launched} launches*"]
    gpu.run("-v", "--aorta-results=kept", *arguments, shows=lines)
    plans = sorted((gpu.path / "kept").rglob("plan.json"))
    order = [True, False, False, True, True, False][:launched]
    assert [f'"step_ms": {step_ms}' in path.read_text() for path in plans] == order


def test_comparison_that_decides_nothing_says_what_to_do(gpu):
    gpu.one_test(COMPARE.format(10.7))
    result = gpu.run(
        "--aorta-max-launches=2",
        "--aorta-fail-on=inconclusive",
        failed=1,
        shows="E  *confirm   pytest *::test_one * --aorta-max-launches=12",
    )
    assert "--aorta-ab=HEAD" not in text_of(result)


UNDECIDED = {
    "one launch decides": (1, [""], [], "passed"),
    "machine is slow": (
        1.2,
        ["", "", "HEAD", "HEAD", ""],
        ["  pass *step_time_p50 *12 -> 12 ms *: A/B with HEAD", "aorta: 1 test OK, 2 metrics unchanged, 5 launches*"],
        "passed",
    ),
    "nothing decides": (
        [1.2, 1.3, 0.8, 1.5, 1, 0.7, 1.2, 1, 1.6, 0.9, 1, 1.3, 0.8],
        ["", *["", "HEAD", "HEAD", ""] * 3],
        ["  inconclusive *step_time_p50 *: A/B with HEAD", "aorta: 1 test, *, 13 launches*"],
        "inconclusive",
    ),
}


@each_of("slowdown, planned, lines, outcome", UNDECIDED)
def test_reference_version_is_launched_where_the_baseline_does_not_decide(
    versioned_gpu, slowdown, planned, lines, outcome
):
    versioned_gpu.plant(slowdown=slowdown)
    result = versioned_gpu.run("-v", "--aorta-ab=HEAD", "--aorta-results=kept", shows=lines)
    assert result.parseoutcomes() == {outcome: 1}
    assert versioned_gpu.planned() == planned


def test_change_against_the_reference_version_is_a_regression(versioned_gpu):
    versioned_gpu.git("commit", "--allow-empty", "-qm", "new")
    versioned_gpu.plant(candidate={"slowdown": 1.2})
    shows = [
        "E  *Regression: step_time_p50 +20.0% (10 -> 12 ms, limit 5%)",
        "E  *measured  *, 3 launches, 95% +*% to +*%",
        "E  *baseline  HEAD, launched in turn with this code",
        "  regression *step_time_p50 *: A/B with HEAD",
        "aorta: 1 of 1 test failed, 1 regression, 1 metric unchanged, 7 launches*",
    ]
    result = versioned_gpu.run("-v", "--aorta-ab=HEAD", "--aorta-results=kept", shows=shows, failed=1)
    assert "--aorta-ab" not in text_of(result)
    assert versioned_gpu.planned() == ["", "", "HEAD", "HEAD", "", "", "HEAD"]
    result = versioned_gpu.pytester.runpytest_subprocess("-p", "no:cacheprovider", "--aorta-ab=HEAD~1")
    result.stdout.fnmatch_lines(["E  *moved     code: * -> *; both were launched in turn"])


SURE = {"deterministic_algorithms": True, "bitwise_reproducible": True}
UNSURE = {"deterministic_algorithms": False, "bitwise_reproducible": False}
LAST = {"4": "4" * 16}


LOST = {
    "reproducibility": (
        {"candidate": {"facts": UNSURE, "weight_hash": "f" * 16}, "reference": {"facts": SURE}},
        "deterministic_algorithms is False, but True in the reference",
    ),
    "hash of a step": (
        {"candidate": {"weight_hashes": LAST}, "reference": {"weight_hashes": {"2": "2" * 16, **LAST}}},
        "the launch has no hash of 1 step for which the reference has one: 2",
    ),
}


@each_of("plant, line", LOST)
def test_what_the_code_lost_since_the_reference_fails_a_comparison_by_the_test(versioned_gpu, plant, line):
    versioned_gpu.one_test("a = workload.run('toy'); workload.compare(a, distributed_world.again(a, reference=True))")
    versioned_gpu.plant(**plant)
    versioned_gpu.run("--aorta-ab=HEAD", shows=f"E  *Missing: weight_hash, A/B with HEAD, {line}", failed=1)
