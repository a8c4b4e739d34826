"""Two hosts as network namespaces with a cable between them.

Run: ``python -m tests.distributed.scripts.two_hosts FAULT FOLDER COMMAND...``, as root of its own user, network and
mount namespace (``unshare --user --map-root-user --net --mount``), which removes everything at its end. COMMAND runs on
host 0. With a FAULT other than ``none``, in mid-run on both hosts all processes of host 1 are stopped until pytest has
ended (``freeze``), or the agent of host 1, its guard or pytest is killed (``kill_agent``, ``kill_guard``,
``kill_pytest``). The script prints as JSON COMMAND's exit code, output and time since
the fault, and the processes left on each host.

With ``launcher COMMAND...`` the script is the node launcher, which runs COMMAND on each host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.distributed.scripts.namespace_hosts import do_in_mid_run, ip, kill, pids, tell_end

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("host0", "host1")
START_S = 120.0


def make_hosts() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    for number in (0, 1):
        ip("netns", "add", f"host{number}")
    ip("link", "add", "cable0", "netns", "host0", "type", "veth", "peer", "name", "cable1", "netns", "host1")
    for number, address in enumerate(ADDRESSES):
        ip("-n", f"host{number}", "address", "add", f"{address}/24", "dev", f"cable{number}")
        ip("-n", f"host{number}", "link", "set", f"cable{number}", "up")
        ip("-n", f"host{number}", "link", "set", "lo", "up")


def on_host(number: int, command: list[str], folder: Path) -> list[str]:
    # Leases belong to a host, and these two hosts share a disk.
    variables = [
        f"AORTA_NODE_RANK={number}",
        f"AORTA_LEASE_DIR={folder}/leases{number}",
        f"TMPDIR={folder}/host{number}",
    ]
    return ["ip", "netns", "exec", f"host{number}", "env", *variables, *command]


def launcher(command: list[str]) -> int:
    folder = Path(os.environ["TWO_HOSTS"])
    agents = [subprocess.Popen(on_host(number, command, folder)) for number in (0, 1)]
    return max(abs(agent.wait()) for agent in agents)


def fault_of(name: str, pytest: subprocess.Popen[bytes]) -> Callable[[], object]:
    return {
        "freeze": lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids("host1")],
        "kill_agent": lambda: kill("host1", "-m pytest_aorta.cli agent "),
        "kill_guard": lambda: kill("host1", "launch/process/guard.py"),
        "kill_pytest": pytest.kill,
    }[name]


def main() -> None:
    fault, folder, command = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    make_hosts()
    for host in HOSTS:
        (folder / host).mkdir()
    with (folder / "output").open("w+") as output:
        pytest = subprocess.Popen(
            on_host(0, command, folder), stdout=output, stderr=output, env=os.environ | {"TWO_HOSTS": str(folder)}
        )
        if fault != "none":
            do_in_mid_run(fault_of(fault, pytest), folder / "kept", pytest, START_S)
        tell_end(pytest, output, HOSTS, thaw="host1" if fault == "freeze" else None)


if __name__ == "__main__":
    if sys.argv[1] == "launcher":
        sys.exit(launcher(sys.argv[2:]))
    main()
