import itertools
import math

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.world import MAX_WORLD_SIZE, WorldSpec
from pytest_aorta.plugin.markers import MARKERS, read_spec
from pytest_aorta.session.session import TestSpec


def value(name: str, /, *args: object, **keywords: object) -> object:
    return MARKERS[name].value(pytest.Mark(name, args, keywords, _ispytest=True))


def error(name: str, /, *args: object, **keywords: object) -> str:
    with pytest.raises(SpecError) as caught:
        value(name, *args, **keywords)
    return str(caught.value)


SIZES = [0, -1, True, False, "8", "ALL", 2.0, None, MAX_WORLD_SIZE + 1, [2]]


@pytest.mark.parametrize(
    ("keyword", "given", "allowed"),
    [
        *(("size", size, f"an integer from 1 to {MAX_WORLD_SIZE} or 'all'") for size in SIZES),
        *(("nodes", nodes, "an integer from 1 to 4096") for nodes in (0, -1, 1.0, "2", True, None, 5000)),
        *(("warm", warm, "True or False") for warm in (1, 0, "yes")),
        *(("device", device, "one of any, ") for device in ("gpu", "CUDA", "", None, 0, ["cpu"])),
    ],
)
def test_argument_of_a_world_that_is_not_allowed_is_refused_with_what_is(keyword, given, allowed):
    assert f"{keyword}={given!r}, allowed is {allowed}" in error("world", **{keyword: given})


@pytest.mark.parametrize(
    ("name", "args", "keywords", "message"),
    [
        ("world", (), {"sizes": 2}, "warm=None, simulated=None): got an unexpected keyword argument 'sizes'"),
        ("world", (2,), {"size": 4}, "multiple values for argument 'size', in (2, size=4)"),
        ("world", (), {"size": 7, "nodes": 2}, "size=7 ranks can't be distributed evenly over nodes=2"),
        ("world", (), {"nodes": 2, "warm": True}, "warm=True and nodes=2 contradict each other"),
        ("overlap", (1,), {"why": "x"}, "marker overlap: too many positional arguments, in (1, why='x')"),
        ("numerics", ("fp8",), {}, "marker numerics: too many positional arguments"),
        ("tolerance", ("5%",), {}, "marker tolerance(METRIC='5%'): too many positional arguments, in ('5%')"),
        ("tolerance", (), {}, "marker tolerance: names no metric"),
        ("tolerance", (), {"step_time_p5": "5%"}, "['step_time_p5'] are unknown (did you mean 'step_time_p50'?)"),
        ("launch_timeout", (), {}, "marker launch_timeout(SECONDS): missing a required argument"),
        ("launch_timeout", (1, 2), {}, "marker launch_timeout(SECONDS): too many positional arguments"),
    ],
)
def test_arguments_that_a_marker_does_not_take_are_refused(name, args, keywords, message):
    assert message in error(name, *args, **keywords)


@pytest.mark.parametrize("given", [0, -1, math.inf, math.nan, "5", None, True, 1e12])
def test_timeout_that_is_no_number_of_seconds_is_refused(given):
    assert f"{given!r}, allowed are seconds above 0" in error("launch_timeout", given)


TEXTS = ["5", "-3%", "abc", "0%", "1001%", "5 percent", "", "nan%", "inf%", "1e2%", "5%%"]


@pytest.mark.parametrize("given", [*TEXTS, 5, 0.05, None, True, b"5%", ["5%"]])
def test_tolerance_that_is_no_percentage_is_refused(given):
    assert f"tolerance of step_time_p50: got {given!r}, allowed is" in error("tolerance", step_time_p50=given)


@pytest.mark.parametrize(
    ("args", "keywords", "expected"),
    [
        ((), {}, WorldSpec(2, "any")),
        ((8,), {}, WorldSpec(8)),
        ((), {"size": "all", "nodes": 3}, WorldSpec("all", nodes=3)),
        ((4, "cpu"), {"warm": False}, WorldSpec(4, "cpu", warm=False)),
    ],
)
def test_world_is_read_by_keyword_and_by_position(args, keywords, expected):
    assert value("world", *args, **keywords) == expected


# The places of a marker, with a metric that only the marker of this place names.
PLACES = {
    "param": "step_time_mean",
    "decorator": "step_time_p99",
    "class": "samples_per_s",
    "base": "step_time_tail5",
    "module": "tokens_per_s",
}
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
    number = list(PLACES).index(place) + 1
    tolerance = f"tolerance(step_time_p50='{number}%', {PLACES[place]}='9%')"
    return f"[pytest.mark.world({number}), pytest.mark.launch_timeout({number}), pytest.mark.{tolerance}]"


def assert_as_pytest(item: pytest.Item) -> TestSpec:
    """Assert that the marker that pytest gives is the one that applies, and return what applies."""
    spec, world = read_spec(item), item.get_closest_marker("world")
    assert spec.world.size == (world.args[0] if world else 2)
    timeout = item.get_closest_marker("launch_timeout")
    assert spec.timeout_s == (timeout.args[0] if timeout else None)
    tolerance = item.get_closest_marker("tolerance")
    closest = tolerance.kwargs if tolerance else {}
    assert {name: f"{spec.tolerances[name].value:.0%}" for name in closest} == dict(closest)
    return spec


@pytest.mark.parametrize(
    "present", [places for count in range(6) for places in itertools.combinations(PLACES, count)], ids=" and ".join
)
def test_marker_that_pytest_calls_the_closest_applies(pytester, present):
    source = SOURCE.format(**{place: marks_at(place) if place in present else [] for place in PLACES})
    spec = assert_as_pytest(pytester.getitem(source, "test_one[1]"))
    # Tolerances of other metrics add up.
    assert set(spec.tolerances) == {PLACES[place] for place in present} | ({"step_time_p50"} if present else set())


def test_farther_marker_is_still_checked(pytester):
    source = "import pytest\npytestmark = pytest.mark.world(0)\n@pytest.mark.world(4)\ndef test_one(): pass\n"
    with pytest.raises(SpecError, match="size=0"):
        read_spec(pytester.getitem(source, "test_one"))
