"""Lost overlap on GPUs, against a stored baseline if the code is the same, or else against the other variant."""

import pytest

from pytest_aorta.plan.accelerators import visible_devices

pytestmark = pytest.mark.skipif(len(visible_devices()) < 2, reason="needs two GPUs")

INNER = """
import pytest

pytestmark = [pytest.mark.world(size="all", device="cuda", warm=True), pytest.mark.tolerance(overlap_ratio="5 points")]
SIZE = dict(
    steps=50, warmup=10, verify=0, layers=16, gemm_size=4096, fsdp_shard_size=1 << 22, dtype="bfloat16",
    h2d_tensor_size=1 << 22, profile_steps=3,
)
TRACED = dict(
    size="1b", steps=20, warmup=5, n_layers=4, seq_len=4096, param_dtype="bfloat16", profile_steps=3,
)
BUCKETS = dict(
    steps=50, warmup=10, batch_size=256, num_tables=26, rows_per_table=1000, bag_size=10, dim=2048, n_layers=6,
    n_heads=16, ffn_hidden=8192, compute_dtype="bfloat16", profile_steps=3,
)

def test_streams(workload):
    on, off = (dict(SIZE, workload="fsdp", comm_stream=beside) for beside in (True, False))
    workload.compare(off, on, metrics=["overlap_ratio", "exposed_comm_ms"])

def test_gathered_ahead(workload):
    ahead, late = (
        dict(TRACED, workload="llama_simple_fsdp", overlap_reorder=reorder) for reorder in (True, False)
    )
    workload.compare(late, ahead, metrics=["overlap_ratio"])

def test_stored(workload):
    workload.check(workload.run("ddp_overlap", **BUCKETS))

def test_script(workload):
    workload.check(workload.run_script("train.py"))
"""
SCRIPT = """
from pathlib import Path
import torch
import torch.distributed as dist
from pytest_aorta.worker import RankEnv, capture_overlap, recorder

device = RankEnv.read().join("train")
weight = torch.randn(4096, 4096, device=device)
gradient = torch.randn(1 << 24, device=device)
synchronizes = Path("synchronizes").exists()

def step():
    work = dist.all_reduce(gradient, async_op=True)
    product = weight
    for _ in range(20):
        product = product @ weight
    work.wait()
    if synchronizes:
        product.sum().item()

recorder.start(device, warmup=5)
for _ in range(25):
    with recorder.step():
        step()
recorder.overlap(capture_overlap(step, 2, device))
"""
LOST = [
    r"E +Regression: overlap_ratio -.* points \(.*, limit 5 points\).*",
    r"E +cause +.*exposed [\d.]+ ms/step, .*rank \d worst.*",
]
BLOCKED = (
    r"E +Missing: overlap_ratio, a step waits for the device in cudaStreamSynchronize in aten::item, so the host "
    r"cannot run ahead; as run 0\.\d+"
)


@pytest.fixture
def suite(inner):
    return lambda *options: inner(INNER, *options)


def test_one_stream_and_gathers_that_come_late_are_caught_with_the_reason(suite):
    result = suite("-k", "streams or gathered_ahead")
    result.assert_outcomes(failed=2, deselected=2)
    result.stdout.re_match_lines_random([*LOST, *LOST])


def test_one_hardware_queue_and_a_step_that_synchronizes_are_caught_against_stored_baselines(
    suite, pytester, monkeypatch
):
    """Run two tests at once, since each run imports torch; a recorded wait is not applicable."""
    pytester.makepyfile(train=SCRIPT)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    both = ("-k", "stored or script")
    suite(*both, "--update-baselines", "--aorta-launches=3").assert_outcomes(passed=2, deselected=2)
    suite(*both).assert_outcomes(passed=2, deselected=2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (pytester.path / "synchronizes").touch()
    result = suite(*both)
    result.assert_outcomes(failed=2, deselected=2)
    result.stdout.re_match_lines_random([*LOST, BLOCKED])
    record = ("--update-baselines", "--aorta-record=replace", "--aorta-launches=3")
    suite("-k", "script", *record).assert_outcomes(passed=1, deselected=3)
    result = suite("-k", "script")
    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines(
        ["  not applicable *overlap_ratio *: a step waits for the device in cudaStreamSynchronize*"]
    )
