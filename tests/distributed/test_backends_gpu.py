"""Scripts on GPUs whose process group has NCCL alone, or no backend that the script names, and scripts with graphs."""

import pytest

from pytest_aorta import WorkloadRunner
from tests.distributed import ALL_GPUS

pytestmark = [ALL_GPUS, pytest.mark.launch_timeout(120)]

SCRIPT = """
import os
import torch
import torch.distributed as dist
from pytest_aorta.worker import recorder

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group({backend!r})
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)  # on the CPU, like parameters that FSDP offloads
for _ in range(3):
    with recorder.step():
        torch.ones(1 << 20, device="cuda").sum()
recorder.weights(model)
"""


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_script_is_recorded_with_any_backend(workload: WorkloadRunner, tmp_path, backend):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(backend=backend))
    result = workload.run_script(script)
    assert list(result.weight_hashes) == ["3"]


GRAPH = """
import os
import torch
import torch.distributed as dist
from pytest_aorta.worker import recorder

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
summed = torch.ones(1 << 20, device="cuda")
dist.all_reduce(summed)  # makes the communicator, which a capture can't
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_reduce(summed)
for _ in range(3):
    with recorder.step():
        graph.replay()
"""


@pytest.mark.launch_timeout(60)
def test_script_that_leaves_a_graph_with_collectives_ends(workload: WorkloadRunner, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(GRAPH)
    assert len(workload.run_script(script).step_times_ms) == 3
