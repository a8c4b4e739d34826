"""The kinds of activation checkpointing in the order of their cost, and the rule that chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# From the least recomputation to the most.
LADDER = ("none", "elementwise", "selective", "full")


@dataclass(frozen=True)
class Choice:
    """A kind of checkpointing for the first ``num_more`` of ``num_blocks`` blocks, and another kind for the rest.

    The first blocks are recomputed last. By then backward has freed the activations of all other blocks, so the memory
    of the recomputation does not add to the peak.
    """

    more: str
    less: str
    num_more: int
    num_blocks: int

    def kind(self, block: int) -> str:
        """Return the kind of block number ``block``, from 0."""
        return self.more if block < self.num_more else self.less

    def __str__(self) -> str:
        """Return the kinds, each with its number of blocks."""
        if self.num_more in (0, self.num_blocks):
            return f"{self.kind(0)} on all {self.num_blocks} blocks"
        rest = self.num_blocks - self.num_more
        return f"{self.more} on {self.num_more} of {self.num_blocks} blocks, {self.less} on {rest}"


def same_on_all(kind: str, num_blocks: int) -> Choice:
    """Return the choice of one kind for all blocks."""
    return Choice(kind, kind, num_blocks, num_blocks)


def choices(num_blocks: int) -> list[Choice]:
    """Return all choices from the least recomputation to the most.

    A kind is used on every block before the next kind is used on any: each kind frees fewer bytes per recomputed
    operation than the kind before it.
    """
    partial = [
        Choice(more, less, number, num_blocks) for less, more in pairwise(LADDER) for number in range(1, num_blocks + 1)
    ]
    return [same_on_all(LADDER[0], num_blocks), *partial]


def first_that_fits(estimates: Sequence[int], budget: int) -> int | None:
    """Return the position of the first estimate that is at most ``budget``, or None."""
    return next((number for number, estimate in enumerate(estimates) if estimate <= budget), None)
