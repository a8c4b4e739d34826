from __future__ import annotations

import time

import pytest

from pytest_aorta.result.outcome import IMPORTED, RAN, SET_UP, STARTED, leave_mark, phases_s


def folders(tmp_path, *ranks: dict[str, float]):
    """Return one folder per rank, with marks at these seconds."""
    paths = [tmp_path / str(number) for number in range(len(ranks))]
    for path, marks in zip(paths, ranks, strict=True):
        path.mkdir()
        lines = [f"{name} {int(time_s * 1e9)}\n" for name, time_s in marks.items()]
        (path / "marks").write_text("".join(lines))
    return paths


WHOLE = {STARTED: 101.0, IMPORTED: 103.0, SET_UP: 104.0, RAN: 110.0}


def test_phases_are_those_of_the_slowest_rank(tmp_path):
    other = {STARTED: 102.0, IMPORTED: 103.0, SET_UP: 106.0, RAN: 111.0}
    phases = phases_s(folders(tmp_path, WHOLE, other), 100.0, 112.5)
    assert phases == {"start": 2.0, "import": 2.0, "init": 3.0, "run": 6.0, "leave": 1.5}


def test_script_has_the_phases_start_and_leave_only(tmp_path):
    assert phases_s(folders(tmp_path, {STARTED: 101.0, RAN: 110.0}), 100.0, 111.0) == {"start": 1.0, "leave": 1.0}


@pytest.mark.parametrize(
    ("marks", "known"),
    [
        ([], []),
        ([STARTED], ["start"]),
        ([STARTED, IMPORTED], ["start", "import"]),
        ([STARTED, IMPORTED, SET_UP], ["start", "import", "init"]),
    ],
)
def test_phases_that_a_rank_did_not_end_are_left_out(tmp_path, marks, known):
    failed = {name: WHOLE[name] for name in marks}
    assert list(phases_s(folders(tmp_path, WHOLE, failed), 100.0, 112.0)) == known


def test_rank_that_never_was_there_leaves_no_phase(tmp_path):
    assert phases_s([*folders(tmp_path, WHOLE), tmp_path / "absent"], 100.0, 112.0) == {}


def test_clock_that_was_set_back_gives_no_negative_time(tmp_path):
    assert phases_s(folders(tmp_path, WHOLE | {SET_UP: 90.0}), 105.0, 105.0) == {
        "start": 0.0,
        "import": 2.0,
        "init": 0.0,
        "run": 20.0,
        "leave": 0.0,
    }


@pytest.mark.parametrize(
    "text", [b"ran", b"ran 12", b"ran x\n", b"ran " + b"9" * 400 + b"\n", b"\xff\x00\n", b"ran \xc2\xb2\n", b"x" * 9999]
)
def test_what_is_no_mark_is_left_out(tmp_path, text):
    [folder] = folders(tmp_path, {STARTED: 101.0})
    with (folder / "marks").open("ab") as file:
        file.write(text)
    assert phases_s([folder], 100.0, 112.0) == {"start": 1.0}


def test_marks_are_read_as_they_are_left(tmp_path):
    began_s = time.time()
    for name in (STARTED, IMPORTED):
        leave_mark(tmp_path, name)
    phases = phases_s([tmp_path], began_s, time.time())
    assert set(phases) == {"start", "import"}
    assert all(0 <= value < 60 for value in phases.values())


def test_mark_that_can_not_be_left_does_not_end_the_rank(tmp_path):
    leave_mark(tmp_path / "absent", STARTED)
