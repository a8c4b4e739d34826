"""Interval algebra against sets of integers: the moment ``m`` stands for ``[m, m + 1)``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.trace.overlap import clip, coarsened, difference, intersection, length, union

edges = st.integers(-20, 20)
drawn = st.lists(st.tuples(edges, edges), max_size=12)


def moments(rows) -> set[int]:
    return {moment for begin, end in rows for moment in range(begin, end)}


def check_canonical(found) -> None:
    assert found.shape == (len(found), 2)
    flat = found.ravel()
    assert (np.diff(flat) > 0).all(), "sorted, disjoint, and none touches the next"


@given(st.lists(drawn, max_size=4))
def test_union_has_the_moments_of_every_part(parts):
    found = union(*parts)
    check_canonical(found)
    assert moments(found) == set().union(*map(moments, parts))


@given(drawn, drawn)
def test_intersection_difference_and_length_are_those_of_sets(first, second):
    one, other = union(first), union(second)
    for operation, expected in (
        (intersection, moments(first) & moments(second)),
        (difference, moments(first) - moments(second)),
    ):
        found = operation(one, other)
        check_canonical(found)
        assert moments(found) == expected
        assert length(found) == len(expected)


@given(drawn, edges, edges)
def test_clip_keeps_what_is_inside(rows, begin, end):
    assert moments(clip(union(rows), begin, end)) == moments(rows) & set(range(begin, end))


@given(drawn, st.integers(1, 5))
def test_coarsened_covers_the_set_with_the_fewest_moments_added(rows, most):
    exact = union(rows)
    found = coarsened(exact, most)
    check_canonical(found)
    assert len(found) == min(most, len(exact))
    assert moments(found) >= moments(exact)
    gaps = sorted(int(gap) for gap in exact[1:, 0] - exact[:-1, 1])
    closed = gaps[: len(exact) - len(found)]
    assert length(found) - length(exact) == sum(closed)


@pytest.mark.parametrize("scale", [1, 10**15])
def test_nanoseconds_since_1970_are_exact(scale):
    one, other = union([(scale, scale + 5)]), union([(scale + 3, scale + 9)])
    assert intersection(one, other).tolist() == [[scale + 3, scale + 5]]
    assert difference(one, other).tolist() == [[scale, scale + 3]]
