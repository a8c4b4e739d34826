"""The places of lines that a failure names."""

from pytest_aorta.worker.lines import shown
from tests.unit.builders import as_rank_of, make_plan


def test_paths_are_those_from_the_folder_of_the_launch_which_a_script_may_leave(tmp_path, monkeypatch):
    (tmp_path / "outputs").mkdir()
    as_rank_of(make_plan(tmp_path / "run", cwd=tmp_path), monkeypatch)
    monkeypatch.chdir(tmp_path / "outputs")
    found = [shown(str(path)) for path in (tmp_path / "package" / "train.py", "/own/train.py", "/a/b/c/train.py")]
    assert found == ["package/train.py", "/own/train.py", "b/c/train.py"]
