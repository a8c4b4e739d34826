"""Baselines and results on hostile disks: a file has its old or its new content; no other file is touched."""

import json
import multiprocessing
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_aorta.common.errors import BaselineError, ResultError
from pytest_aorta.common.model import to_builtins
from pytest_aorta.launch.guarded import launch, prepare_folder
from pytest_aorta.result.diagnosis import FailureKind, launch_failure
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import collect_result
from pytest_aorta.verdict.baseline import Baseline, baseline_path, orphans, read_baseline, write_baseline
from tests.unit.builders import make_facts, make_plan, make_rank, write
from tests.unit.builders import stored as stored_launches

PLATFORM = "cpu-x2-gloo"
CASE = "tests/test_a.py::test_x::fsdp"
NUM_KILLS = 30
NUM_REWRITES = 25
# Steps enough that writing takes a while and that the small disks are too small.
NUM_STEPS = 2_000
SMALL_BYTES = 16_384
FORK = multiprocessing.get_context("fork")
# A program that calls a function of this file.
ROOT = Path(__file__).parents[2]
PROGRAM = "import tests.distributed.test_files_survive as t; t.{call}"
# Without --map-root-user, a process can't even read its own files.
MAY_NOTHING = ("unshare", "--user")


def make_baseline(seed: int = 0, num_steps: int = NUM_STEPS) -> Baseline:
    """Return a baseline whose numbers all depend on the seed."""
    facts = make_facts(
        step_time_ms=dict.fromkeys(("mean", "p50", "p99", "tail5"), float(1 + seed)),
        weight_hashes={str(step): f"{seed:016x}" for step in range(num_steps)},
        final_loss=float(1 + seed),
    )
    return Baseline(CASE, CASE.rpartition("::")[0], PLATFORM, "fsdp", {"seed": seed}, stored_launches(facts))


def rewrite(folder: Path, seeds: range, times: int) -> None:
    """Write one baseline after the other to the same path."""
    for number in range(times):
        write_baseline(folder, make_baseline(seeds[number % len(seeds)]))


def writer(folder: Path, seeds: range, times: int) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=rewrite, args=(folder, seeds, times))
    process.start()
    return process


def stored(folder: Path) -> Path:
    return write_baseline(folder, make_baseline())


def assert_whole(folder: Path, seeds: range) -> None:
    baseline = read_baseline(folder, PLATFORM, CASE)
    assert baseline is not None
    assert baseline == make_baseline(baseline.config["seed"])
    assert baseline.config["seed"] in seeds


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if not path.is_dir())


def refusal(folder: Path, baseline: Baseline) -> str:
    """Return the error text of a run that records ``baseline``, and check that it names the file.

    A run reads what is stored before it writes.
    """
    with pytest.raises(BaselineError) as caught:  # noqa: PT012 - either of the two may raise it
        read_baseline(folder, PLATFORM, CASE)
        write_baseline(folder, baseline)
    assert str(caught.value).startswith(f"{baseline_path(folder, PLATFORM, CASE)}: ")
    return str(caught.value)


def in_namespace(namespace: tuple[str, ...], call: str) -> None:
    """Call a function of this file in a separate process in ``namespace``."""
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    command = [*namespace, sys.executable, "-c", PROGRAM.format(call=call)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_baseline_is_whole_whenever_its_writer_is_killed(tmp_path):
    path, rng = stored(tmp_path), random.Random(0)
    for _ in range(NUM_KILLS):
        process, before = writer(tmp_path, range(3), 10_000), path.stat().st_ino
        while path.stat().st_ino == before:
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        assert_whole(tmp_path, range(3))
    assert [file.name for file in tmp_path.glob("*/*.json")] == [path.name]
    [unused] = orphans(tmp_path, set(), {CASE.rpartition("::")[0]: {CASE}}, {}, tmp_path)
    assert unused.startswith(f"{path}: unused: the test tests/test_a.py::test_x does not exist; delete the file")


def test_baseline_written_by_two_processes_is_one_of_theirs(tmp_path):
    path = stored(tmp_path)
    writers = [writer(tmp_path, seeds, NUM_REWRITES) for seeds in (range(1, 3), range(3, 5))]
    while any(process.is_alive() for process in writers):
        assert_whole(tmp_path, range(5))
    assert [process.exitcode for process in writers] == [0, 0]
    assert_whole(tmp_path, range(1, 5))
    assert files_below(tmp_path) == [path.name]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit the size of every written file to SMALL_BYTES."""
    old_limits, old_handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, old_limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
    signal.signal(signal.SIGXFSZ, old_handler)


def test_baseline_over_the_limit_of_file_sizes_leaves_the_old_one_and_nothing_else(tmp_path, small_files):
    path = write_baseline(tmp_path, make_baseline(num_steps=1))
    assert "not written: File too large" in refusal(tmp_path, make_baseline(1))
    assert read_baseline(tmp_path, PLATFORM, CASE) == make_baseline(num_steps=1)
    assert files_below(tmp_path) == [path.name]


def test_link_instead_of_a_baseline_is_replaced_and_its_target_untouched(tmp_path):
    outside = stored(tmp_path / "outside")
    content = outside.read_bytes()
    path = baseline_path(tmp_path / "baselines", PLATFORM, CASE)
    path.parent.mkdir(parents=True)
    path.symlink_to(outside)
    write_baseline(tmp_path / "baselines", make_baseline(1))
    assert outside.read_bytes() == content
    assert not path.is_symlink()
    assert_whole(tmp_path / "baselines", range(1, 2))


def test_platform_folder_that_leads_outside_is_refused(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / PLATFORM).symlink_to(tmp_path / "outside")
    assert f"is a link out of {tmp_path / 'baselines'}, to {tmp_path / 'outside'}" in refusal(
        tmp_path / "baselines", make_baseline()
    )
    assert files_below(tmp_path / "outside") == []


def test_platform_that_is_a_path_upwards_is_refused(tmp_path):
    with pytest.raises(BaselineError, match="is a link out of"):
        write_baseline(tmp_path / "baselines", make_baseline().replace(platform="../outside"))
    assert files_below(tmp_path) == []


def test_baselines_folder_may_be_a_link_itself(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "baselines").symlink_to(tmp_path / "elsewhere")
    stored(tmp_path / "baselines")
    assert_whole(tmp_path / "elsewhere", range(1))


def test_platform_folder_that_links_to_itself_is_refused(tmp_path):
    (tmp_path / PLATFORM).symlink_to(PLATFORM)
    assert "not written: File exists" in refusal(tmp_path, make_baseline())


def test_link_to_an_unreadable_baseline_is_not_replaced(tmp_path):
    outside = tmp_path / "outside.json"
    write(outside, "{")
    path = baseline_path(tmp_path / "baselines", PLATFORM, CASE)
    path.parent.mkdir(parents=True)
    path.symlink_to(outside)
    assert "not valid JSON" in refusal(tmp_path / "baselines", make_baseline())
    assert path.readlink() == outside


def check_forbidden(folder: str) -> None:
    assert "Permission denied" in refusal(Path(folder), make_baseline(1))


@pytest.mark.parametrize("part", ["file", "platform folder"])
def test_baseline_without_read_permission_is_not_overwritten(tmp_path, part):
    path = stored(tmp_path)
    content, locked = path.read_bytes(), path if part == "file" else path.parent
    mode = locked.stat().st_mode
    locked.chmod(0)
    in_namespace(MAY_NOTHING, f"check_forbidden({str(tmp_path)!r})")
    locked.chmod(mode)
    assert path.read_bytes() == content
    assert files_below(tmp_path) == [path.name]


def test_results_folder_that_is_lost_while_ranks_run_hides_no_verdict(tmp_path):
    verdict = '{"reason": "exit", "agent_status": 1, "stopped": [], "survivors": [], "wall_s": 1.0}'

    def start_guard(plan, environ, *fds):
        shutil.rmtree(plan.run_dir)
        return subprocess.Popen(["echo", verdict], stdout=fds[-1])

    plan = make_plan(tmp_path / "run")
    outcome = launch(plan, {}, start_guard)
    assert (outcome.reason, outcome.agent_status) == ("exit", 1)
    failure = launch_failure(plan, outcome)
    assert failure is not None
    assert failure.kind == FailureKind.RESULTS_DELETED


def test_result_that_can_not_be_stored_is_an_error_with_its_path(tmp_path, small_files):
    plan = make_plan(tmp_path / "run")
    prepare_folder(plan)
    # Each rank's file is smaller than the limit, and both together are larger.
    times = [1.0] * (SMALL_BYTES // 8)
    for rank in range(plan.world.size):
        text = json.dumps(to_builtins(make_rank(times, environment={"torch": "2.11.0"})))
        write(plan.run_dir / "ranks" / str(rank) / "result.json", text)
    with pytest.raises(ResultError, match=r"run/result\.json can't be written: File too large"):
        collect_result(plan, LaunchOutcome("exit", 0, (), (), 1.0))
    assert not (plan.run_dir / "result.json").exists()
