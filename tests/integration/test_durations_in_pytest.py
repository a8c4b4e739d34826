import pytest

PHASES = {"start": 1.5, "import": 1.25, "init": 0.5, "run": 2.0, "leave": 0.75}
THREE_LAUNCHES = """
def test_two(workload):
    for wall_s in (1.0, 6.0):
        workload.run("toy", fault={"wall_s": wall_s, "phases_s": PHASES})

def test_script(workload):
    workload.run_script("train.py")
"""


@pytest.fixture
def three(project):
    project.write("train.py", "")
    project.test_file(f"PHASES = {PHASES}\n{THREE_LAUNCHES}")
    return project


def table(result: pytest.RunResult) -> list[list[str]]:
    """Return the words of the lines below the table's title."""
    lines = result.stdout.lines
    first = lines.index("launches in seconds, longest first:") + 1
    return [line.split() for line in lines[first : first + 5]]


EXPECTED = [
    ["test", "launch", "launcher", "wall", "start", "import", "init", "run", "leave"],
    ["test_toy::test_two", "2", "torchrun", "6.00", "1.50", "1.25", "0.50", "2.00", "0.75"],
    ["test_toy::test_two", "1", "torchrun", "1.00", "1.50", "1.25", "0.50", "2.00", "0.75"],
    ["test_toy::test_script", "1", "torchrun", "0.25", "-", "-", "-", "-", "-"],
    ["total", "3", "7.25", "3.00", "2.50", "1.00", "4.00", "1.50"],
]


def test_durations_of_launches_are_shown_longest_first_with_their_total(three):
    assert table(three.run("--durations=0")) == EXPECTED


@pytest.mark.parametrize(("options", "shown"), [(["--durations=2"], 2), (["--durations=0", "--durations-min=5"], 1)])
def test_durations_are_limited_as_those_of_pytest_and_the_total_is_of_all_launches(three, options, shown):
    lines = three.run(*options).stdout.lines
    first = lines.index(f"launches in seconds, longest first ({shown} of 3):") + 1
    assert [line.split() for line in lines[first : first + shown + 2]] == [*EXPECTED[: shown + 1], EXPECTED[-1]]


def test_durations_are_not_shown_unasked_or_without_launches(three):
    for options in ([], ["--durations-min=0.1"]):  # as in pytest, the minimum alone shows nothing
        text = three.run(*options).stdout.str()
        assert "aorta: 2 tests, 2 tests without a comparison, 3 launches in 7.2s" in text
        assert "longest first" not in text
    three.test_file("def test_nothing(): pass")
    assert "longest first" not in three.run("--durations=0").stdout.str()


def test_durations_travel_from_workers(three):
    pytest.importorskip("xdist")
    result = three.pytester.runpytest_subprocess("-n2", "--durations=0", timeout=150)
    assert table(result) == EXPECTED
