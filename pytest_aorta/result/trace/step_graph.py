"""A step's graph of streams: what one rank runs on each stream, and what each part waits for. Pure, and without times.

Equal programs have equal graphs, in every run, on any machine and whatever the device: what decides whether a
collective can hide under compute is which of the two waits for the other.
"""

from __future__ import annotations

from enum import StrEnum

from pytest_aorta.common.model import Count, Model, Positive

# A step of a Llama of 80 layers in 16 micro-batches has some 40,000 nodes.
MAX_NODES = 100_000


class Work(StrEnum):
    """A kind of work on a stream."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    COPY = "copy"


class Node(Model, frozen=True, omit_defaults=True):
    """Work that a rank gives to a stream at once.

    Attributes:
        work: Kind of work.
        name: The operator, such as ``aten::mm``; of a collective its kind, such as ``all_gather``.
        stream: Index into :attr:`StepGraph.streams`.
        after: Indices of earlier nodes that it waits for, that before it on its stream included. Those that another of
            these waits for may be left out.
        flops: Floating-point operations.
        num_bytes: Of a collective the larger of input and output of a call, of compute without ``flops`` and of copies
            what is read and written.
        group: Process group of a collective.
        group_size: Number of ranks in the group.
        sends_to, receives_from: Of a message between two ranks the other one.
        of: Module or parameter that it belongs to, such as ``layers.3``; empty if unknown.
        place: Line of the user's code; empty unless a launch locates costs.
    """

    work: Work
    name: str
    stream: Count
    after: list[Count]
    flops: Count = 0
    num_bytes: Count = 0
    group: str = ""
    group_size: Positive = 1
    sends_to: Count | None = None
    receives_from: Count | None = None
    of: str = ""
    place: str = ""


class StepGraph(Model, frozen=True, omit_defaults=True):
    """The graph of one step of one rank.

    Attributes:
        streams: Names of streams: ``compute``, then those of the collectives that run on them, such as ``all-gather``,
            or ``stream 3``.
        nodes: The step's work in the order in which the host gives it to streams.
        unseen: What the graph does not show, by name, such as streams that are made in C++.
        problem: The reason why there is no graph; empty if there is one.
    """

    streams: list[str] = []
    nodes: list[Node] = []
    unseen: list[str] = []
    problem: str = ""
