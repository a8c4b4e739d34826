"""``aorta bisect`` on a repository with planted commits; launches are faked."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from pytest_aorta.cli.main import main
from tests.distributed.processes import await_true, is_alive
from tests.integration.conftest import FAKE_LAUNCHER, Project
from tests.unit.builders import read_json

# The commit's file planted.json determines its launches; times have some noise.
BY_COMMIT = """
import random

planted_by_fault = planted


def planted(plan, rootpath):
    file = plan.cwd / "planted.json"
    own = json.loads(file.read_text()) if file.exists() else {}
    rng = random.Random(f"{plan.run_dir.name} of {own.get('number')}")
    noise = rng.gauss(1, own.pop("noise", 0))
    if "module" in own:
        own["weight_hash"] = (plan.reference.worktree.packages / own.pop("module")).read_text().strip()
    return planted_by_fault(plan, rootpath) | own | {"step_ms": own.get("step_ms", 10.0) * noise}
"""
EXACT = """
import pytest

@pytest.mark.tolerance(weight_hash="exact")
def test_one(workload):
    workload.check(workload.run("toy"))
"""
TIMED = """
import pytest

@pytest.mark.tolerance(step_time_p50="100%")
def test_one(workload):
    workload.check(workload.run("toy"))
"""
NODE = "test_toy.py::test_one"
HASHES = ["a" * 16, "b" * 16]


class Repository:
    """A repository whose commits determine the faked launches, with the command run inside it."""

    def __init__(self, project: Project, capfd: pytest.CaptureFixture[str]) -> None:
        self.project = project
        self._count = 0
        self._capfd = capfd

    def commit(self, **planted: object) -> None:
        """Add a commit; its number is its index in ``commits``."""
        (self.project.path / "planted.json").write_text(json.dumps(planted | {"number": self._count}))
        if self._count == 0:
            self.project.git("add", "planted.json")
        self.project.git("commit", "-qam", f"change {self._count}")
        self._count += 1

    def change_hash(self, at: int, of: int, broken: tuple[int, ...] = ()) -> None:
        """Add so many commits, whose weights are others from commit ``at`` on, and a test of the weights."""
        self.project.write("test_toy.py", EXACT)
        for number in range(of):
            self.commit(weight_hash=HASHES[number >= at], **({"raises": 1} if number in broken else {}))

    def change_time(self, at: int, of: int, noise: float) -> None:
        """Add so many commits, whose steps are four times as long from commit ``at`` on, and a test of the time."""
        self.project.write("test_toy.py", TIMED)
        for number in range(of):
            self.commit(step_ms=10.0 if number < at else 40.0, noise=noise)

    @property
    def commits(self) -> list[str]:
        """Return the hashes of all commits but the first, which contains only the workload."""
        return self.project.git("rev-list", "--first-parent", "--reverse", "HEAD").splitlines()[1:]

    def bisect(self, *options: str, good: int = 0) -> tuple[int, str]:
        """Return exit code and output of a search from commit ``good`` to the last."""
        code = main(["bisect", self.commits[good], "HEAD", *options, "--", NODE])
        return code, "".join(self._capfd.readouterr())

    def finds(self, number: int, *options: str) -> str:
        """Return the output of a search that names commit ``number``."""
        assert self.ends(1, *options) == [self.commits[number]]
        assert f"found: {self.commits[number][:7]} change {number}" in self.output
        return self.output

    def ends(self, code: int, *options: str) -> list[str]:
        """Return the commits in the result of a search that has to end with this exit code."""
        file = self.project.path / "found.json"
        ended, self.output = self.bisect(*options, "--result", str(file))
        assert ended == code, self.output
        found = read_json(file)
        assert " ".join(found["text"].split()) in re.sub(r"\s+(E\s+)?", " ", self.output)
        commits: list[str] = found["changes"]
        return commits


@pytest.fixture
def repository(versioned: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Repository:
    versioned.pytester.makeconftest(FAKE_LAUNCHER + BY_COMMIT)
    monkeypatch.chdir(versioned.path)
    return Repository(versioned, capfd)


def test_commit_that_changes_bits_is_found_with_one_launch_per_step_and_confirmed(repository):
    repository.change_hash(at=21, of=33)
    output = repository.finds(21)
    assert "Regression: weight_hash (" in output
    assert f" -> b{'b' * 11}, " in output
    assert f"; A/B with {repository.commits[20][:12]}" in output
    assert len(re.findall(r"change \d+: ", output)) <= 6


def test_slower_commit_is_found_in_noise_and_confirmed_against_the_one_before(repository):
    repository.change_time(at=6, of=17, noise=0.05)
    output = repository.finds(6)
    assert re.search(r"found: \w+ change 6\nE? +Regression: step_time_p50 \+", output)
    assert f"; A/B with {repository.commits[5][:12]}" in output


def test_commits_that_do_not_start_are_skipped_and_named_with_the_one_that_starts(repository):
    repository.change_hash(at=5, of=9, broken=(4, 5))
    assert repository.ends(1) == repository.commits[4:7]
    assert "found: one of 3 commits, of which only the last starts" in repository.output
    for number in (4, 5):
        assert f"skipped {repository.commits[number][:7]} change {number}: " in repository.output
    assert "ValueError: boom" in repository.output


def test_commit_that_started_before_is_launched_again_if_a_launch_fails(repository):
    repository.change_hash(at=2, of=4)
    # The good commit in its second launch.
    repository.project.plant(by_launch={"3": {"raises": 0}})
    assert "skipped" not in repository.finds(2)


def test_bits_that_differ_from_launch_to_launch_end_the_search(repository):
    repository.project.write("test_toy.py", EXACT)
    repository.commit()
    repository.commit(weight_hash=HASHES[1])
    # The good commit in its second launch.
    repository.project.plant(by_launch={"3": {"weight_hash": "c" * 16}})
    assert repository.ends(1) == []
    assert "undecided: launches of the good side differ" in repository.output


@pytest.mark.parametrize(("broken", "side"), [(0, "good"), (3, "bad")])
def test_end_that_does_not_start_ends_the_search_with_its_reason(repository, broken, side):
    repository.change_hash(at=4, of=4, broken=(broken,))
    code, output = repository.bisect()
    assert code == 1
    assert "boom" in output
    assert side == "good" or "the bad side" in output


def test_setup_runs_once_per_commit_and_its_packages_come_first(repository):
    repository.project.write("test_toy.py", EXACT)
    script = repository.project.write(
        "build.py",
        """
import sys
from pathlib import Path
hashed = Path("source.txt").read_text()
assert "broken" not in hashed, "does not compile"
Path(sys.argv[1], "compiled").write_text(hashed)
with open(sys.argv[2], "a") as runs:
    runs.write(sys.argv[3] + "\\n")
""",
    )
    runs = repository.project.path / "runs.txt"
    repository.project.git("add", script.name)
    for number in range(8):
        source = repository.project.write("source.txt", "broken" if number == 3 else HASHES[number >= 3])
        repository.project.git("add", source.name)
        repository.commit(module="compiled")
    setup = ["--setup", f"python build.py {{packages}} {runs} {{commit}}"]
    assert repository.ends(1, *setup) == repository.commits[3:5]
    assert "found: one of 2 commits" in repository.output
    built = runs.read_text().splitlines()
    assert len(built) == len(set(built))
    # Another search with the same setup reuses everything that has been built.
    repository.project.write("test_toy.py", EXACT + "\n")
    assert repository.ends(1, *setup) == repository.commits[3:5]
    assert sorted(runs.read_text().splitlines()) == sorted(built)


def test_tolerance_of_the_search_takes_precedence_over_the_markers_of_the_test(repository):
    repository.change_time(at=2, of=3, noise=0.001)
    repository.project.run("--update-baselines")
    assert repository.ends(0, "--tolerance", "step_time_p50=900%") == []
    assert "not found: the ends do not differ" in repository.output
    assert "change 1" not in repository.output
    assert "unused" not in repository.output
    repository.finds(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["HEAD", "HEAD"], "is not before"),
        (["nowhere", "HEAD"], "SIDE nowhere: 'nowhere' is not a commit of this clone; if it"),
        (["HEAD", "HEAD~1"], "is not before"),
        (["HEAD~1", "HEAD", "--setup", "no-such-program x"], "'no-such-program' is not a program on the path"),
        (["HEAD~1", "HEAD", "--setup", "echo 'x"], "allowed are words, quoted as for a shell"),
        (["HEAD~1", "HEAD", "--metric", "speed"], "--metric: invalid choice: 'speed' (choose from 'step_time_p50'"),
        (["HEAD~1", "HEAD", "--tolerance", "weight_hash"], "allowed is METRIC=VALUE"),
        (["HEAD~1", "HEAD", "--result", "/nowhere/found.json"], "--result: got '/nowhere/found.json', allowed is"),
        (["HEAD~1", "HEAD", "--result", "."], "--result: got '.', allowed is a file in a folder"),
        (["HEAD~1", "HEAD", "--", "--update-baselines"], "--update-baselines: this command writes no baselines of"),
        (["HEAD~1", "HEAD", "--", "-n2"], "-n can't be used in a search"),
    ],
)
def test_wrong_command_line_launches_nothing(repository, capfd, arguments, message):
    repository.commit()
    repository.commit()
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["bisect", *arguments, "--", NODE]))
    assert ended.value.code == 2
    assert message in "".join(capfd.readouterr())
    assert not (repository.project.path / "results").exists()


def test_merge_is_searched_on_the_line_of_first_parents(repository):
    repository.project.write("test_toy.py", EXACT)
    project = repository.project
    repository.commit(weight_hash=HASHES[0])
    project.git("checkout", "-qb", "feature")
    project.git("commit", "-q", "--allow-empty", "-m", "on the branch")
    project.git("checkout", "-q", "-")
    repository.commit(weight_hash=HASHES[0])
    project.git("merge", "-q", "--no-ff", "--no-commit", "feature")
    repository.commit(weight_hash=HASHES[1])
    repository.commit(weight_hash=HASHES[1])
    output = repository.finds(2)
    assert "3 commits after" in output
    assert "this is a merge; to search its branch: aorta bisect" in output


def test_pytest_ends_when_the_command_that_started_it_is_killed(repository):
    repository.commit(sleeps=100)
    repository.commit()
    file = repository.project.path / "pid"
    write = f"import os, pathlib\npathlib.Path({str(file)!r}).write_text(str(os.getpid()))\n"
    repository.project.write("test_toy.py", write + EXACT)
    command = [sys.executable, "-m", "pytest_aorta.cli", "bisect", "HEAD~1", "HEAD", "--", NODE]
    with subprocess.Popen(command, cwd=repository.project.path) as started:
        await_true(lambda: file.exists() and file.read_text())
        started.kill()
    try:
        await_true(lambda: not is_alive(int(file.read_text())), limit_s=10)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_more_than_one_test_is_refused(repository, capfd):
    repository.project.write("test_toy.py", EXACT + EXACT.replace("test_one", "test_two"))
    repository.commit()
    repository.commit()
    assert main(["bisect", "HEAD~1", "HEAD", "--", "test_toy.py"]) == 2
    assert "one test has to be selected, and these arguments select 2" in "".join(capfd.readouterr())
