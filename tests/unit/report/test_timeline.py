"""Drawings: the schedule of a step by stream, both sides, and as SVG."""

import pytest

from pytest_aorta.report.timeline import drawn_schedules, svg
from pytest_aorta.result.trace.schedule import play
from tests.unit.report.elements import Elements
from tests.unit.step_graphs import fsdp_step


def bars(row) -> dict[str, int]:
    return {found.kind: len(found.spans) for found in row.bars if found.spans}


def test_schedule_is_drawn_by_stream_and_what_compute_does_not_hide_is_exposed():
    drawing = drawn_schedules([play(fsdp_step())])
    assert [row.name for row in drawing.rows] == ["compute", "all-gather", "reduce-scatter"]
    _, gathers, scatters = drawing.rows
    assert bars(gathers) == {"all_gather": 10, "exposed": 2}
    assert bars(scatters) == {"reduce_scatter": 5, "exposed": 1}
    exposed = next(found for found in scatters.bars if found.kind == "exposed")
    assert exposed.texts == ["reduce_scatter of layers.0 after aten::mm of layers.0, call 2"]
    # The gather of the first layer waits for nothing.
    assert [(start, end) for _, start, end in drawing.arrows] == [(0, 1), (0, 2)]
    assert drawing.end == pytest.approx(play(fsdp_step()).step_ms)


def test_other_side_is_below_and_collectives_in_line_are_on_the_stream_of_compute():
    drawing = drawn_schedules([play(fsdp_step(in_line=True)), play(fsdp_step())])
    names = ["compute", "compute, before", "all-gather, before", "reduce-scatter, before"]
    assert [row.name for row in drawing.rows] == names
    assert bars(drawing.rows[0]) == {"compute": 12, "exposed": 18}
    assert {start for _, start, _ in drawing.arrows} == {1}


def test_svg_is_well_formed_names_each_row_and_ends_each_arrow_at_a_collective():
    drawing = drawn_schedules([play(fsdp_step())])
    text = svg([("a <b>", drawing)])
    found = Elements(text)
    assert (found.wrong, found.open) == ([], [])
    assert {"a <b>", "all-gather", "reduce scatter"} <= {*found.texts["text"]}
    assert text.count("marker-end") == len(drawing.arrows)


def test_nothing_is_drawn_without_a_schedule():
    assert drawn_schedules([None, None]) is None
