import pytest

from tests.unit.docs.transcripts import difference, normal

PRINTED = """
===== test session starts =====
collected 1 item

test  metric         value
one   num_parameters 131,392 131,392  -  exact  1  pass
aorta: 1 test OK, 2 metrics unchanged
===== 1 passed in 29.13s =====
"""


@pytest.mark.parametrize("shown", [
    PRINTED, "...", "...\naorta: 1 test OK, 2 metrics unchanged\n...",
    "===== test session starts =====\n...\none num_parameters 131,392 131,392 - exact 1 pass\n...",
    "...\ncollected 1 item\n...\n===== 1 passed in 3.20s =====",
    "...\none num_...meters 131,392 131,392 - exact 1 pass\naorta: 1 test OK, 2 metrics unchanged\n...",
])  # fmt: skip
def test_transcript_of_what_was_printed_has_no_difference(shown):
    assert difference(shown, PRINTED) is None


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("aorta: 1 test OK, 2 metrics unchanged", "not printed there: aorta: 1 test OK, 2 metrics unchanged"),
        ("...\naorta: 1 test OK, 3 metrics unchanged\n...", "not printed there: aorta: 1 test OK, 3 metrics unchanged"),
        # In another order, and with a gap that the transcript does not show.
        ("...\naorta: 1 test OK, 2 metrics unchanged\n...\ncollected 1 item\n...", "not printed there: collected"),
        ("...\ncollected 1 item\none num_parameters ...\n...", "not printed there: collected 1 item | one num_param"),
        ("", "printed, but not in the transcript: ===== test session starts ====="),
    ],
)
def test_line_that_was_not_printed_there_is_named(shown, expected):
    assert str(difference(shown, PRINTED)).startswith(expected)


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
