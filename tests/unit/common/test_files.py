import json
import os
import signal
import string
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_aorta.common import files
from pytest_aorta.common.files import (
    ABANDONED_S,
    create_numbered_folder,
    locked,
    read_json,
    slug,
    temporary_folder,
    write_json,
)
from pytest_aorta.common.processes import terminable

ANY_TEXT = st.text(st.characters(exclude_categories=()))


@pytest.mark.parametrize("document", [{"a": object()}, {"a": float("nan")}, {"a": float("inf")}, {1: 2, "a": 3}])
def test_document_that_can_not_be_written_leaves_the_old_file_whole(tmp_path, document):
    path = tmp_path / "document.json"
    write_json(path, {"old": 1})
    with pytest.raises((TypeError, ValueError)):
        write_json(path, document)
    assert json.loads(path.read_text(encoding="utf-8")) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["document.json"]


def test_failed_replacement_leaves_no_scratch_file(tmp_path):
    folder = tmp_path / "document.json"
    folder.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(folder, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["document.json"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_written_document_is_read_back_equal(tmp_path_factory, document):
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    write_json(path, document)
    assert read_json(path, max_bytes=1 << 20) == document


@example("../../x")
@example("a\0b")
@example("x" * 4096)
@example("..")
@given(ANY_TEXT)
def test_slug_of_any_text_stays_one_plain_path_component(text):
    name = slug(text)
    assert 1 <= len(name) <= 100
    assert set(name) <= set(string.ascii_lowercase + string.digits + "-")
    assert not name.startswith("-")


def test_unfinished_files_of_killed_writers_are_deleted_at_the_next_write(tmp_path):
    old, young, other = (tmp_path / name for name in (".a.json.x1.tmp", ".a.json.x2.tmp", ".b.json.x3.tmp"))
    for path in (old, young, other):
        path.write_text("half")
    hours_ago_s = time.time() - 2 * ABANDONED_S
    for path in (old, other):
        os.utime(path, (hours_ago_s, hours_ago_s))
    write_json(tmp_path / "a.json", {})
    # The writer of a young file may still be alive, and the writer of another file deletes that file itself.
    assert {path.name for path in tmp_path.iterdir()} == {young.name, other.name, "a.json"}


def test_temporary_folders_of_killed_processes_are_deleted_by_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ["aorta-a-old", "aorta-a-young", "aorta-b-old"]
    hours_ago_s = time.time() - 2 * ABANDONED_S
    with temporary_folder("aorta-a-") as held:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "findings.json").touch()
        for path in (held, tmp_path / names[0], tmp_path / names[2]):
            os.utime(path, (hours_ago_s, hours_ago_s))
        with temporary_folder("aorta-a-"):
            assert {path.name for path in tmp_path.glob("*old")} == {"aorta-b-old"}
            assert held.exists()
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:]}


def test_lock_that_another_holder_keeps_is_not_awaited_longer_than_the_limit(tmp_path):
    held = pytest.raises(TimeoutError, match=r"another process has held .*lock for 0 s")
    with locked(tmp_path / "lock"), held, locked(tmp_path / "lock", limit_s=0):
        pytest.fail("two holders")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("operation", ["flock", "close"])
def test_interruption_while_a_lock_is_acquired_or_released_leaves_it_free(tmp_path, monkeypatch, operation, number):
    module = files.fcntl if operation == "flock" else files.os
    arrived, original = [], getattr(module, operation)

    def interrupted(*args: object) -> None:
        original(*args)
        if not arrived:
            arrived.append(number)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(module, operation, interrupted)
    with pytest.raises(KeyboardInterrupt), terminable(), locked(tmp_path / "lock"):
        pass
    assert arrived
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "lock", limit_s=0.0):
        pass


def test_lock_does_not_follow_a_link(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "lock"):
        pytest.fail("locked a link")


def test_folders_created_at_the_same_time_are_all_distinct(tmp_path):
    with ThreadPoolExecutor(8) as creators:
        folders = list(creators.map(lambda _: create_numbered_folder(tmp_path / "base", "toy"), range(200)))
    assert sorted(folder.name for folder in folders) == sorted(f"{number:02d}-toy" for number in range(1, 201))
