import pytest

from tests.unit.docs.transcripts import normal


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("weight_hash: ba685e31cf04", "weight_hash: 77d503bbeca3", True),
        ("by rank: 127.257 to 127.836 ms", "by rank: 1.2e+03 to 9 ms", True),
        ("change +672.0% [+493.0%, +900.6%]", "change +20% [+1.0%, +1194%]", True),
        ("waits 480 ms/step less, 3 launches", "waits 1.5 ms/step less, 5 launches", True),
        ("change +672.0%", "change -672.0%", False),
        ("1 launch", "2 launches", False),
        ("tolerance 5%", "tolerance 100%", False),
        ("num_parameters: 131,392", "num_parameters: 131,393", False),
    ],
)
def test_only_what_differs_between_runs_is_normalized(one, other, are_equal):
    assert (normal(one) == normal(other)) is are_equal
