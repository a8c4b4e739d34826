"""The peak memory of a training step, from the bytes of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Activations:
    """The bytes of one part of the model for one micro-batch.

    Attributes:
        kept: bytes that exist between the part's forward and its backward pass, its output included.
        working: largest number of further bytes while the part's forward or backward pass runs. They include the
            gradients of the part's input, of its output and of its unsharded parameters.
    """

    kept: int
    working: int


@dataclass(frozen=True)
class Unit:
    """The bytes of parameters that are gathered together.

    Attributes:
        shards: this rank's shards in float32; the shards of their gradients have the same size.
        gathered: the gathered parameters in the dtype of compute; their gradients before reduction have the same size.
        reduced: the gradients in the dtype of reduction.
    """

    shards: int = 0
    gathered: int = 0
    reduced: int = 0

    def __add__(self, other: Unit) -> Unit:
        """Return the bytes of both."""
        return Unit(self.shards + other.shards, self.gathered + other.gathered, self.reduced + other.reduced)


@dataclass(frozen=True)
class Communication:
    """The bytes that sharding takes besides shards.

    Attributes:
        in_flight: the most gathered parameters that exist at once, besides the gathered parameters that blocks keep.
        reductions: the gradients of one unit, which are reduced while backward computes the gradients of the next unit.
        unsharded_gradients: gradients that micro-batches add up before they are reduced.
        kept_gathers: kind of checkpointing -> the gathered parameters that a block keeps from forward to backward.
        gathered: the gathered parameters of one block.
        no_reshard_blocks: number of last blocks that keep gathered parameters, whatever their kind.
    """

    in_flight: int
    reductions: int
    unsharded_gradients: int
    kept_gathers: Mapping[str, int]
    gathered: int = 0
    no_reshard_blocks: int = 0

    def kept(self, kinds: Sequence[str]) -> list[int]:
        """Return the gathered parameters that each block keeps, given the kinds of all blocks in order."""
        first = len(kinds) - self.no_reshard_blocks
        return [self.gathered if number >= first else self.kept_gathers[kind] for number, kind in enumerate(kinds)]


@dataclass(frozen=True)
class StepMemory:
    """The parts of one rank's training step, in bytes.

    Attributes:
        embedding, block, head: the parameters of the embedding, of one block, and of the last norm with the output;
            zero in a stage that lacks the part.
        blocks: the numbers of this rank's blocks.
        inputs: the activations that the first of these blocks reads.
        by_kind: the activations of one block under each kind of checkpointing.
        loss: the activations of the last norm, the output and the loss.
        communication: the bytes that sharding takes besides shards.
        num_in_flight: number of micro-batches whose activations exist at once.
        keeps_gradients: whether sharded gradients of earlier micro-batches exist.
        batches: the tokens of all steps.
        workspace: memory that kernels allocate for themselves, which is not the output of an operator.
        optimizer: temporary memory of the optimizer's step.
    """

    embedding: Unit
    block: Unit
    head: Unit
    blocks: range
    inputs: int
    by_kind: Mapping[str, Activations]
    loss: Activations
    communication: Communication
    num_in_flight: int
    keeps_gradients: bool
    batches: int
    workspace: int
    optimizer: int

    @property
    def shards(self) -> int:
        """Return the bytes of all parameters that this rank stores."""
        return self.embedding.shards + len(self.blocks) * self.block.shards + self.head.shards

    @property
    def persistent(self) -> int:
        """Return the bytes of parameters, optimizer state, batches and gradients that exist in the whole step."""
        # AdamW keeps two moments of each parameter.
        gradients = self.shards if self.keeps_gradients else 0
        return 3 * self.shards + gradients + self.communication.unsharded_gradients + self.batches + self.workspace

    def keeping(self, no_reshard_blocks: int) -> StepMemory:
        """Return the same step with another number of last blocks that keep gathered parameters."""
        return replace(self, communication=replace(self.communication, no_reshard_blocks=no_reshard_blocks))

    def peak(self, kinds: Sequence[str]) -> int:
        """Return the most bytes that exist at once if this rank's blocks have these kinds of checkpointing.

        The peak is the largest of four moments: the loss, each block's backward pass, the embedding's backward pass,
        and the optimizer's step. Backward frees the activations of one block after another and makes gradients.
        """
        communication = self.communication
        gathers = communication.kept(kinds)
        kept = [self.by_kind[kind].kept + gathered for kind, gathered in zip(kinds, gathers, strict=True)]
        others = (self.num_in_flight - 1) * (self.inputs + sum(kept))
        always = self.persistent + others + self.inputs
        moments = [
            always + sum(kept) + communication.in_flight + 2 * self.head.gathered + self.loss.kept + self.loss.working
        ]
        made = self._made(self.head.shards)
        for number in reversed(range(len(kinds))):
            working = self.by_kind[kinds[number]].working + communication.in_flight + communication.reductions
            moments.append(always + sum(kept[: number + 1]) + working + made)
            made += self._made(self.block.shards)
        moments.append(always + 2 * self.embedding.gathered + 2 * self.embedding.reduced + made)
        moments.append(self.persistent + self._made(self.shards) + self.optimizer)
        return max(moments)

    def _made(self, gradients: int) -> int:
        """Return the bytes of new gradients; 0 if they are added to earlier gradients."""
        return 0 if self.keeps_gradients else gradients
