"""One trained state has one weight hash in every layout of real FSDP2."""

import pytest

from pytest_aorta import DistributedWorld

NUM_LAYOUTS = 6


@pytest.mark.extended
@pytest.mark.world(size=4, device="cpu", warm=True)
def test_a_trained_state_hashes_alike_in_every_layout(distributed_world: DistributedWorld):
    result = distributed_world.run_script("tests/distributed/scripts/hash_layouts.py")

    assert list(result.weight_hashes) == [str(number) for number in range(1, NUM_LAYOUTS + 1)]
    assert len(set(result.weight_hashes.values())) == 1, result.weight_hashes
    assert result.total_iterations == 25
