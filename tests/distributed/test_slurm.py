"""The batch script of `examples/slurm` under Slurm itself, on a cluster of three nodes that this machine simulates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import refused_namespaces
from tests.unit.builders import write

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
CLUSTER = "tests.distributed.scripts.slurm_cluster"
UNSHARE = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "mount", "hostname")
LIMIT_S = 240

# The job has three nodes; these tests use two. The cluster waits for a fourth step before it kills an agent.
TESTS = """
import pytest

@pytest.mark.overlap
@pytest.mark.world(size=2, nodes=2)
def test_short(workload):
    result = workload.run("fsdp", steps=3, warmup=1, verify=1)
    assert (result.platform, len(result.rank_step_times_ms)) == ("cpu-x2-n2-gloo", 2)

@pytest.mark.overlap
@pytest.mark.world(size=2, nodes=2)
def test_long(workload):
    workload.run("fsdp", steps=1000000, warmup=1, verify=1)
"""


def make_project(folder: Path) -> None:
    """Create a project for the batch script, without its need for GPUs."""
    script = (ROOT / "examples/slurm/two_nodes.sbatch").read_text(encoding="utf-8")
    assert script.count("--aorta-without-gpus=fail") == 1
    files = {
        "two_nodes.sbatch": script.replace("--aorta-without-gpus=fail", "--aorta-gpus=0"),
        ".venv/bin/activate": f"PATH={Path(sys.executable).parent}:$PATH\n",
        "pytest.ini": "[pytest]\nfilterwarnings = error\naddopts = -p no:xdist -p no:cacheprovider\n",
        "tests/test_overlap.py": TESTS,
    }
    for name, text in files.items():
        write(folder / name, text)


def test_batch_script_trains_under_slurm_and_a_killed_agent_is_reported(tmp_path):
    bridge = "mount -t tmpfs tmpfs /run && ip netns add node0 && ip link add switch type bridge"
    if reason := "slurmd needs root" if os.geteuid() else refused_namespaces(UNSHARE, PROGRAMS, bridge):
        pytest.skip(f"a cluster needs Slurm and namespaces: {reason} (Debian packages slurm-wlm, munge, iproute2)")
    project, cluster = tmp_path / "project", tmp_path / "cluster"
    make_project(project)
    job = ["sbatch", "--wait", "--nodes=3", "--output=job.log", "two_nodes.sbatch"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*UNSHARE, sys.executable, "-m", CLUSTER, str(cluster), *job]
    ended = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    log = project / "job.log"
    text = log.read_text(encoding="utf-8") if log.exists() else report["output"]
    assert report["left"] == {"node0": [], "node1": [], "node2": []}
    assert report["code"] == 1, text
    assert "1 failed, 1 passed" in text
    assert "fsdp on 2 cpu ranks of 2 nodes: node lost: node 1 (node1): its agent has left no outcome" in text
    # sbatch --wait looks for the job's end only every 30 s.
    [outcome] = project.glob("results/*/*test-long*/*/outcome.json")
    other = outcome.parent / "nodes/0/outcome.json"
    assert outcome.stat().st_mtime - other.stat().st_mtime < 20
    # srun has ended node 0's agent too, but only after its rank has written its stacks.
    [stacks] = project.glob("results/*/*test-long*/*/ranks/0/stacks.txt")
    assert "fsdp" in stacks.read_text(encoding="utf-8")
