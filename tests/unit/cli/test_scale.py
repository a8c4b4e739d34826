"""``aorta scale``: the table and what explains it, of results that were computed by hand."""

import re

import pytest

from pytest_aorta.cli.main import main, parser
from pytest_aorta.cli.scale import Point, explanations, panels, scheduled, table
from pytest_aorta.result.trace.profiled_steps import CollectiveCost
from pytest_aorta.result.trace.schedule import play
from pytest_aorta.result.trace.step_graph import Work
from tests.unit.step_graphs import fsdp_step


def point(size, gathered, *, reduced=None, memory=None, padded="", steps=5, multiplying=3):
    rows = [CollectiveCost("all_gather", 4, size, "float32", gathered)]
    rows += [] if reduced is None else [CollectiveCost("all_reduce", 1, 2, "float32", reduced)]
    return Point(
        size,
        rows,
        operators=100 * size,
        flops=7,
        memory_bytes=memory,
        padded=padded,
        steps=steps,
        multiplying={"mm": multiplying},
    )


def test_the_table_has_a_line_and_a_bar_for_each_size():
    lines = table([point(2, 1 << 20), point(1024, 4 << 20, memory=3 << 20)])
    assert [line.split()[0] for line in lines] == ["ranks", "2", "1,024"]
    assert [line.count("#") for line in lines] == [0, 6, 24]
    assert "1 MiB" in lines[1]
    assert "3 MiB" in lines[2]


@pytest.mark.parametrize(
    ("points", "shows"),
    [
        ((point(2, 100), point(8, 100)), []),
        (
            (point(2, 100), point(8, 200, padded="embedding.weight")),
            ["bytes of all_gather +100%: padding", "embedding"],
        ),
        ((point(2, 100, memory=9.0), point(8, 100, memory=9.0)), ["2 -> 8 ranks: peak memory stops falling"]),
        ((point(2, 100, memory=9.0), point(8, 100, memory=5.0)), []),
        ((point(2, 100, reduced=1 << 20), point(8, 100, reduced=4 << 20)), ["bytes of all_reduce +300%"]),
        ((point(2, 100, steps=24), point(8, 100, steps=6)), ["6 steps at 8 ranks, 24 at 2: the data are split"]),
        ((point(2, 100, steps=6), point(8, 100, steps=24)), []),
        ((point(2, 100), point(8, 100, multiplying=4)), ["* 8 ranks: another kind", ": 4 calls of mm, 3 at 2"]),
    ],
)
def test_what_stops_falling_is_explained(points, shows):
    *lines, groups = explanations(points)
    text = "\n".join(lines)
    assert bool(lines) == bool(shows)
    assert all(part in text for part in shows)
    assert groups.startswith("groups at 8 ranks: all_gather over 8")


def scaled(size: int) -> Point:
    """Return a step of six layers whose collectives run over so many ranks."""
    graph = fsdp_step()
    nodes = [node.replace(group_size=size) if node.work is Work.COLLECTIVE else node for node in graph.nodes]
    return Point(size, (), 1, 1, None, "", graph=graph.replace(nodes=nodes))


def test_schedule_tells_where_communication_hides_no_longer_and_which_work_hides_it():
    points = [scaled(size) for size in (2, 8, 64, 1024)]
    title, _, *rows = scheduled(points)
    assert title == "on the nominal machine:"
    cells = [re.split(r"  +", row) for row in rows[:4]]
    assert [float(row[1]) for row in cells] == sorted((float(row[1]) for row in cells), reverse=True)
    assert [row[3] == "0 ms" for row in cells] == [True, True, False, False]
    assert "it grew most for all_gather of layers.*" in rows[4]
    size, factor = (
        int(re.search(part, rows[-1])[1].replace(",", "")) for part in (r"^([\d,]+) ranks", r": (\d+) times")
    )
    graph = next(point.graph for point in points if point.size == size)
    nodes = [node.replace(flops=node.flops * factor) for node in graph.nodes]
    hidden, fewest = (play(one) for one in (graph.replace(nodes=nodes), points[0].graph))
    assert hidden.exposed_ms / hidden.step_ms < fewest.exposed_ms / fewest.step_ms + 0.05


def test_schedule_of_sizes_that_hide_alike_has_no_advice_and_points_without_a_graph_none_at_all():
    assert len(scheduled([scaled(2), scaled(2)])) == 3
    assert scheduled([point(2, 100)]) == []


def test_each_size_is_drawn_below_the_parts_of_all():
    (_, parts), *streams = panels([scaled(2), scaled(64)])
    assert [[bars.kind for bars in row.bars] for row in parts.rows] == [
        ["compute", "exposed in a host"],
        ["compute", "exposed between hosts"],
    ]
    assert [name for name, _ in streams] == ["2 ranks", "64 ranks"]


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["--sizes", "2,x"], "an integer from 1 to"),
        (["--sizes", "0,2"], "got '0', allowed is an integer from 1 to"),
        (["--sizes", "2,8", "--rank", "5"], "from 0 to 1"),
    ],
)
def test_a_wrong_command_line_launches_nothing(arguments, shows, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["scale", "llama_fsdp2", *arguments]))
    assert ended.value.code == 2
    assert shows in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--sizes", "2", "train.py"], ["train.py", "--sizes", "2"]])
def test_options_stand_before_or_after_the_target(words):
    arguments = parser(["scale"]).parse_args(["scale", *words, "--", "--steps", "5"])
    assert (arguments.target, arguments.sizes, arguments.args) == ("train.py", (2,), ("--steps", "5"))
