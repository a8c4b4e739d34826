import pytest

from tests.unit.builders import read_json

AGAIN = """
import pytest

def test_again(workload, distributed_world):
    first = workload.run("toy", steps=6)
    for reference in (True, False, True):
        result = distributed_world.again(first, reference=reference)
        assert result.config["steps"] == 6
    assert distributed_world.again(result).config["steps"] == 6
"""


def plans(project) -> list[dict]:
    return [read_json(path) for path in sorted((project.path / "kept").rglob("plan.json"))]


def test_reference_is_launched_from_the_commit(versioned):
    versioned.test_file(AGAIN)
    versioned.run("--aorta-ab=HEAD", "--aorta-results=kept", passed=1)
    found = plans(versioned)
    assert [(plan.get("reference") or {}).get("name") for plan in found] == [None, "HEAD", None, "HEAD", "HEAD"]
    folders = {plan["spec"]["folder"] for plan in found if "reference" in plan}
    assert folders == {f"{found[1]['reference']['root']}/workloads/toy"}
    assert found[1]["reference"]["worktree"]["commit"] == versioned.git("rev-parse", "HEAD")


def test_results_have_the_commit_branch_and_state_of_the_code_that_ran(versioned):
    versioned.test_file(AGAIN)
    commit = versioned.git("rev-parse", "HEAD")
    source = versioned.path / versioned.git("ls-files", "*.yaml").splitlines()[0]
    source.write_text(source.read_text() + "\n# changed after the commit\n")
    versioned.run("--aorta-ab=HEAD", "--aorta-results=kept", passed=1)
    results = [read_json(path) for path in sorted((versioned.path / "kept").glob("*/*/result.json"))]
    found = [
        (each["provenance"]["commit"], each["provenance"]["branch"], each["provenance"]["dirty"]) for each in results
    ]
    tested, reference = (commit, versioned.git("branch", "--show-current"), True), (commit, None, False)
    assert found == [tested, reference, tested, reference, reference]


def test_workers_of_xdist_share_the_worktree(versioned):
    pytest.importorskip("xdist")
    versioned.write("test_toy.py", AGAIN + AGAIN.replace("test_again", "test_more").replace("import pytest", ""))
    result = versioned.pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "-n2", "--dist=each", "--aorta-ab=HEAD", "--aorta-results=kept"
    )
    result.assert_outcomes(passed=4)
    assert len({plan["reference"]["root"] for plan in plans(versioned) if "reference" in plan}) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere", "'nowhere' is not a commit of this clone; *fetch*"),
        ("python:/absent", "there is no program /absent"),
    ],
)
def test_reference_that_does_not_exist_is_a_usage_error_even_if_no_test_needs_it(versioned, reference, message):
    versioned.one_test("pass")
    versioned.refused(f"--aorta-ab={reference}", shows=f"ERROR: --aorta-ab={reference}: {message}")
    assert versioned.run(f"--aorta-ab={reference}", "--collect-only").ret == 0


def test_result_of_another_test_is_not_launched_again(versioned):
    versioned.test_file(
        """
import copy

kept = []

def test_first(workload):
    kept.append(workload.run("toy"))

def test_second(distributed_world):
    distributed_world.again(kept[0])

def test_copy(workload, distributed_world):
    distributed_world.again(copy.copy(workload.run("toy")))
"""
    )
    result = versioned.run(passed=1, failed=2)
    message = "E  *SpecError: result of 'toy': not launched by this test, so it can't be repeated"
    result.stdout.fnmatch_lines([message, message])
