"""The process groups that a rank makes: each stays alive until the rank has left, and each default group meets anew.

gloo's thread frees a group's last collective, and needs the GIL where Python owns one of its tensors. The destructor of
the group holds the GIL while it joins this thread. So a rank hangs if its group, which the script has destroyed, is
freed with the last model or mesh that refers to it, such as when ``main()`` returns.

torch forgets how many default groups it has made when the last one is destroyed, so the next group would read the
addresses of its predecessor in the store. So the keys of later groups have a prefix. The store is the file of
``AORTA_STORE`` if the agent has made one, since anyone on the host can write into a TCPStore.

Two functions of torch are replaced: the one that lists a new group, and the rendezvous.
"""

import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from pytest_aorta.common import variables
from pytest_aorta.worker.torch_private import c10d

# Destroyed groups that stay alive while a script makes others, as each has threads and sockets. The thread of a group
# that is older has freed its last collective long ago.
MAX_DESTROYED = 16


@cache
def keep_groups() -> None:
    """Keep the process groups that this process makes from now on; further calls do nothing."""
    register, meet = c10d._register_process_group, c10d.rendezvous
    path, endpoint = os.environ.get(variables.STORE), _endpoint()
    kept: list[dist.ProcessGroup] = []
    # How many default groups have met at a URL. Ranks may have made different numbers of groups that met elsewhere.
    num_worlds = Counter[str]()
    meeting_at = ""

    def register_process_group(name: str, group: dist.ProcessGroup) -> None:
        nonlocal meeting_at
        if dist.group.WORLD is None:
            num_worlds[meeting_at] += 1
            meeting_at = ""
        kept.append(group)
        destroyed = [one for one in kept if one not in c10d._world.pg_map]
        for one in destroyed[:-MAX_DESTROYED]:
            kept.remove(one)
        register(name, group)

    def rendezvous(url: str, *args: Any, **keywords: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal meeting_at
        meeting_at = url.partition("?")[0]
        number = num_worlds[meeting_at]
        for store, rank, size in meet(url, *args, **keywords):
            # A script that names another endpoint meets other processes there.
            if path and url == "env://" and _endpoint() == endpoint:
                store = FileStore(path, size)
            yield PrefixStore(f"aorta/{number}", store) if number else store, rank, size

    c10d._register_process_group, c10d.rendezvous = register_process_group, rendezvous


def _endpoint() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
