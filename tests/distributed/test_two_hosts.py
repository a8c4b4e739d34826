"""Launches over two hosts, which are network namespaces joined by a cable: training and failures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import refused_namespaces
from tests.unit.builders import nightly, write

ROOT = Path(__file__).parents[2]
TWO_HOSTS = "tests.distributed.scripts.two_hosts"
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
LIMIT_S = 240

FSDP = """
import pytest

@pytest.mark.world(size=2, nodes=2)
def test_fsdp(workload):
    result = workload.run("fsdp", steps=3, warmup=1, verify=1)
    assert (result.platform, len(result.rank_step_times_ms)) == ("cpu-x2-n2-gloo", 2)
"""
LLAMA = """
import pytest

@pytest.mark.world(size=4, nodes=2)
def test_llama(workload):
    result = workload.run("llama_fsdp2", size="debug", steps=3, warmup=1)
    assert (result.platform, len(result.rank_step_times_ms)) == ("cpu-x4-n2-gloo", 4)
"""
LONG = """
import pytest

@pytest.mark.world(size=2, nodes=2)
def test_long(workload):
    workload.run("fsdp", steps=1000000, warmup=1, verify=1)
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    trial = "mount -t tmpfs tmpfs /run && ip netns add host0"
    if reason := refused_namespaces(UNSHARE, ("ip", "unshare", "mount"), trial):
        pytest.skip(f"two hosts need network namespaces: {reason} (packages iproute2, util-linux, mount)")


def run_on_two_hosts(folder: Path, source: str, fault: str) -> dict[str, Any]:
    """Run pytest on host 0 with the tests ``source``; results are kept in ``folder/kept``."""
    write(folder / "pytest.ini", "[pytest]\nfilterwarnings = error\n")
    write(folder / "test_inner.py", source)
    launcher = f"{sys.executable} -m {TWO_HOSTS} launcher"
    options = ["--aorta-nnodes=2", "-o", f"aorta_node_launcher={launcher}"]
    limit_s = 40 if fault == "freeze" else 120  # a host that is silent is lost at the time limit
    options += ["--aorta-gpus=0", f"--aorta-timeout={limit_s}", f"--aorta-results={folder / 'kept'}"]
    inner = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options, "test_inner.py"]
    command = [*UNSHARE, sys.executable, "-m", TWO_HOSTS, fault, str(folder), *inner]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "10.77.0.1"}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["left"] == {"host0": [], "host1": []}
    return report


@pytest.mark.parametrize(
    ("source", "num_ranks"),
    [
        pytest.param(FSDP, 2, id="fsdp on 2 ranks"),
        nightly(LLAMA, 4, id="llama_fsdp2 on 4 ranks"),
    ],
)
def test_workload_trains_over_two_hosts_and_leaves_no_process(tmp_path, source, num_ranks):
    report = run_on_two_hosts(tmp_path, source, "none")
    assert report["code"] == 0, report["output"]
    assert "1 passed" in report["output"]
    assert len(list((tmp_path / "kept").glob("*/*/ranks/*/output.log"))) == num_ranks


@pytest.mark.parametrize(
    ("fault", "message", "limit_s"),
    [
        ("freeze", "node lost: node 1 (", 90),
        ("kill_agent", "node lost: node 1 (", 30),
        ("kill_guard", "guard lost: node 1 (", 30),
    ],
)
@pytest.mark.extended
def test_lost_host_is_named_and_the_other_hosts_ranks_are_ended(tmp_path, fault, message, limit_s):
    report = run_on_two_hosts(tmp_path, LONG, fault)
    text = report["output"].replace("\n", " ")
    assert report["code"] == 1, text
    assert f"fsdp on 2 cpu ranks of 2 nodes: {message}" in text
    assert fault == "kill_guard" or "it ran rank 1" in text
    assert report["after_s"] < limit_s
    [stacks] = (tmp_path / "kept").glob("*/*/ranks/0/stacks.txt")
    assert fault != "freeze" or "fsdp" in stacks.read_text(encoding="utf-8")


def test_pytest_that_is_killed_leaves_no_rank_on_either_host(tmp_path):
    report = run_on_two_hosts(tmp_path, LONG, "kill_pytest")
    assert report["code"] == -9, report["output"]
