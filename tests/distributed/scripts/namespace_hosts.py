"""Hosts that are network namespaces: their processes, faults in mid-run, and leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from pytest_aorta.result.folder import OUTCOME_FILE, steps_entered

LEFT_S = 20.0


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def pids(host: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", host).split()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def are_under_way(results: Path, hosts: int) -> bool:
    """Return whether a rank of each host of one launch below ``results`` is in its measured steps."""
    runs = {nodes.parent for nodes in results.glob("**/nodes")}
    return any(
        all(any(steps_entered(rank) > 3 for rank in run.glob(f"nodes/{host}/ranks/*")) for host in range(hosts))
        and not (run / OUTCOME_FILE).exists()
        for run in runs
    )


def do_in_mid_run(
    fault: Callable[[], object], results: Path, running: subprocess.Popen[bytes], limit_s: float, hosts: int = 2
) -> None:
    """Call ``fault`` when ranks are in their steps on each host, unless ``running`` has ended before."""
    deadline_s = time.monotonic() + limit_s
    while not are_under_way(results, hosts):
        if time.monotonic() > deadline_s or running.poll() is not None:
            return
        time.sleep(0.05)
    fault()


def kill(host: str, program: str) -> None:
    """Kill the processes of a host whose command lines contain ``program``."""
    found = [pid for pid in pids(host) if program in command_line(pid)]
    assert found, f"{program} does not run on {host}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def left(hosts: Sequence[str], own: str | None = None) -> dict[str, list[str]]:
    """Return command lines of processes left on each host after a while, except those that begin with ``own``."""
    deadline_s = time.monotonic() + LEFT_S
    while True:
        lines = {host: [line for line in map(command_line, pids(host)) if line] for host in hosts}
        found = {host: [line for line in lines[host] if not (own and line.startswith(own))] for host in hosts}
        if not any(found.values()) or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


def tell_end(
    running: subprocess.Popen[bytes],
    output: IO[str],
    hosts: Sequence[str],
    own: str | None = None,
    thaw: str | None = None,
) -> None:
    """Wait for ``running``, and print its exit code, duration, output and processes left as JSON.

    The processes of the host ``thaw``, which have been stopped, continue once ``running`` has ended.
    """
    began_s = time.monotonic()
    code = running.wait()
    after_s = time.monotonic() - began_s
    for pid in pids(thaw) if thaw else ():
        os.kill(pid, signal.SIGCONT)
    found = left(hosts, own)
    output.seek(0)
    print(json.dumps({"code": code, "after_s": after_s, "left": found, "output": output.read()}))
