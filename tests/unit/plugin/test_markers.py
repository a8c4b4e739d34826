from __future__ import annotations

import itertools
import math

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.world import MAX_WORLD_SIZE, WorldSpec
from pytest_aorta.plugin.read_markers import marks_closest_first, read_markers
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.verdict.metrics import METRICS, Tolerance


def mark(name: str, /, *args: object, **keywords: object) -> pytest.Mark:
    return pytest.Mark(name, args, keywords, _ispytest=True)


def marker_error(name: str, /, *args: object, **keywords: object) -> str:
    with pytest.raises(SpecError) as caught:
        read_markers([mark(name, *args, **keywords)])
    return str(caught.value)


def test_test_without_markers_gets_two_ranks_on_any_device():
    assert read_markers([]) == TestSpec(WorldSpec(2, "any"), {}, None)


def test_markers_of_others_are_left_alone():
    assert read_markers([mark("parametrize", "x", [1]), mark("slow", 5, why=True)]) == TestSpec()


@pytest.mark.parametrize("text", ["5", "-3%", "abc", "0%", "1001%", "5 percent", "", "nan%", "inf%", "1e2%", "5%%"])
def test_tolerance_that_is_no_percentage_is_refused(text):
    message = marker_error("tolerance", step_time_p50=text)
    assert message == (
        f"tolerance of step_time_p50: got {text!r}, allowed is a percentage above 0% up to 1000%, or 'exact'"
    )


@pytest.mark.parametrize("given", [5, 0.05, None, True, b"5%", ["5%"]])
def test_tolerance_that_is_no_text_is_refused(given):
    assert f"tolerance of step_time_p99: got {given!r}, allowed is" in marker_error("tolerance", step_time_p99=given)


def test_unknown_metric_names_those_there_are():
    message = marker_error("tolerance", step_time_p5="5%")
    assert message == (
        f"marker tolerance: metrics ['step_time_p5'] are unknown (did you mean 'step_time_p50'?); "
        f"allowed are {sorted(METRICS)}"
    )


@pytest.mark.parametrize("arguments", [("5%",), ({"step_time_p50": "5%"},), ()])
def test_tolerance_takes_metrics_by_keyword_only(arguments):
    message = marker_error("tolerance", *arguments)
    assert "by keyword, e.g. tolerance(step_time_p50='2%'), got (" in message


@pytest.mark.parametrize("size", [0, -1, True, False, "8", "ALL", 2.0, None, MAX_WORLD_SIZE + 1, [2]])
def test_world_size_that_is_no_count_is_refused(size):
    assert marker_error("world", size=size) == (
        f"marker world: size={size!r}, allowed is an integer from 1 to {MAX_WORLD_SIZE} or 'all'"
    )


@pytest.mark.parametrize("size", [1, 2, 8, "all"])
def test_world_size_is_read_by_keyword_and_by_position(size):
    assert read_markers([mark("world", size=size)]).world == WorldSpec(size)
    assert read_markers([mark("world", size)]).world == WorldSpec(size)


@pytest.mark.parametrize("warm", [True, False])
def test_world_says_whether_it_is_warm(warm):
    assert read_markers([mark("world", size=2, warm=warm)]).world.warm is warm
    assert read_markers([mark("world", size=2)]).world.warm is None


@pytest.mark.parametrize("warm", [None, 1, "yes"])
def test_warm_that_is_no_boolean_is_refused(warm):
    assert marker_error("world", warm=warm) == f"marker world: warm={warm!r}, allowed is True or False"


def test_unknown_world_keyword_names_those_there_are():
    message = marker_error("world", sizes=2)
    assert message == (
        "marker world has no keywords ['sizes'] (did you mean 'size'?); there are ['device', 'nodes', 'size', 'warm']"
    )


def test_world_says_how_many_nodes_it_is_spread_over():
    assert read_markers([mark("world", size=16, nodes=2)]).world == WorldSpec(16, nodes=2)
    assert read_markers([mark("world", size="all", nodes=3)]).world.nodes == 3
    assert read_markers([mark("world", size=16)]).world.nodes == 1


@pytest.mark.parametrize("nodes", [0, -1, 1.0, "2", True, None, 5000])
def test_number_of_nodes_that_is_none_is_refused(nodes):
    assert marker_error("world", nodes=nodes) == f"marker world: nodes={nodes!r}, allowed is an integer from 1 to 4096"


def test_ranks_that_nodes_can_not_share_evenly_are_refused():
    message = "marker world: size=7 ranks can't be distributed evenly over nodes=2"
    assert marker_error("world", size=7, nodes=2) == message


def test_warm_launch_over_nodes_is_refused():
    assert "warm=True and nodes=2 contradict each other" in marker_error("world", size=2, nodes=2, warm=True)


@pytest.mark.parametrize("device", ["gpu", "CUDA", "", None, 0, ["cpu"]])
def test_unknown_device_names_those_there_are(device):
    assert marker_error("world", device=device) == f"marker world: device={device!r}, allowed is one of any, cuda, cpu"


def test_second_positional_world_argument_is_refused():
    assert "takes size and device, got (2, 'cpu')" in marker_error("world", 2, "cpu")


def test_world_size_given_twice_is_refused():
    assert "got (2, size=4)" in marker_error("world", 2, size=4)


@pytest.mark.parametrize("given", [0, -1, math.inf, math.nan, "5", None, True, 1e12])
def test_timeout_that_is_no_number_of_seconds_is_refused(given):
    message = marker_error("launch_timeout", given)
    assert "marker launch_timeout takes a number of seconds above 0" in message
    assert f"got ({given!r})" in message


@pytest.mark.parametrize(("args", "keywords"), [((), {}), ((1, 2), {}), ((), {"seconds": 5})])
def test_timeout_without_its_one_argument_is_refused(args, keywords):
    assert "marker launch_timeout takes a number of seconds" in marker_error("launch_timeout", *args, **keywords)


def test_marker_of_pytest_timeout_is_ignored_unless_that_plugin_is_missing():
    foreign = mark("timeout", 5, method="thread")
    assert read_markers([foreign]) == TestSpec()
    with pytest.raises(SpecError, match=r"marker timeout: .*not installed; .* launch_timeout\(SECONDS\)"):
        read_markers([foreign], refuse_timeout=True)


@pytest.mark.parametrize("name", ["overlap", "numerics"])
def test_marker_without_arguments_refuses_them(name):
    assert marker_error(name, 1, why="x") == f"marker {name} takes no arguments, got (1, why='x')"


def test_closest_world_wins_whole():
    spec = read_markers([mark("world", size=4), mark("world", size=8, device="cuda")])
    assert spec.world == WorldSpec(4, "any")


def test_farther_marker_is_still_checked():
    with pytest.raises(SpecError, match="size=0"):
        read_markers([mark("world", size=4), mark("world", size=0)])


def test_closest_timeout_wins():
    assert read_markers([mark("launch_timeout", 5), mark("launch_timeout", 60)]).timeout_s == 5.0


def test_tolerances_merge_and_the_closest_wins_a_metric():
    spec = read_markers(
        [mark("tolerance", step_time_p50="2%"), mark("tolerance", step_time_p50="50%", weight_hash="exact")]
    )
    assert spec.tolerances == {"step_time_p50": Tolerance(0.02), "weight_hash": Tolerance(None)}


# The places of a marker, the closest to the test first, with a metric that only the marker of this place names.
PLACES = {
    "param": "step_time_mean",
    "decorator": "step_time_p99",
    "class": "samples_per_s",
    "base": "step_time_tail5",
    "module": "tokens_per_s",
}
NUMBERS = {place: number for number, place in enumerate(PLACES, start=1)}
SOURCE = """
import pytest

def marked(function):
    for mark in {decorator}:
        function = mark(function)
    return function

pytestmark = {module}

class Base:
    pytestmark = {base}

    @marked
    @pytest.mark.parametrize("x", [pytest.param(1, marks={param})])
    def test_one(self, x): pass

class TestDerived(Base):
    pytestmark = {class}
"""


def marks_at(place: str) -> str:
    number = NUMBERS[place]
    tolerance = f"tolerance(step_time_p50='{number}%', {PLACES[place]}='9%')"
    return f"[pytest.mark.world({number}), pytest.mark.launch_timeout({number}), pytest.mark.{tolerance}]"


@pytest.mark.parametrize(
    "present", [places for count in (2, 5) for places in itertools.combinations(PLACES, count)], ids=" and ".join
)
def test_marker_closest_to_the_test_wins(pytester, present):
    source = SOURCE.format(**{place: marks_at(place) if place in present else [] for place in PLACES})
    spec = read_markers(marks_closest_first(pytester.getitem(source, "test_one[1]")))
    number = NUMBERS[present[0]]
    tolerances = {PLACES[place]: Tolerance(0.09) for place in present} | {"step_time_p50": Tolerance(number / 100)}
    assert spec == TestSpec(WorldSpec(number), tolerances, float(number))


@pytest.mark.parametrize(("append", "size"), [(True, 2), (False, 9)])
def test_marker_that_is_added_takes_the_place_that_add_marker_documents(pytester, append, size):
    source = "import pytest\n@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.world(2))])\n"
    item = pytester.getitem(source + "@pytest.mark.world(3)\ndef test_one(x): pass\n", "test_one[1]")
    item.add_marker(pytest.mark.world(9), append=append)
    assert read_markers(marks_closest_first(item)).world == WorldSpec(size)


def test_marker_that_is_added_to_a_test_is_closer_than_those_of_its_module(pytester):
    item = pytester.getitem("import pytest\npytestmark = pytest.mark.world(3)\ndef test_one(): pass\n", "test_one")
    item.add_marker(pytest.mark.world(9))
    assert read_markers(marks_closest_first(item)).world == WorldSpec(9)


def test_marker_that_was_removed_from_a_test_is_not_read(pytester):
    item = pytester.getitem("import pytest\n@pytest.mark.world(3)\ndef test_one(): pass\n", "test_one")
    item.own_markers.clear()
    assert list(marks_closest_first(item)) == []


def test_decorator_next_to_the_function_wins(pytester):
    source = "import pytest\n@pytest.mark.world(3)\n@pytest.mark.world(4)\ndef test_one(): pass\n"
    assert read_markers(marks_closest_first(pytester.getitem(source, "test_one"))).world == WorldSpec(4)
