"""``aorta scale``: the table and what explains it, of results that were computed by hand."""

import pytest

from pytest_aorta.cli.main import main, parser
from pytest_aorta.cli.scale import Point, explanations, table
from pytest_aorta.result.trace.profiled_steps import CollectiveCost


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
