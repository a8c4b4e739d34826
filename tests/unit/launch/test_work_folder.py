"""Files that processes read and write in the folder of a script."""

from pytest_aorta.launch.work_folder import reads


def test_file_that_is_read_is_found_under_all_its_names(tmp_path):
    (tmp_path / "best.pt").write_text("weights")
    (tmp_path / "other.pt").write_text("weights")
    (tmp_path / "hard.pt").hardlink_to(tmp_path / "best.pt")
    (tmp_path / "soft.pt").symlink_to("best.pt")
    with reads(tmp_path, ["best.pt", "gone.pt", "hard.pt", "soft.pt", "other.pt"]) as read:
        (tmp_path / "hard.pt").read_text()
    assert read == {"best.pt", "hard.pt", "soft.pt"}
