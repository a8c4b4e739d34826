from __future__ import annotations

import pytest

from pytest_aorta.result.measurements import FailureDetail
from tests.unit.builders import make_result


def test_located_failure_says_where_how_many_and_what():
    detail = FailureDetail(
        kind="all_gather",
        iteration=4,
        rank=1,
        layer=2,
        source_rank=0,
        index=7,
        count=3,
        total=16,
        expected=1.5,
        actual=0.0,
        cause="zeroed shard",
    )
    assert str(detail) == (
        "all_gather: iteration 4, layer 2, on rank 1, from source rank 0: 3 of 16 elements wrong, "
        "first at index 7: expected 1.5, got 0 (zeroed shard)"
    )


def test_failure_text_has_only_the_known_fields():
    assert str(FailureDetail("loss", iteration=0, rank=3)) == "loss: iteration 0, on rank 3: 1 elements wrong"


def test_failure_with_an_index_and_no_values_can_be_shown():
    assert str(FailureDetail("h2d", iteration=0, rank=0, index=5)).endswith("first at index 5")


def test_time_of_a_step_is_its_maximum_over_ranks():
    assert make_result([[1.0, 5.0], [2.0, 4.0]]).step_times_max_ms == [2.0, 5.0]


def test_ranks_of_unequal_lengths_have_no_step_times():
    with pytest.raises(ValueError, match="zip"):
        make_result([[1.0, 5.0], [2.0]]).step_times_max_ms  # noqa: B018
