"""Overlap that a knob turns off is caught by `overlap_ratio`, and the failure names the exposed collective."""

import pytest

from pytest_aorta import ComparisonFailed

pytestmark = [
    pytest.mark.overlap,
    pytest.mark.world(size="all", warm=True, simulated=False),
    pytest.mark.tolerance(overlap_ratio="10 points"),
    pytest.mark.launch_timeout(400),
]


def lost(workload, name, config, **changes):
    """Return the failure of ``name`` with ``changes``, compared with its default config."""
    variant = {"workload": name, **config, "steps": 3, "profile_steps": 4}
    with pytest.raises(ComparisonFailed) as regression:
        workload.compare(variant | changes, variant, metrics=["overlap_ratio"])
    assert set(regression.value.metrics) == {"overlap_ratio"}
    return str(regression.value)


@pytest.mark.extended
def test_all_reduces_after_backward_are_caught(workload, config_of):
    text = lost(workload, "ddp_overlap", config_of("ddp"), enable_overlap=False)
    assert "Regression: overlap_ratio -" in text
    assert "all_reduce exposed" in text


@pytest.mark.extended
def test_collectives_on_the_compute_stream_are_caught(workload, config_of):
    text = lost(workload, "ranking", config_of("ranking"), one_stream=True)
    assert "Regression: overlap_ratio -" in text
    assert " exposed " in text
