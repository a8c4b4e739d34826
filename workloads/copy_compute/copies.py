"""Copies of random data, and the check that all of the data arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_aorta.worker import FailureDetail, Transfer

from ..common.seeding import generator

KINDS = ("h2d", "d2h", "d2d")
_ITEM_BYTES = 4


@dataclass(frozen=True)
class Copy:
    """One kind of copy, of random int32 numbers; ``length`` of them are copied, all unless a fault is planted."""

    kind: str
    source: torch.Tensor
    target: torch.Tensor
    length: int

    @classmethod
    def allocate(cls, kind: str, copy_mb: float, device: torch.device, fault: str = "none") -> Copy:
        """Allocate both ends; host memory is pinned on CUDA, since only copies of pinned memory run beside compute."""
        numel = max(1, round(copy_mb * 2**20) // _ITEM_BYTES)
        on_cuda = device.type == "cuda"

        def buffer(*, on_host: bool) -> torch.Tensor:
            if on_host:
                return torch.empty(numel, dtype=torch.int32, pin_memory=on_cuda)
            return torch.empty(numel, dtype=torch.int32, device=device)

        length = {"none": numel, "skipped_copy": 0, "short_copy": numel - 1}[fault]
        return cls(kind, buffer(on_host=kind == "h2d"), buffer(on_host=kind == "d2h"), length)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one copy."""
        return self.source.nbytes

    @property
    def transfer(self) -> Transfer:
        """Return the copy as a transfer, which runs on the current stream or thread."""

        def copy(_asynchronous: bool) -> None:
            self.target[: self.length].copy_(self.source[: self.length], non_blocking=True)

        return copy

    def prepare(self, seed: int, check: int) -> None:
        """Fill the source with numbers unique to this check, and clear the target."""
        numbers = torch.randint(
            1, 2**31, self.source.shape, dtype=torch.int32,
            generator=generator(torch.device("cpu"), "copy", seed, self.kind, check),
        )  # fmt: skip
        self.source.copy_(numbers)
        self.target.zero_()

    def failure(self, check: int, rank: int) -> FailureDetail | None:
        """Compare every element after the copy has ended; return None if all are equal."""
        source, target = self.source.cpu(), self.target.cpu()
        wrong = torch.nonzero(source != target).flatten()
        if not len(wrong):
            return None
        first = int(wrong[0])
        return FailureDetail(
            kind=f"copy_{self.kind}",
            iteration=check,
            rank=rank,
            index=first,
            count=len(wrong),
            total=source.numel(),
            expected=float(source[first]),
            actual=float(target[first]),
            cause="no data arrived" if not target[wrong].any() else None,
        )
