"""``aorta bisect`` on a repository with planted commits; launches are faked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_aorta.cli.main import main
from tests.distributed.processes import await_true
from tests.integration.conftest import FAKE_LAUNCHER, Project

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
    if (rootpath / "slow").exists():
        import time
        time.sleep(0.5)
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

    def __init__(self, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
        self.project = project
        self._count = 0
        self._capsys = capsys

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
        return code, "".join(self._capsys.readouterr())

    def finds(self, number: int, *options: str) -> str:
        """Return the output of a search that names commit ``number``."""
        code, output = self.bisect(*options)
        assert code == 0, output
        assert f"found: {self.commits[number][:12]} change {number}" in output
        return output

    def log(self) -> Path:
        [path] = (self.project.path / "results/bisect").glob("*/log.jsonl")
        return path

    def events(self, kind: str) -> list[dict]:
        entries = [json.loads(line) for line in self.log().read_text().splitlines()[1:]]
        return [entry["event"] for entry in entries if entry["event"]["kind"] == kind]

    def launched(self) -> list[int]:
        """Return the numbers of the commits that were launched beside the good commit, or alone."""
        return [event["commit"] for event in self.events("probe") if event["before"] is None]

    def confirming(self) -> list[tuple[int, int]]:
        """Return the numbers of both commits of each pair that confirms the named one."""
        return [(event["commit"], event["before"]) for event in self.events("probe") if event["before"] is not None]


@pytest.fixture
def repository(versioned: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Repository:
    versioned.pytester.makeconftest(FAKE_LAUNCHER + BY_COMMIT)
    monkeypatch.chdir(versioned.path)
    return Repository(versioned, capsys)


def test_commit_that_changes_bits_is_found_in_few_launches(repository):
    repository.change_hash(at=21, of=33)
    output = repository.finds(21)
    assert "weight_hash differs from that of the good commit; probability 99.99% or more" in output
    assert len(repository.launched()) <= 10


def test_slower_commit_is_found_in_noise_and_the_table_shows_each_probe(repository):
    repository.change_time(at=6, of=17, noise=0.05)
    output = repository.finds(6)
    [end] = repository.events("end")
    assert f"step_time_p50 {100 * end['change']:+.1f}%" in output
    assert end["low"] < 3 < end["high"]
    assert end["probability"] >= 0.99
    confirming = repository.confirming()
    assert confirming == [(6, 5)] * 5
    assert "or more, confirmed in 5 pairs with the commit before" in output
    assert output.count(f"pair with {repository.commits[5][:12]}: {repository.commits[6][:12]} change 6") == 5
    assert sum(row["launches"] for row in end["probed"]) == len(repository.launched()) + 2 * len(confirming)
    assert {row["commit"] for row in end["probed"]} >= {5, 6}
    [confirmed] = {entry["candidate"]["step_time_ms"]["p50"] // 30 for entry in repository.events("probe")[-5:]}
    assert confirmed == 1


def test_ends_that_do_not_differ_are_reported_and_no_other_commit_is_launched(repository):
    repository.change_time(at=5, of=5, noise=0.001)
    code, output = repository.bisect()
    assert code == 1
    assert "not found: the ends do not differ (2 pairs)" in output
    assert set(repository.launched()) == {4}


def test_commits_that_do_not_start_are_skipped_and_named_with_the_one_that_starts(repository):
    repository.change_hash(at=5, of=9, broken=(4, 5))
    code, output = repository.bisect()
    assert code == 0, output
    assert "found: one of 3 commits, of which only the last starts" in output
    [end] = repository.events("end")
    assert end["suspects"] == [4, 5, 6]
    assert {event["commit"] for event in repository.events("skip")} <= {4, 5}
    assert "ValueError: boom" in output


def test_commit_that_started_before_is_launched_again_if_a_launch_fails(repository):
    repository.change_hash(at=2, of=4)
    # The good commit in the second pair of the ends, and the named commit in its second launch.
    repository.project.plant(by_launch={number: {"raises": 0} for number in ("4", "8")})
    repository.finds(2)
    assert not repository.events("skip")


@pytest.mark.parametrize("broken", [0, 3], ids=["good", "bad"])
def test_end_that_does_not_start_ends_the_search_with_its_reason(repository, broken):
    repository.change_hash(at=4, of=4, broken=(broken,))
    code, output = repository.bisect()
    assert code == 1
    assert "pytest ended before the search:" in output
    assert "boom" in output
    assert not repository.events("end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_search_goes_on_from_its_log_and_launches_no_probe_again(repository, number):
    repository.change_hash(at=11, of=17)
    repository.project.write("slow", "")
    command = [sys.executable, "-m", "pytest_aorta.cli", "bisect", repository.commits[0], "HEAD", "--", NODE]
    process = subprocess.Popen(command, cwd=repository.project.path, stdout=subprocess.DEVNULL)
    await_true(lambda: count_probes(repository) >= 3)
    if number == signal.SIGKILL:
        # Only pytest is killed.
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), number)
        assert process.wait(150) == 1
    else:
        process.send_signal(number)
        assert process.wait(150) == 128 + number
    before = repository.launched()
    (repository.project.path / "slow").unlink()
    repository.finds(11)
    assert repository.launched()[: len(before)] == before
    # A commit is launched once, apart from the two pairs of the ends and both commits beside the change.
    assert len(set(repository.launched())) == len(repository.launched()) - 3


def test_ended_search_prints_its_result_again_without_a_launch(repository):
    repository.change_hash(at=2, of=4)
    assert repository.bisect()[0] == 0
    log = repository.log().read_bytes()
    (repository.project.path / "conftest.py").unlink()
    code, output = repository.bisect()
    assert code == 0
    assert f"found: {repository.commits[2][:12]}" in output
    assert repository.log().read_bytes() == log


def test_malformed_log_is_an_error_that_names_the_line(repository):
    repository.change_hash(at=2, of=3)
    assert repository.bisect()[0] == 0
    repository.log().write_text(repository.log().read_text()[:-40])
    code, output = repository.bisect()
    assert code == 2
    assert "log.jsonl, line 6: not valid JSON" in output
    assert "delete the folder to search from the beginning" in output


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
    code, output = repository.bisect(*setup)
    assert code == 0, output
    [end] = repository.events("end")
    assert end["suspects"] in ([3, 4], [4])
    built = runs.read_text().splitlines()
    assert len(built) == len(set(built))
    # Another search with the same setup reuses everything that has been built.
    repository.project.write("test_toy.py", EXACT + "\n")
    assert repository.bisect(*setup, "--results=elsewhere")[0] == 0
    assert sorted(runs.read_text().splitlines()) == sorted(built)


def test_tolerance_of_the_search_takes_precedence_over_the_markers_of_the_test(repository):
    repository.change_time(at=2, of=3, noise=0.001)
    code, output = repository.bisect("--tolerance", "step_time_p50=900%")
    assert code == 1
    assert "not found: the ends do not differ" in output
    repository.finds(2, "--results=elsewhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["HEAD", "HEAD"], "GOOD and BAD are the same commit"),
        (["nowhere", "HEAD"], "GOOD: 'nowhere' is not a commit of this clone; if it"),
        (["HEAD", "HEAD~1"], "is not on the line of first parents of BAD"),
        (["HEAD~1", "HEAD", "--setup", "no-such-program x"], "'no-such-program' is not a program on the path"),
        (["HEAD~1", "HEAD", "--setup", "echo 'x"], "allowed is a command, quoted as for a shell"),
        (["HEAD~1", "HEAD", "--setup", "true", "--environments", "here"], "allowed is a folder outside of it"),
        (["HEAD~1", "HEAD", "--metric", "speed"], "--metric: got 'speed', allowed is one of step_time_p50"),
        (["HEAD~1", "HEAD", "--tolerance", "weight_hash"], "allowed is METRIC=VALUE"),
    ],
)
def test_wrong_command_line_launches_nothing(repository, capsys, arguments, message):
    repository.commit()
    repository.commit()
    assert main(["bisect", *arguments, "--", NODE]) == 2
    assert message in "".join(capsys.readouterr())
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


def test_more_than_one_test_is_refused(repository, capsys):
    repository.project.write("test_toy.py", EXACT + EXACT.replace("test_one", "test_two"))
    repository.commit()
    repository.commit()
    assert main(["bisect", "HEAD~1", "HEAD", "--", "test_toy.py"]) == 1
    assert "one test has to be selected, and these arguments select 2" in "".join(capsys.readouterr())


def count_probes(repository: Repository) -> int:
    logs = list((repository.project.path / "results/bisect").glob("*/log.jsonl"))
    return sum('"kind":"probe"' in line for log in logs for line in log.read_text().splitlines())
