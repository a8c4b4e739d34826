"""Copies of random data, and the check that all of the data arrived."""

import torch

from pytest_aorta.worker import FailureDetail

from ..common.seeding import generator

KINDS = ("h2d", "d2h", "d2d")
# Elements that are made or compared at a time, on the device, where both are fast; few, since the peak memory counts.
_PART = 2**22


class Copy:
    """One kind of copy, of random int32 numbers; all of them are copied unless a fault is planted."""

    def __init__(self, kind: str, copy_mb: float, device: torch.device, fault: str = "none") -> None:
        """Allocate both ends; host memory is pinned on CUDA, since only copies of pinned memory run beside compute."""
        numel = max(1, round(copy_mb * 2**20) // torch.int32.itemsize)
        on_cuda = device.type == "cuda"

        def end(*, on_host: bool) -> torch.Tensor:
            place = torch.device("cpu") if on_host else device
            return torch.empty(numel, dtype=torch.int32, device=place, pin_memory=on_host and on_cuda)

        self._device = device
        self.kind, self.source, self.target = kind, end(on_host=kind == "h2d"), end(on_host=kind == "d2h")
        self._length = {"none": numel, "skipped_copy": 0, "short_copy": numel - 1}[fault]

    def transfer(self, _asynchronous: bool) -> None:
        """Copy on the current stream or thread."""
        self.target[: self._length].copy_(self.source[: self._length], non_blocking=True)

    def prepare(self, seed: int, check: int) -> None:
        """Fill the source with numbers unique to this check, and clear the target."""
        random = generator(self._device, "copy", seed, self.kind, check)
        for part in self.source.split(_PART):
            part.copy_(torch.randint(1, 2**31, part.shape, dtype=torch.int32, device=self._device, generator=random))
        self.target.zero_()

    def failure(self, check: int, rank: int) -> FailureDetail | None:
        """Compare every element after the copy has ended; return None if all are equal."""
        source, target = self.source, self.target
        parts = zip(source.split(_PART), target.split(_PART), strict=True)
        differ = [torch.nonzero(here.to(self._device) != there.to(self._device)).flatten() for here, there in parts]
        wrong = torch.cat([place + _PART * number for number, place in enumerate(differ)]).cpu()
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
            cause="no data arrived" if not target[wrong.to(target.device)].any() else None,
        )
