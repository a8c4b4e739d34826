"""The torchrun agent, ``python -m pytest_aorta.launch.process.torchrun RUN_DIR ARGS...``.

The program runs torchrun, and writes the exit code of every rank that failed on its own to ``agent.json``: torchrun
reports exit codes only in its log.
"""

import argparse
import fcntl
import logging
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.files import UnreadableFile, raised_as, without_collection, write_json
from pytest_aorta.common.model import Model, read_model, to_builtins
from pytest_aorta.launch.process.rank import ask_for_evidence, leave_failures, make_store
from pytest_aorta.result.folder import rank_pids

# The logger that names the ranks that torchrun stops.
STOPPING_LOGGER = "torch.distributed.elastic.multiprocessing.api"
LOOPBACK = "127.0.0.1"
ENDPOINT_FILE = "endpoint.json"
SIOCGIFADDR = 0x8915


class _StoppedRanks(logging.Filter):
    """The last signal that torchrun sent to each rank that it stopped, by process id, read from torchrun's log."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.signals: dict[object, signal.Signals] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the process id that a message names, and ask all ranks for evidence first; every message stays."""
        text = str(record.msg)
        if isinstance(record.args, tuple) and record.args:
            if text.startswith("Sending process"):
                # torchrun writes this message before it sends the signal.
                if not self.signals:
                    ask_for_evidence(self.run_dir)
                self.signals[record.args[0]] = signal.SIGTERM
            elif text.startswith("Unable to shutdown process"):
                self.signals[record.args[0]] = signal.SIGKILL
        return True

    def ranks(self) -> list[int]:
        """Return the ranks that torchrun stopped."""
        return [rank for rank, pid in rank_pids(self.run_dir).items() if pid in self.signals]


def main(argv: list[str]) -> int:
    """Run torchrun with ``argv[1:]`` and return its exit code."""
    with without_collection():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    stopped = _StoppedRanks(Path(argv[0]))
    logging.getLogger(STOPPING_LOGGER).addFilter(stopped)
    arguments = parse_args(argv[1:])
    store = _join_rendezvous(Path(argv[0]), arguments)
    os.environ[variables.AGENT_PID] = str(os.getpid())
    if int(arguments.nnodes) == 1:
        os.environ[variables.STORE] = make_store()
    try:
        run(arguments)
    except ChildFailedError as error:
        # Besides ranks that failed, the error contains ranks that torchrun has stopped.
        failures = (
            (rank, failure.pid, failure.exitcode)
            for rank, failure in error.failures.items()
            if failure.exitcode != -stopped.signals.get(failure.pid, 0)
        )
        leave_failures(stopped.run_dir, failures, stopped.ranks())
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        del store  # the store serves as long as the object lives
    return 0


class Endpoint(Model, frozen=True):
    """The address at which node 0 serves the rendezvous, in ``endpoint.json`` of that node's run folder."""

    address: str
    port: int


def _join_rendezvous(run_dir: Path, arguments: argparse.Namespace) -> object:
    """Add the endpoint of the rendezvous to torchrun's arguments; return the store, which serves as long as it lives.

    torchrun's c10d rendezvous unpickles its state, which anyone who reaches the store can write. The static rendezvous
    keeps nothing pickled. Its store listens before the port is known, so no other program can take the port; on one
    host it listens on the loopback address only.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store, nodes, node = None, int(arguments.nnodes), arguments.node_rank
    if node == 0:
        listener = socket.create_server((LOOPBACK if nodes == 1 else _own_address(), 0), backlog=2048)
        endpoint = Endpoint(*listener.getsockname())
        store = TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # torchrun's own store at this port uses this one's server
            master_listen_fd=listener.detach(),
        )
        if nodes > 1:
            write_json(run_dir / ENDPOINT_FILE, to_builtins(endpoint), durable=False)
    else:
        endpoint = _await_endpoint(run_dir.with_name("0"))
    if nodes > 1 and (interface := _interface_to(endpoint)):
        # Otherwise gloo resolves the host's name, often to an interface that no other node can reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    arguments.master_addr, arguments.master_port = endpoint.address, endpoint.port
    return store


def _own_address() -> str:
    """Return this host's address in the network of the nodes: that of MASTER_ADDR, or of the host's name."""
    given = os.environ.get("MASTER_ADDR")
    name = given or socket.gethostname()
    remedy = "set MASTER_ADDR to this host's address in the network of the nodes"
    with raised_as(SystemExit, f"{name!r} is no address of this host (", after=f"); {remedy}"):
        address = str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        socket.create_server((address, 0)).close()
    if not given and address.startswith("127."):
        raise SystemExit(f"{name!r} is the loopback address {address}, which no other node reaches; {remedy}")
    return address


def _interface_to(endpoint: Endpoint) -> str | None:
    """Return the network interface that leads to the endpoint; None if its name can't be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.address, endpoint.port))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None


def _await_endpoint(folder: Path) -> Endpoint:
    """Return the endpoint once node 0 serves it; the guard limits the time."""
    while True:
        with suppress(UnreadableFile):
            list(folder.iterdir())  # a client of NFS believes that the file is absent until it opens the folder again
            return read_model(folder / ENDPOINT_FILE, Endpoint, max_bytes=1 << 16)
        time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Python would take a third of a second to free the objects of torch, and the guard waits for the agent's end.
    os._exit(exit_code)
