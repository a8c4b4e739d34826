"""Fixtures that real launches share: sizes for the device at hand."""

from collections.abc import Callable
from typing import Any

import pytest

from pytest_aorta import DistributedWorld
from pytest_aorta.launch.launchers import Launchers
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plugin.hooks import RUN
from tests.distributed.processes import START_S
from tests.unit.builders import make_plan

# On CUDA, a step takes the device about twice as long as a late host takes to enqueue it. Otherwise step times are
# those of the host, which vary by several percent between launches on shared machines.
FSDP = {
    "cpu": {"steps": 20, "warmup": 3, "verify": 3},
    "cuda": {
        "steps": 100,
        "warmup": 10,
        "verify": 5,
        "layers": 16,
        "gemm_size": 5120,
        "fsdp_shard_size": 1 << 24,
        "h2d_tensor_size": 1 << 24,
        "dtype": "bfloat16",
    },
}
LLAMA = {
    "cpu": {"size": "debug", "steps": 10, "warmup": 2},
    "cuda": {
        "size": "8b",
        "steps": 40,
        "warmup": 5,
        "n_layers": 4,
        "seq_len": 4096,
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
    },
}
RANKING = {
    "cpu": {"steps": 10, "warmup": 2},
    "cuda": {
        "steps": 40,
        "warmup": 5,
        "batch_size": 256,
        "num_tables": 26,
        "rows_per_table": 4000,
        "bag_size": 10,
        "dim": 4096,
        "n_layers": 6,
        "n_heads": 32,
        "ffn_hidden": 16384,
        "param_dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
    },
}
DDP = {
    # Several buckets, because no part of backward would be left to hide a single bucket.
    "cpu": {"steps": 10, "warmup": 2, "bucket_cap_mb": 0.25},
    "cuda": {
        "steps": 40,
        "warmup": 5,
        "batch_size": 256,
        "num_tables": 26,
        "rows_per_table": 1000,
        "bag_size": 10,
        "dim": 4096,
        "n_layers": 4,
        "n_heads": 32,
        "ffn_hidden": 16384,
        "compute_dtype": "bfloat16",
    },
}
# Exposed communication of some workloads varies from step to step on GPUs, so more steps are profiled.
VARYING = {"cpu": {}, "cuda": {"profile_steps": 8}}
COPY = {
    "cpu": {"steps": 20},
    "cuda": {"steps": 20, "warmup": 3, "matrix_size": 8192, "gemms": 8, "dtype": "bfloat16", "copy_mb": 256},
}


CONFIGS = {"fsdp": FSDP, "llama": LLAMA, "ranking": RANKING, "ddp": DDP, "varying": VARYING, "copy": COPY}


@pytest.fixture
def config_of(distributed_world: DistributedWorld) -> Callable[[str], dict[str, Any]]:
    """A function for the config of a kind of workload that takes a second or two of steps on the world's device."""
    return lambda kind: dict(CONFIGS[kind][distributed_world.device])


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    """The fork servers of this run, which serve plans whose working folder is the repository too.

    One is started, because a launch's time limit would include the import of torch.
    """
    servers: Launchers = request.config.stash[RUN].session.launchers
    folder = tmp_path_factory.mktemp("start")
    (folder / "empty.py").touch()
    plan = make_plan(
        folder / "run",
        script=str(folder / "empty.py"),
        timeout_s=START_S,
        cwd=request.config.rootpath,
        launcher=LauncherKind.FORKSERVER,
    )
    assert servers.launch(plan).launcher == LauncherKind.FORKSERVER
    return servers


@pytest.fixture
def inner(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """A function that runs pytest, in a process of its own and with warm launches, on the source of a test file."""

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_inner=source)
        pytester.makeini("[pytest]\n")
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--aorta-launcher=forkserver", *options)

    return run


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all GPUs from the runs of a test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
