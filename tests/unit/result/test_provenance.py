import calendar
import os
import time

import pytest

from pytest_aorta.plan.reference import Reference
from pytest_aorta.result import provenance as module
from pytest_aorta.result.provenance import (
    block_id,
    code_version,
    provenance,
)
from pytest_aorta.result.reading import collect_result, read_result
from pytest_aorta.verdict.baseline import StoredLaunch, read_baseline_file, write_baseline
from tests.unit.builders import (
    ENDED_WELL,
    git,
    make_baseline,
    make_plan,
    rank_values,
    write_ranks,
)


@pytest.fixture
def repository(tmp_path):
    code_version.cache_clear()
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_version_has_commit_and_branch_and_is_dirty_if_a_tracked_file_differs(repository):
    (repository / "notes.txt").write_text("note")
    commit = git(repository, "rev-parse", "HEAD")
    assert code_version(repository) == (commit, "main", False)
    (repository / "train.py").write_text("lr = 2\n")
    # Git is asked once per folder.
    assert code_version(repository) == (commit, "main", False)
    code_version.cache_clear()
    assert code_version(repository) == (commit, "main", True)


def test_sandbox_without_proc_sys_has_a_session_block(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "hidden")
    assert len(module.block_id()) == 12


def test_version_is_unknown_without_a_repository_or_git(repository, tmp_path, monkeypatch):
    code_version.cache_clear()
    assert code_version(tmp_path) == (None, None, None)
    monkeypatch.setenv("PATH", str(repository))
    assert code_version(repository) == (None, None, None)


def test_git_that_takes_too_long_leaves_the_version_unknown(repository, monkeypatch):
    program = repository / "git"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{repository}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "_GIT_S", 0.2)
    began_s = time.monotonic()
    assert code_version(repository) == (None, None, None)
    assert time.monotonic() - began_s < 30


def test_git_does_not_refresh_the_index(repository):
    index = repository / ".git" / "index"
    os.utime(repository / "train.py", (1, 1))
    before = index.read_bytes()
    code_version(repository)
    assert index.read_bytes() == before


def test_another_environment_runs_the_working_tree_and_is_named(repository):
    reference = Reference("python:/x", "/x", repository, prefix=repository, differs="torch 2.12.1 -> 2.13.0")
    found = provenance(repository, (), reference)
    assert (found.commit, found.branch) == code_version(repository)[:2]
    assert found.side == f"{reference.name}: {reference.differs}"


def test_provenance_is_of_now_and_of_this_host(repository):
    found = provenance(repository)
    assert (found.block, found.branch) == (block_id(), "main")
    measured_s = calendar.timegm(time.strptime(found.measured_at, module.UTC_FORMAT))
    assert abs(time.time() - measured_s) < 60


def test_command_of_the_plan_is_in_the_result_and_in_a_baseline(tmp_path):
    write_ranks(tmp_path, rank_values(), rank_values())
    command = ("pytest", "-k", "\udce9 |")
    collect_result(make_plan(tmp_path, command=command), ENDED_WELL)
    result = read_result(tmp_path / "result.json")
    assert result.provenance.command == ["pytest", "-k", r"\udce9 |"]
    stored = make_baseline(launches=(StoredLaunch(result.facts),), config=result.config)
    path = write_baseline(tmp_path / "baselines", stored)
    assert read_baseline_file(path).launches[0].facts.provenance.command == result.provenance.command
