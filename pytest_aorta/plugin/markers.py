"""The plugin's markers, and the fixture that identifies a test that launches ranks."""

from __future__ import annotations

# Tests that use this fixture, directly or through ``workload``, launch ranks.
FIXTURE = "distributed_world"
MARKERS = {
    "overlap": "overlap: the test measures how communication overlaps with compute.",
    "numerics": "numerics: the test compares weights, losses or gradients bit for bit.",
    "world": "world(size=2, device='any'): ranks to launch, one per device; size is an integer, or 'all' for all "
    "devices of this run; device is 'any', 'cuda' or 'cpu'; nodes=2 distributes the ranks evenly over several nodes; "
    "warm=True starts ranks from the fork server, False by torchrun.",
    "tolerance": "tolerance(METRIC='5%'): the change against the baseline that is allowed, by metric; 'exact' allows "
    "no change.",
    "launch_timeout": "launch_timeout(SECONDS): time limit of each launch of the test.",
}
