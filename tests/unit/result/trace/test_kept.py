"""The note on the traces that a launch kept."""

import pytest

from pytest_aorta.result.trace.kept import traces_note
from tests.unit.builders import write


@pytest.mark.parametrize(
    ("files", "note"),
    [(["ranks/0/trace.json.gz", "ranks/1/trace.json.gz"], "ranks/0/trace.json.gz and 1 other"), ([], "")],
)
@pytest.mark.parametrize("on_device", [True, False])
def test_note_says_where_the_traces_are_or_that_there_are_none(tmp_path, files, note, on_device):
    for name in files:
        write(tmp_path / name)
    text = "".join(traces_note(tmp_path, on_device=on_device))
    located, _, about_steps = text.partition("; ")
    assert located.endswith(note.format(tmp_path))
    # Only a device can be behind its host.
    assert about_steps.startswith("the host had no head start") == (on_device and bool(files))
