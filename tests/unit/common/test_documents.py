import os
import socket
from pathlib import Path

import pytest

from pytest_aorta.common.files import UnreadableFile, parse_json, read_bytes, read_json, read_regular
from pytest_aorta.common.model import write_json_rows
from pytest_aorta.common.strict_yaml import read_yaml

MAX_BYTES = 10_000
NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")


def read_error(tmp_path, content: bytes, reader=read_json, **keywords) -> str:
    path = tmp_path / "document"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile) as caught:
        reader(path, **({"max_bytes": MAX_BYTES} | keywords))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [("absent", "No such file"), (".", "Is a directory")])
def test_path_without_a_file_is_named_with_the_reason(tmp_path, name, reason):
    with pytest.raises(UnreadableFile, match=rf"{tmp_path / name}: can't be read: {reason}"):
        read_json(tmp_path / name, max_bytes=MAX_BYTES)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ": empty"),
        (b"  \n\t", ": empty"),
        *(
            (text, "not valid JSON")
            for text in (b'{"a": 1', b'{"a":', b'"a', b"{'a': 1}", b'{"a": 1} {"b": 2}', b"[1,]")
        ),
        *((f'{{"a": [{text}]}}'.encode(), f"{text} is not a finite number") for text in NOT_FINITE),
        (b'{"a": {"b": [[0.0, 1e999, -1e999]]}}', "1e999 is not a finite number"),
        (b"1" * 5000, "not valid JSON"),
        (b"[" * 9_000, "not valid JSON"),
        (b'{"a": 1, "n": {"b": 1, "c": 2, "b": 1}}', "key 'b' is given twice"),
        (b" " * 10_001, "larger than the 10,000 bytes allowed"),
        ('{"a": "é"}'.encode("latin-1"), "not UTF-8"),
    ],
)
def test_file_that_is_not_strict_json_is_refused_with_the_reason(tmp_path, content, reason):
    assert reason in read_error(tmp_path, content)


def test_integer_without_a_float_is_refused():
    with pytest.raises(UnreadableFile, match=r"here: not valid JSON: 10+ is not a finite number"):
        parse_json(f"[1.5, 1{'0' * 400}]", "here")


def test_document_written_in_rows_is_read_back_equal(tmp_path):
    document = {"b": [1.5, 2], "a": {"d": None, "c": "x\ny"}}
    write_json_rows(tmp_path / "rows.json", document)
    assert read_json(tmp_path / "rows.json", max_bytes=MAX_BYTES) == document
    assert (tmp_path / "rows.json").read_text(encoding="utf-8").splitlines()[2] == '"b": [1.5,2]'


@pytest.mark.parametrize("reader", [read_json, read_yaml])
def test_conflict_of_a_merge_is_named_with_its_line_and_what_to_do(tmp_path, reader):
    conflict = b'{\n<<<<<<< HEAD\n"a": 1\n=======\n"a": 2\n>>>>>>> other\n}\n'
    text = read_error(tmp_path, conflict, reader)
    assert "conflict markers of git from line 2 on; keep one side, by git checkout --ours or --theirs" in text
    assert "markers of git" not in read_error(tmp_path, b'{"a": <<<<<<< ', reader)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a:\n  steps: 1\n  steps: 2\n", "key 'steps' is given twice"),
        # Tags that would run code.
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("a: !!python/name:os.system", "not valid YAML"),
        ("a: !own 1", "not valid YAML"),
        *((text, "not valid YAML") for text in ("a: [1", "a: b: c", "a: \x01", "a: *nobody", "? [x]\n: 1", "[" * 600)),
        # Scalars with impossible values.
        *((text, "not valid YAML") for text in ("a: 2026-13-45", "a: 0x_", "a: 2026-01-02T99:00:00Z")),
        ("a: 1".ljust(MAX_BYTES + 1), "larger than"),
    ],
)
def test_file_that_is_not_strict_yaml_is_refused_with_the_reason(tmp_path, text, reason):
    assert reason in read_error(tmp_path, text.encode(), read_yaml)


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
        read_bytes(Path("file"), max_bytes=10)


def test_link_is_followed_where_the_user_has_made_the_file(tmp_path):
    make_link(tmp_path / "file")
    assert read_json(tmp_path / "file", max_bytes=10) == {}


def test_no_more_than_the_limit_is_read(tmp_path):
    (tmp_path / "file").write_text("12345")
    assert read_regular(tmp_path / "file", 3) == b"123"
