"""Two hosts as network namespaces with a cable between them: ``python two_hosts.py FAULT FOLDER COMMAND...``.

Has to run as root of a user, network and mount namespace of its own (``unshare --user --map-root-user --net --mount``),
with which everything it makes goes away. COMMAND runs on host 0. With a FAULT other than ``none``, in mid-run on both
hosts the cable is cut (``cut``), or the agent of host 1 or pytest is killed (``kill_agent``, ``kill_pytest``).
Prints as JSON how COMMAND ended and how long after the fault, what it said, and the processes left on each host.

As ``python two_hosts.py launcher COMMAND...`` it is the node launcher: COMMAND on each host.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
START_S = 120.0
LEFT_S = 20.0


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


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
    # Leases are of a host, and these two share a disk.
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


def pids(number: int) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", f"host{number}").split()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def are_under_way(folder: Path) -> bool:
    """Whether a rank of each host is in its measured steps."""
    counters = [list(folder.glob(f"host{number}/aorta-node-*/run/ranks/*/progress")) for number in (0, 1)]
    return all(any(int.from_bytes(path.read_bytes()[:8], "little") > 3 for path in paths) for paths in counters)


def do(fault: str, folder: Path, pytest: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while not are_under_way(folder):
        if time.monotonic() > deadline_s or pytest.poll() is not None:
            return
        time.sleep(0.05)
    match fault:
        case "cut":
            ip("-n", "host1", "link", "set", "cable1", "down")
        case "kill_agent":
            for pid in pids(1):
                if " agent --connect" in command_line(pid):
                    os.kill(pid, signal.SIGKILL)
        case "kill_pytest":
            pytest.kill()


def left() -> dict[str, list[str]]:
    """Command lines of what is left after a while, on each host."""
    deadline_s = time.monotonic() + LEFT_S
    while True:
        found = {str(number): list(filter(None, map(command_line, pids(number)))) for number in (0, 1)}
        if not any(found.values()) or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


def main() -> None:
    fault, folder, command = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    make_hosts()
    for number in (0, 1):
        (folder / f"host{number}").mkdir()
    with (folder / "output").open("w+") as output:
        pytest = subprocess.Popen(
            on_host(0, command, folder), stdout=output, stderr=output, env=os.environ | {"TWO_HOSTS": str(folder)}
        )
        if fault != "none":
            do(fault, folder, pytest)
        began_s = time.monotonic()
        code = pytest.wait()
        after_s = time.monotonic() - began_s
        found = left()
        output.seek(0)
        print(json.dumps({"code": code, "after_s": after_s, "left": found, "output": output.read()}))


if __name__ == "__main__":
    if sys.argv[1] == "launcher":
        sys.exit(launcher(sys.argv[2:]))
    main()
