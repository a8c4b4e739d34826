from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pytest_aorta.common.files import UnreadableFile, read_json, read_regular


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    (path.parent / "target").write_text("{}")
    path.symlink_to(path.parent / "target")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [make_fifo, make_link, make_socket, Path.mkdir])
def test_only_regular_files_of_a_rank_are_read(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # the path of a socket is limited to 107 bytes
    make(Path("file"))
    with pytest.raises(OSError, match=r"regular file|No such device|Is a directory"):
        read_regular(Path("file"), 10)
    with pytest.raises(UnreadableFile, match="file: can't be read: "):
        read_json(Path("file"), max_bytes=10, follow_links=False)


def test_link_is_followed_where_the_user_has_made_the_file(tmp_path):
    make_link(tmp_path / "file")
    assert read_json(tmp_path / "file", max_bytes=10) == {}


def test_no_more_than_the_limit_is_read(tmp_path):
    (tmp_path / "file").write_text("12345")
    assert read_regular(tmp_path / "file", 3) == b"123"
