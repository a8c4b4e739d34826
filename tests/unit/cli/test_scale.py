"""``aorta scale``: the table and what explains it, of made-up results."""

import re

import pytest

from pytest_aorta.cli.main import main, parser
from pytest_aorta.cli.scale import cells, growth, panels, scheduled
from pytest_aorta.cli.target import write_drawing
from pytest_aorta.common.errors import ResultError
from pytest_aorta.result.trace.profiled_steps import CollectiveCost, Costs
from pytest_aorta.result.trace.schedule import play
from pytest_aorta.result.trace.step_graph import StepGraph
from tests.unit.builders import make_result
from tests.unit.step_graphs import fsdp_step


def result(size, gathered, *, reduced=None, memory=None, padded=None, steps=5):
    rows = [CollectiveCost("all_gather", 4, size, "float32", gathered)]
    rows += [] if reduced is None else [CollectiveCost("all_reduce", 1, 2, "float32", reduced)]
    rank = make_result([[1.0] * steps], rank_metrics={} if memory is None else {"peak_memory_bytes": [memory]}).ranks[0]
    known = {"environment": {"padded_parameters": padded} if padded else {}}
    rank = rank.replace(costs=Costs(rows, flops={"mm": 7}, operators={"mm": 100 * size}), **known)
    return make_result([[1.0] * steps]).replace(ranks=[rank], world_size=size)


def test_the_table_has_the_costs_of_each_size():
    assert cells(result(2, 1 << 20)) == ("2", "4", "1 MiB", "200", "7", "-")
    assert cells(result(1024, 4 << 20, memory=3 << 20)) == ("1,024", "4", "4 MiB", "102,400", "7", "3 MiB")


@pytest.mark.parametrize(
    ("before", "after", "shows"),
    [
        (result(2, 100), result(8, 100), []),
        (
            result(2, 100),
            result(8, 200, padded="emb.weight"),
            ["2 -> 8 ranks: bytes of all_gather +100%: padding", "emb"],
        ),
        (result(2, 100, reduced=1 << 20), result(8, 100, reduced=4 << 20), ["bytes of all_reduce +300%"]),
        (result(2, 100, steps=24), result(8, 100, steps=6), ["2 -> 8 ranks: 24 steps -> 6: the data are split"]),
        (result(2, 100, steps=6), result(8, 100, steps=24), []),
    ],
)
def test_what_grows_is_explained(before, after, shows):
    text = "\n".join(growth(before, after))
    assert bool(text) == bool(shows)
    assert all(part in text for part in shows)


def scaled(*sizes: int) -> dict[int, StepGraph]:
    """Return a step of six layers whose collectives run over so many ranks, by this number."""
    graph = fsdp_step()
    return {
        size: graph.replace(
            nodes=[node.replace(group_size=size) if node.group_size > 1 else node for node in graph.nodes]
        )
        for size in sizes
    }


def test_schedule_tells_where_communication_hides_no_longer_and_which_work_hides_it():
    graphs = scaled(2, 8, 64, 1024)
    _, _, *rows = scheduled(graphs)
    cells = [re.split(r"  +", row) for row in rows[:4]]
    assert [float(row[1]) for row in cells] == sorted((float(row[1]) for row in cells), reverse=True)
    assert [row[3] == "0 ms" for row in cells] == [True, True, False, False]
    assert "it grew most for all_gather of layers.*" in rows[4]
    size, factor = (
        int(re.search(part, rows[-1])[1].replace(",", "")) for part in (r"^([\d,]+) ranks", r": (\d+) times")
    )
    nodes = [node.replace(flops=node.flops * factor) for node in graphs[size].nodes]
    hidden, fewest = (play(one) for one in (graphs[size].replace(nodes=nodes), graphs[2]))
    assert hidden.exposed_ms / hidden.step_ms < fewest.exposed_ms / fewest.step_ms + 0.05


def test_schedules_that_hide_alike_have_no_advice_and_a_lack_of_graphs_is_said():
    assert len(scheduled(scaled(2, 3))) == 4
    [lack] = scheduled({})
    assert lack.startswith("no graph of streams")


def test_drawing_is_written_and_nothing_to_draw_is_an_error_with_its_reason(tmp_path, capsys):
    file = tmp_path / "new" / "a.svg"
    write_drawing(file, panels(scaled(2)))
    assert "reduce-scatter" in file.read_text()
    assert str(file) in capsys.readouterr().out
    with pytest.raises(ResultError, match="--draw: no graph of streams with a collective was recorded: no trace"):
        write_drawing(tmp_path / "b.svg", panels({}), "no trace")
    with pytest.raises(ResultError, match="not written"):
        write_drawing(file / "b.svg", panels(scaled(2)))


def test_each_size_is_drawn_below_the_parts_of_all():
    (_, parts), *streams = panels(scaled(2, 64))
    exposed = [row.bars[1].kind for row in parts.rows]
    assert ["between" in kind for kind in exposed] == [False, True]
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
