"""torchtitan's own train entry, compared with a stored baseline."""

from __future__ import annotations

import pytest


@pytest.mark.overlap
@pytest.mark.world(size="all")
@pytest.mark.tolerance(step_time_p50="10%", final_loss="exact")
def test_debug_model(workload):
    """Compare step time and loss with the baseline."""
    workload.check(workload.run("titan"))
