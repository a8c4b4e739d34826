"""Checks of every transfer in the checked iterations: recorded on the device, then read and explained at the end."""

import torch

from pytest_aorta.worker import FailureDetail, is_simulated

from .diagnosis import ALL_GATHER, H2D, REDUCE_SCATTER, Check, Mismatch, failure_detail
from .oracle import COLUMNS, INPUT_SLOTS, CodeTable, by_column, compare
from .settings import Settings

MAX_DETAILS = 20


class Verification:
    """The checks of a run; each records into memory of its own on the device, which the host reads at the end."""

    def __init__(self, settings: Settings, codes: CodeTable, index: torch.Tensor, input_index: torch.Tensor) -> None:
        """Allocate the records.

        Args:
            index: indices of all ranks' chunks.
            input_index: indices of this rank's input.
        """
        self._settings, self._codes, self._index, self._input_index = settings, codes, index, input_index
        self._checks: list[Check] = []
        # Of an iteration, the input, and of each layer two all-gathers and a reduce-scatter.
        num_checks = settings.verify * (1 + 3 * settings.layers)
        shape = (num_checks, settings.world_size, len(COLUMNS))
        self._found = torch.zeros(shape, dtype=torch.float64, device=index.device)
        self._expected = torch.empty(index.numel(), dtype=codes.dtype, device=index.device)
        self._expected_input = torch.empty(input_index.numel(), dtype=codes.dtype, device=index.device)

    def covers(self, iteration: int) -> bool:
        """Return whether ``iteration`` of the run is checked; in a simulated world, nothing arrives to be checked."""
        return 0 <= iteration - self._settings.warmup < self._settings.verify and not is_simulated()

    def check_input(self, iteration: int, actual: torch.Tensor) -> None:
        """Record whether the input is this iteration's."""
        if self.covers(iteration):
            slot, layer = iteration % INPUT_SLOTS, self._settings.layers
            self._codes.write(self._expected_input, self._input_index, slot, layer)
            record = self._record(H2D, iteration)
            compare(actual.unsqueeze(0), self._expected_input.unsqueeze(0), record[:1])

    def check_gathered(self, iteration: int, layer: int, phase: str, actual: torch.Tensor) -> None:
        """Record whether gathered parameters, one row per source rank, are this iteration's and layer's."""
        if self.covers(iteration):
            self._codes.write(self._expected, self._index, iteration, layer)
            compare(actual, self._expected.view_as(actual), self._record(f"{ALL_GATHER}_{phase}", iteration, layer))

    def check_reduced(self, iteration: int, layer: int, actual: torch.Tensor) -> None:
        """Record whether this rank's shard of a summed gradient holds every rank's contribution."""
        if self.covers(iteration):
            world_size = self._settings.world_size
            self._codes.write(self._expected, self._index, iteration, layer)
            expected = self._expected.view(world_size, -1)[self._settings.rank]
            rows = by_column(actual, world_size), by_column(expected, world_size)
            compare(*rows, self._record(REDUCE_SCATTER, iteration, layer))

    def rehearse(self) -> None:
        """Run each check once and discard its record; a first cudaMalloc within a checked step could hide a race."""
        if self._settings.verify:
            iteration, chunks = self._settings.warmup, self._expected.view(self._settings.world_size, -1)
            self.check_input(iteration, self._expected_input)
            self.check_gathered(iteration, 0, "forward", chunks)
            self.check_reduced(iteration, 0, chunks[self._settings.rank])
            self._found.zero_()
            self._checks.clear()

    def failures(self) -> tuple[int, list[FailureDetail]]:
        """Return the number of failed checks, and explanations of the first few. Waits for the device."""
        found = self._found.cpu()
        failed = found[..., 0].nonzero().tolist()
        details = [
            failure_detail(self._settings, Mismatch(*found[number, row].tolist()), self._checks[number], row)
            for number, row in failed[:MAX_DETAILS]
        ]
        return len(failed), details

    def _record(self, kind: str, iteration: int, layer: int | None = None) -> torch.Tensor:
        """Return the rows of a further check."""
        self._checks.append(Check(kind, iteration - self._settings.warmup, layer))
        return self._found[len(self._checks) - 1]
