from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.documents import UnreadableFile, parse_json, read_json
from pytest_aorta.common.files import write_json_rows
from pytest_aorta.common.strict_yaml import read_yaml

MAX_BYTES = 10_000
ANY_TEXT = st.text(st.characters(exclude_categories=()))


def read_error(tmp_path, content: bytes, reader=read_json, **keywords) -> str:
    path = tmp_path / "document"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile) as caught:
        reader(path, **({"max_bytes": MAX_BYTES} | keywords))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_json_document_is_read(tmp_path):
    path = tmp_path / "document"
    path.write_text('{"a": [1, 2.5, null, "é"]}', encoding="utf-8")
    assert read_json(path, max_bytes=MAX_BYTES) == {"a": [1, 2.5, None, "é"]}


def test_missing_json_file_is_named(tmp_path):
    path = tmp_path / "absent.json"
    with pytest.raises(UnreadableFile, match="can't be read: No such file") as caught:
        read_json(path, max_bytes=MAX_BYTES)
    assert str(path) in str(caught.value)


def test_folder_instead_of_a_file_is_unreadable(tmp_path):
    with pytest.raises(UnreadableFile, match="Is a directory"):
        read_json(tmp_path, max_bytes=MAX_BYTES)


@pytest.mark.parametrize("content", [b"", b"  \n\t"])
def test_empty_json_is_called_empty(tmp_path, content):
    assert read_error(tmp_path, content).endswith(": empty")


@pytest.mark.parametrize("content", [b'{"a": 1', b'{"a":', b'"a', b"{'a': 1}", b'{"a": 1} {"b": 2}', b"[1,]"])
def test_truncated_or_loose_json_is_refused(tmp_path, content):
    assert "not valid JSON" in read_error(tmp_path, content)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_number_that_is_not_finite_is_refused_by_its_text(tmp_path, number):
    assert f"{number} is not a finite number" in read_error(tmp_path, f'{{"a": [{number}]}}'.encode())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        lambda items: st.lists(items) | st.dictionaries(st.text(), items),
        max_leaves=10,
    )
)
def test_every_finite_document_is_read(document):
    assert parse_json(json.dumps(document), "here") == document


# The sum of each row is not finite either.
@pytest.mark.parametrize("row", ["[1e308, 1e308]", "[1.5, 1e308, 1e308, -1e308]", f"[1.5, 1{'0' * 300}]"])
def test_large_numbers_are_finite_although_their_sum_is_not(row):
    assert parse_json(row, "here") == json.loads(row)


def test_integer_without_a_float_is_refused():
    with pytest.raises(UnreadableFile, match=r"here: not valid JSON: 10+ is not a finite number"):
        parse_json(f"[1.5, 1{'0' * 400}]", "here")


def test_infinities_do_not_cancel_out():
    with pytest.raises(UnreadableFile, match="1e999 is not a finite number"):
        parse_json('{"a": {"b": [[0.0, 1e999, -1e999]]}}', "here")


def test_document_written_in_rows_is_read_back_equal(tmp_path):
    document = {"b": [1.5, 2], "a": {"d": None, "c": "x\ny"}}
    write_json_rows(tmp_path / "rows.json", document)
    assert read_json(tmp_path / "rows.json", max_bytes=MAX_BYTES) == document
    assert (tmp_path / "rows.json").read_text(encoding="utf-8").splitlines()[2] == '"b": [1.5,2]'


def test_number_of_too_many_digits_is_refused(tmp_path):
    assert "not valid JSON" in read_error(tmp_path, b"1" * 5000)


@pytest.mark.parametrize("reader", [read_json, read_yaml])
def test_conflict_of_a_merge_is_named_with_its_line_and_what_to_do(tmp_path, reader):
    conflict = b'{\n<<<<<<< HEAD\n"a": 1\n=======\n"a": 2\n>>>>>>> other\n}\n'
    text = read_error(tmp_path, conflict, reader)
    assert "conflict markers of git from line 2 on; keep one side, by git checkout --ours or --theirs" in text
    assert "markers of git" not in read_error(tmp_path, b'{"a": <<<<<<< ', reader)


def test_repeated_json_key_is_named(tmp_path):
    assert "key 'b' is given twice" in read_error(tmp_path, b'{"a": 1, "n": {"b": 1, "c": 2, "b": 1}}')


def test_json_larger_than_allowed_reports_the_limit(tmp_path):
    assert "larger than the 10,000 bytes allowed" in read_error(tmp_path, b" " * 10_001)


def test_json_of_exactly_the_allowed_size_is_read(tmp_path):
    path = tmp_path / "document"
    path.write_bytes(b"1".rjust(MAX_BYTES))
    assert read_json(path, max_bytes=MAX_BYTES) == 1


def test_deeply_nested_json_is_refused(tmp_path):
    assert "not valid JSON" in read_error(tmp_path, b"[" * 200_000, max_bytes=1 << 20)


def test_json_that_is_not_utf8_is_refused(tmp_path):
    assert "not UTF-8" in read_error(tmp_path, '{"a": "é"}'.encode("latin-1"))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    path.write_bytes(content)
    for reader in (read_json, read_yaml):
        with suppress(UnreadableFile):
            reader(path, max_bytes=MAX_BYTES)


def test_repeated_yaml_key_is_named(tmp_path):
    assert "key 'steps' is given twice" in read_error(tmp_path, b"a:\n  steps: 1\n  steps: 2\n", read_yaml)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.getcwd []", "a: !!python/name:os.system", "a: !own 1"])
def test_yaml_tag_that_would_run_code_is_refused(tmp_path, text):
    assert "not valid YAML" in read_error(tmp_path, text.encode(), read_yaml)


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "a: \x01", "a: *nobody", "? [x]\n: 1"])
def test_malformed_yaml_is_refused(tmp_path, text):
    assert "not valid YAML" in read_error(tmp_path, text.encode(), read_yaml)


@pytest.mark.parametrize("text", ["a: 2026-13-45", "a: 0x_", "a: 2026-01-02T99:00:00Z"])
def test_yaml_scalar_with_an_impossible_value_is_refused(tmp_path, text):
    assert "not valid YAML" in read_error(tmp_path, text.encode(), read_yaml)


def test_deeply_nested_yaml_is_refused(tmp_path):
    assert "not valid YAML" in read_error(tmp_path, b"[" * 1_500, read_yaml)


def test_yaml_larger_than_allowed_is_refused(tmp_path):
    assert "larger than" in read_error(tmp_path, b"a: 1".ljust(MAX_BYTES + 1), read_yaml)
