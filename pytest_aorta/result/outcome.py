"""The outcome of a launch."""

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta

from pytest_aorta.common.model import Model
from pytest_aorta.plan.options import LauncherKind


class EndReason(StrEnum):
    """The reason why a launch ended. The guard and the agents of nodes write these strings."""

    EXIT = "exit"  # the torchrun agent ended by itself
    TIME_LIMIT = "time_limit"
    RANK_ERROR = "rank_error"  # a rank left an error, and the grace time of the other ranks is over
    STRAGGLER = "straggler"  # a rank left its result, and the other ranks did not follow in time
    RANK_GONE = "rank_gone"  # a rank has ended without a result and without an error, and torchrun has not
    OUTPUT_CAP = "output_cap"
    STOPPED = "stopped"  # pytest asked for the end
    PARENT_GONE = "parent_gone"
    GUARD_LOST = "guard_lost"
    # Reasons of launches over several nodes only.
    NODE_LOST = "node_lost"
    NODE_LAUNCHER = "node_launcher"
    NODE_MISMATCH = "node_mismatch"


LauncherName: TypeAlias = Annotated[str, Meta(pattern="^[a-z][a-z0-9_-]{0,39}$")]


class LaunchOutcome(Model, frozen=True):
    """The outcome of a launch: the guard's verdict, and ``outcome.json`` in the run folder.

    Attributes:
        reason: why the launch ended.
        agent_status: the torchrun agent's exit code, negative for a signal; None if the agent was killed at the end.
        stopped: ids of processes that were still alive when the launch was ended, and were ended with it.
        survivors: ids of processes that could not be ended.
        wall_s: seconds from the start of the torchrun agent to the end of the last process.
        launcher: what started the ranks: torchrun, forkserver or the name of a plugin's launcher.
        detail: for a reason that concerns a node, the node and what happened.
    """

    reason: EndReason
    agent_status: int | None
    stopped: tuple[int, ...]
    survivors: tuple[int, ...]
    wall_s: float
    launcher: LauncherName = LauncherKind.TORCHRUN
    detail: str = ""
