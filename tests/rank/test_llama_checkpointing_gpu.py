"""Selective checkpointing on a GPU: backward does not wait for the host again."""

import pytest
import torch
from aorta_workloads.distributed.activation_checkpoint import run_checkpointed

pytestmark = pytest.mark.usefixtures("leased_gpu")


def scale_by_count(x):
    (count,) = (x > 0).sum().view(1).tolist()
    return (x * count).sin()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize(("kind", "copies"), [("selective", 1), ("elementwise", 1), ("full", 2)])
def test_numbers_that_the_host_has_read_are_not_copied_again(kind, copies):
    x = torch.ones(4, device="cuda", requires_grad=True)
    with torch.profiler.profile() as profile:
        run_checkpointed(kind, scale_by_count, x).sum().backward()
    assert sum("Memcpy DtoH" in event.name for event in profile.events()) == copies
