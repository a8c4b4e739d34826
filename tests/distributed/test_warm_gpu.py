"""Warm launches on GPUs: the same numbers as cold launches, from a server that has not initialized CUDA."""

import pytest


@pytest.mark.world(size=2, device="cuda", warm=True)
def test_warm_launch_on_gpus_computes(workload):
    first, second = (workload.run("fsdp", steps=5, optimizer="sgd") for _ in range(2))
    assert (first.launcher, second.launcher) == ("forkserver", "forkserver")
    workload.compare(second, first, metrics=["weight_hash"])
    print(first.launch_times_s, second.launch_times_s)
