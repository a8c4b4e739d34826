"""Faults that tests plant in the data, never in the checks, to prove that the checks find and name each of them."""

from dataclasses import dataclass

import torch

from .oracle import CodeTable

GATHER_KINDS = ("stale_gather", "zeroed_gather", "partial_gather", "permuted_gather", "swapped_shards")
DATA_KINDS = (*GATHER_KINDS, "stale_h2d", "dropped_gradient", "stale_gradient")


@dataclass(frozen=True)
class FaultSpec:
    """The block ``fault`` of a config; ``iteration`` counts checked iterations from 0, None is every rank or layer."""

    kind: str = "none"
    iteration: int = 0
    layer: int | None = 0
    phase: str = "forward"
    rank: int | None = None
    source_rank: int = 0
    delay_ms: float = 0.0
    every: int = 1

    def check(self, *, verify: int, layers: int, world_size: int, optimizer: str) -> None:
        """Raise ValueError if the fault could not happen in this run."""
        if self.kind in DATA_KINDS:
            self._check_range("iteration", self.iteration, verify, "checked iterations (config key 'verify')")
        if self.layer is None and self.kind != "in_line":
            raise ValueError(f"fault {self.kind!r} has layer null, which only 'in_line' can have")
        self._check_range("layer", self.layer or 0, layers, "layers")
        for name, rank in (("rank", self.rank), ("source_rank", self.source_rank)):
            self._check_range(name, rank or 0, world_size, "ranks")
        if self.kind == "weight" and optimizer == "none":
            raise ValueError("fault 'weight' needs weights, and optimizer 'none' has none: set optimizer to 'sgd'")

    def _check_range(self, name: str, value: int, count: int, of_what: str) -> None:
        if not 0 <= value < count:
            allowed = f"0..{count - 1}" if count else "none"
            raise ValueError(f"fault {self.kind!r} has {name} {value}; of {count} {of_what}, allowed is {allowed}")


class Fault:
    """A :class:`FaultSpec` applied on this rank."""

    def __init__(
        self, spec: FaultSpec, codes: CodeTable, chunks: torch.Tensor, *, rank: int, first_checked: int
    ) -> None:
        """Prepare the fault.

        Args:
            chunks: indices of all ranks' chunks, one row per rank.
            first_checked: the iteration of the run that is iteration 0 of ``spec``.
        """
        self._spec, self._codes, self._chunks, self._rank = spec, codes, chunks, rank
        self._here = spec.rank in (None, rank)
        self._iteration = first_checked + spec.iteration

    def on_gathered(self, chunks: torch.Tensor, iteration: int, layer: int, phase: str) -> None:
        """Damage gathered parameters, one row per source rank, between their arrival and their use."""
        spec = self._spec
        if spec.kind not in GATHER_KINDS or spec.phase != phase or not self._strikes(iteration, layer):
            return
        chunk = chunks[spec.source_rank]
        if spec.kind == "zeroed_gather":
            chunk.zero_()
        elif spec.kind == "permuted_gather":
            chunk[:2] = chunk[:2].flip(0)
        elif spec.kind == "swapped_shards":
            pair = [spec.source_rank, (spec.source_rank + 1) % len(chunks)]
            chunks[pair[0]], chunks[pair[1]] = chunks[pair[1]].clone(), chunks[pair[0]].clone()
        else:
            begin = len(chunk) // 2 if spec.kind == "partial_gather" else 0
            stale = torch.empty_like(chunk)
            self._codes.write(stale, self._chunks[spec.source_rank], iteration - 1, layer)
            chunk[begin:] = stale[begin:]

    def input_iteration(self, iteration: int) -> int:
        """Return the iteration whose input is copied to the device."""
        return iteration - int(self._spec.kind == "stale_h2d" and self._here and iteration == self._iteration)

    def on_gradient(self, gradient: torch.Tensor, iteration: int, layer: int) -> None:
        """Damage this rank's contribution to a gradient before the reduction."""
        if self._spec.kind == "dropped_gradient" and self._strikes(iteration, layer):
            gradient.zero_()

    def on_reduced(self, reduced: torch.Tensor, iteration: int, layer: int) -> None:
        """Damage this rank's shard of a reduced gradient after its arrival."""
        if self._spec.kind == "stale_gradient" and self._strikes(iteration, layer):
            self._codes.write(reduced, self._chunks[self._rank], iteration - 1, layer)

    def on_final_weights(self, weights: torch.Tensor) -> None:
        """Change one float32 weight of this rank by one unit in the last place."""
        if self._spec.kind == "weight" and self._here:
            weights.view(torch.int32)[-1:].add_(1)

    def runs_in_line(self, layer: int) -> bool:
        """Return whether compute waits for the layer's collectives as soon as they are submitted."""
        return self._spec.kind == "in_line" and self._here and self._spec.layer in (None, layer)

    def is_due(self, kind: str, iteration: int) -> bool:
        """Return whether ``kind``, of the faults that repeat, strikes this iteration on this rank."""
        return self._spec.kind == kind and self._here and iteration % self._spec.every == 0

    def _strikes(self, iteration: int, layer: int) -> bool:
        return self._here and iteration == self._iteration and layer == self._spec.layer
