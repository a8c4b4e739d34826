import pytest

from pytest_aorta.common.errors import LaunchError
from pytest_aorta.launch import guarded
from pytest_aorta.launch.guarded import GuardedLaunch, _clear_scratch, launch, prepare_folder
from tests.unit.builders import make_plan


def test_launch_that_can_not_begin_names_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    prepare_folder(make_plan(tmp_path / "taken"))
    for plan, said in (
        (make_plan(tmp_path / "file" / "run"), rf"^results folder {tmp_path}/file/run can't be written: Not a dir"),
        (make_plan(tmp_path / "taken"), "can't be written: File exists"),
        (make_plan(tmp_path / "run", cwd=tmp_path / "absent"), r"the guard can't be started in .*/absent: No such"),
    ):
        with pytest.raises(LaunchError, match=said):
            launch(plan, {})


def test_unfinished_files_and_torchruns_folder_are_deleted_after_a_launch(tmp_path):
    prepare_folder(make_plan(tmp_path / "run"))
    (tmp_path / "run" / "torchelastic" / "none_x" / "attempt_0").mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "ranks" / "0"):
        (folder / ".result.json.abc.tmp").write_text("half")
        (folder / "output.log").write_text("kept")
    _clear_scratch(tmp_path / "run")
    left = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert left == {"plan.json", "output.log", "ranks/0/output.log"}
    assert not (tmp_path / "run" / "torchelastic").exists()


class StoppableGuard:
    """A guard and the clock of the process that watches it.

    Each of ``looks`` is the seconds since the last look, and whether the guard is stopped; then the time limit is over.
    """

    pid = 0

    def __init__(self, *looks: tuple[float, bool]) -> None:
        self.looks = iter(looks)
        self.now_s = 0.0
        self.is_stopped = False
        self.is_killed = False

    def monotonic(self) -> float:
        return self.now_s

    def is_readable(self, *_: object) -> bool:
        elapsed_s, self.is_stopped = next(self.looks, (3600.0, False))
        self.now_s += elapsed_s
        return False

    def wait(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("looks", "is_killed"),
    [
        pytest.param([(1.0, True)] * 12, True, id="the guard alone was stopped"),
        pytest.param([(1.0, True)] * 8 + [(1.0, False)] + [(1.0, True)] * 8, False, id="it went on in between"),
        pytest.param([(1.0, False), (50.0, True), (0.1, False)], False, id="its watcher was stopped with it"),
    ],
)
def test_guard_is_killed_only_after_it_was_seen_stopped_for_ten_seconds(tmp_path, monkeypatch, looks, is_killed):
    guard = StoppableGuard(*looks)
    monkeypatch.setattr(guarded, "time", guard)
    monkeypatch.setattr(guarded, "is_readable", guard.is_readable)
    monkeypatch.setattr(guarded, "is_stopped", lambda _: guard.is_stopped)
    with GuardedLaunch(make_plan(tmp_path / "run", timeout_s=600.0), {}, lambda *_: guard) as launched:
        launched.wait()
    assert guard.is_killed is is_killed
