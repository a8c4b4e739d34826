"""A Slurm cluster of three nodes on this machine while a job runs.

Run: ``python -m tests.distributed.scripts.slurm_cluster FOLDER SBATCH...``, as root in its own pid, net, mount, uts and
ipc namespaces (``unshare --mount-proc --kill-child``), which end every process that the script has started. Each node
has a network namespace with a cable to the controller's switch, a host name, an slurmd, a temporary folder and leases;
sizes are made up. When a launch of the job reaches a fourth step on nodes 0 and 1, node 1's agent is killed. The script
prints as JSON SBATCH's exit code, the time since the kill, and the processes other than Slurm's that are left on each
node."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.scripts.namespace_hosts import do_in_mid_run, ip, kill, tell_end

NODES = ("node0", "node1", "node2")
HEAD = "10.78.0.254"
# The folder exists only in this mount namespace. Its path is short, because a socket's path is limited to 107
# characters.
RUN = Path("/run/aorta")
UP_S = 30.0
START_S = 150.0

CONFIG = """\
ClusterName=aorta
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={run}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task_prolog
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
JobRequeue=0
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MailProg=/bin/true
GresTypes=gpu
NodeName=node[0-2] NodeAddr=10.78.0.[1-3] CPUs=64 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES
"""
# Leases belong to a host, and these hosts share a disk.
TASK_PROLOG = """\
#!/bin/sh
echo "export TMPDIR={folder}/$SLURMD_NODENAME/tmp"
echo "export AORTA_LEASE_DIR={folder}/$SLURMD_NODENAME/leases"
"""


def do(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def make_network(folder: Path) -> None:
    do("mount", "-t", "tmpfs", "tmpfs", "/run")
    names = [f"10.78.0.{number} {name}" for number, name in enumerate(NODES, 1)]
    write(folder / "hosts", "\n".join(["127.0.0.1 localhost", f"{HEAD} head", *names, ""]))
    do("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    do("hostname", "head")
    ip("link", "set", "lo", "up")
    ip("link", "add", "switch", "type", "bridge")
    ip("address", "add", f"{HEAD}/24", "dev", "switch")
    ip("link", "set", "switch", "up")
    for number, name in enumerate(NODES, 1):
        ip("netns", "add", name)
        ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", f"port{number}")
        ip("link", "set", f"port{number}", "master", "switch", "up")
        ip("-n", name, "address", "add", f"10.78.0.{number}/24", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")
        ip("-n", name, "link", "set", "lo", "up")


def start_slurm(folder: Path) -> None:
    # slurmd finds processes by their parents, but needs a version of cgroups nevertheless.
    do("mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup")
    write(folder / "cgroup.conf", "CgroupPlugin=cgroup/v1\n")
    write(folder / "gres.conf", f"Name=gpu File={folder}/gpus/gpu[0-7]\n")
    for number in range(8):
        write(folder / f"gpus/gpu{number}", "")
    write(folder / "slurm.conf", CONFIG.format(folder=folder, run=RUN, head=HEAD))
    write(folder / "task_prolog", TASK_PROLOG.format(folder=folder), 0o755)
    munge = RUN / "munge"
    write(munge / "key", secrets.token_hex(64), 0o600)
    files = [f"--{name}-file={munge / name}" for name in ("key", "log", "pid", "seed")]
    do("munged", *files, f"--socket={munge / 'socket'}", "--force")
    (folder / "state").mkdir()
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    do("slurmctld")
    for name in NODES:
        (RUN / name).mkdir()
        (folder / name / "tmp").mkdir(parents=True)
        on_node = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c"]
        do(*on_node, f"hostname {name} && exec slurmd -N {name}")


def await_nodes() -> None:
    deadline_s = time.monotonic() + UP_S
    while True:
        asked = subprocess.run(["sinfo", "--noheader", "--Node", "--format=%t"], capture_output=True, text=True)
        if asked.stdout.split() == ["idle"] * len(NODES):
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nodes are not up: {asked.stdout}{asked.stderr}")
        time.sleep(0.1)


def main() -> None:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    make_network(folder)
    start_slurm(folder)
    await_nodes()
    with (folder / "sbatch.log").open("w+") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log)
        results = Path("results").absolute()
        do_in_mid_run(lambda: kill("node1", "-m pytest_aorta.cli agent "), results, job, START_S)
        tell_end(job, log, NODES, own="slurmd ")


if __name__ == "__main__":
    main()
