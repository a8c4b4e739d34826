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


LATER = {STARTED: 102.0, IMPORTED: 103.0, SET_UP: 106.0, RAN: 111.0}


@pytest.mark.parametrize(
    ("ranks", "began_s", "phases"),
    [
        ([WHOLE, LATER], 100.0, {"start": 2.0, "import": 2.0, "init": 3.0, "run": 6.0, "leave": 1.5}),
        ([{STARTED: 101.0, RAN: 110.0}], 100.0, {"start": 1.0, "leave": 2.5}),
        ([WHOLE, {}], 100.0, {}),
        ([WHOLE, {STARTED: 101.0}], 100.0, {"start": 1.0}),
        ([WHOLE, {STARTED: 101.0, IMPORTED: 103.0}], 100.0, {"start": 1.0, "import": 2.0}),
        ([WHOLE | {SET_UP: 90.0}], 105.0, {"start": 0.0, "import": 2.0, "init": 0.0, "run": 20.0, "leave": 2.5}),
    ],
    ids=["slowest rank", "script", "no mark", "ended in import", "ended in init", "clock set back"],
)
def test_phases_are_those_that_every_rank_has_ended_and_of_the_slowest(tmp_path, ranks, began_s, phases):
    assert phases_s(folders(tmp_path, *ranks), began_s, 112.5) == phases


def test_rank_that_never_was_there_leaves_no_phase(tmp_path):
    assert phases_s([*folders(tmp_path, WHOLE), tmp_path / "absent"], 100.0, 112.0) == {}


@pytest.mark.parametrize(
    "text", [b"ran", b"ran 12", b"ran x\n", b"ran " + b"9" * 400 + b"\n", b"\xff\x00\n", b"ran \xc2\xb2\n", b"x" * 9999]
)
def test_what_is_no_mark_is_left_out(tmp_path, text):
    [folder] = folders(tmp_path, {STARTED: 101.0})
    with (folder / "marks").open("ab") as file:
        file.write(text)
    assert phases_s([folder], 100.0, 112.0) == {"start": 1.0}


def test_marks_are_read_as_left_and_a_failed_mark_does_not_end_the_rank(tmp_path):
    began_s = time.time()
    for name in (STARTED, IMPORTED):
        leave_mark(tmp_path, name)
    phases = phases_s([tmp_path], began_s, time.time())
    assert set(phases) == {"start", "import"}
    assert all(0 <= value < 60 for value in phases.values())
    leave_mark(tmp_path / "absent", STARTED)
