import subprocess

import pytest
from msgspec.structs import replace

from pytest_aorta.common.errors import LaunchError, LeaseError
from pytest_aorta.launch.guarded import GuardedLaunch, _clear_scratch, launch, prepare_folder
from pytest_aorta.launch.leases import Lease, lease
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


def test_devices_of_a_process_that_could_not_be_ended_stay_leased(tmp_path):
    def take() -> Lease:
        return lease(("cpu-0",), 1, exclusive=False, wait_s=0.1, folder=tmp_path / "leases", owner="first")

    def report(_plan: object, _environ: object, *fds: int) -> subprocess.Popen[bytes]:
        verdict = '{"reason": "exit", "agent_status": 0, "stopped": [], "survivors": [17], "wall_s": 1.0}'
        return subprocess.Popen(["echo", verdict], pass_fds=fds, stdout=fds[-1])

    with take() as held, GuardedLaunch(replace(make_plan(tmp_path / "run"), lease_fds=held.fds), {}, report) as ran:
        ran.wait()
    assert ran.outcome().survivors == (17,)
    with pytest.raises(LeaseError, match="cpu-0 held by first"):
        take()
