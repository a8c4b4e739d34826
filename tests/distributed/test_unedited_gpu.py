"""An unedited script on one GPU: profiled steps with a head start, losses read at the end, and weights."""

import pytest

from pytest_aorta import WorkloadRunner
from tests.distributed import ONE_GPU

pytestmark = [
    pytest.mark.timed,
    ONE_GPU,
    pytest.mark.launch_timeout(240),
]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from pytest_aorta.worker import record_optimizer_steps

record_optimizer_steps(warmup=3, hash_weights=True)
dist.init_process_group("nccl")
torch.cuda.set_device(0)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda())
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(60):
    optimizer.zero_grad()
    loss = model(torch.ones(64, 1024, device="cuda")).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if "item" in sys.argv:
        loss.item()
    optimizer.step()
"""


@pytest.mark.parametrize("way", ["ahead", "item"])
def test_unedited_script_is_profiled_with_a_head_start_where_possible(workload: WorkloadRunner, tmp_path, way):
    (script := tmp_path / "train.py").write_text(SCRIPT)
    result = workload.run_script(str(script), [way])
    [rank] = result.ranks
    profile, [series] = rank.profile, rank.series
    assert (profile.problem, len(profile.steps), len(profile.as_run)) == ("", 2, 3)
    assert (profile.head_start.succeeded, profile.head_start.blocked_by is None) == (way == "ahead", way == "ahead")
    assert sum(kernel.ms for kernel in profile.kernels.values()) > 0
    assert result.costs[0].kernels
    # The recorder reads nothing from the device in a step.
    assert bool(result.costs[0].host_copies) == (way == "item")
    # Weights, gradients and two moments of 8 layers.
    assert result.rank_metrics["peak_memory_bytes"][0] > 4 * 8 * 1024**2 * 4
    assert len(series.loss) == len(series.grad_norm) == 60
    assert max(map(int, series.weights.hashes)) == 60
