"""Warm launches on GPUs: the same numbers as cold launches, from a server that has not initialized CUDA."""

import pytest


@pytest.mark.world(size=2, device="cuda", warm=True)
@pytest.mark.parametrize("name", ["fsdp", "llama_fsdp2"])
def test_warm_launch_on_gpus_computes(workload, name):
    config = {"optimizer": "sgd"} if name == "fsdp" else {"deterministic": True}
    first = workload.run(name, steps=5, **config)
    second = workload.run(name, steps=5, **config)
    assert (first.launcher, second.launcher) == ("forkserver", "forkserver")
    workload.compare(second, first, metrics=["weight_hash"])
    print(first.launch_times_s, second.launch_times_s)
