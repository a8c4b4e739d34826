"""Names of the files and folders that a launch leaves in its run folder, and readers of the smallest ones.

Programs that have to start quickly import this module, so it imports only small modules. The guard
(``launch/process/guard.py``) cannot import the package at all and repeats the few names it uses; a test compares them.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from pytest_aorta.common.files import read_regular

_PID_BYTES = 20

# Files of a launch.
PLAN_FILE: Final = "plan.json"
OUTCOME_FILE: Final = "outcome.json"
AGENT_LOG: Final = "agent.log"
AGENT_FILE: Final = "agent.json"
# Empty; the guard leaves this file before it asks the ranks for their stacks and ends them.
STOPPING_FILE: Final = "stopping"
# Host and versions of pytest, or of a node's agent, in a launch over several nodes.
HELLO_FILE: Final = "hello.json"
# Files of a launch and of each rank: merged in the run folder, one rank's own in the rank's folder.
RESULT_FILE: Final = "result.json"
TRACE_FILE: Final = "trace.json.gz"
# Folders of a launch: one folder per rank, one per node, and the dumps of NCCL's flight recorder.
RANKS_FOLDER: Final = "ranks"
NODES_FOLDER: Final = "nodes"
FLIGHT_FOLDER: Final = "flight"
# torchrun's folder for its own logs, which stay empty; deleted after the launch.
ELASTIC_FOLDER: Final = "torchelastic"
# A script's copy of the working folder; deleted after the launch.
COPY_FOLDER: Final = "copy"
# Files of a rank.
PID_FILE: Final = "pid"
# Empty; a rank leaves this file when its script, or the workload's run(), has returned.
RETURNED_FILE: Final = "returned"
VALUE_FILE: Final = "value.safetensors"
PROGRESS_FILE: Final = "progress"
OUTPUT_LOG: Final = "output.log"
STACKS_FILE: Final = "stacks.txt"
ERROR_FILE: Final = "error.json"
IN_FLIGHT_FILE: Final = "collectives.json"
ARRIVALS_FILE: Final = "arrivals.json"
OPERATORS_FILE: Final = "operators.json"
FIRST_STEP_FILE: Final = "first_step.npz"


def rank_folder(run_dir: Path, rank: int | str) -> Path:
    """Return the folder of one rank."""
    return run_dir / RANKS_FOLDER / str(rank)


def rank_folders(run_dir: Path, ranks: Iterable[int]) -> list[Path]:
    """Return the folders of ``ranks``, in the same order."""
    return [rank_folder(run_dir, rank) for rank in ranks]


def node_folder(run_dir: Path, node: int) -> Path:
    """Return the folder in which node 0 keeps the files of a node's torchrun agent."""
    return run_dir / NODES_FOLDER / str(node)


def flight_prefix(run_dir: Path) -> Path:
    """Return the path to which NCCL appends the rank's number to name a dump of its flight recorder."""
    return run_dir / FLIGHT_FOLDER / "rank_"


def rank_pids(run_dir: Path) -> dict[int, int]:
    """Return, by rank, the process id of each rank that has started on this host; a damaged file counts as none."""
    pids = {}
    for path in run_dir.glob(f"{RANKS_FOLDER}/*/{PID_FILE}"):
        with suppress(OSError, ValueError):
            pids[int(path.parent.name)] = int(read_regular(path, _PID_BYTES))
    return pids


def steps_entered(folder: Path) -> int:
    """Return how many measured steps a rank has entered, read from its folder; 0 if the rank left no count."""
    try:
        return int.from_bytes(read_regular(folder / PROGRESS_FILE, 8), sys.byteorder)
    except OSError:
        return 0
