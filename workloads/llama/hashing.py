"""Hashes of weights after chosen steps, of the whole model and tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_aorta.worker import OperatorCapture, TensorHashes, WeightHash, hash_parameters

from ..common.training import is_hashed
from .boundaries import BACKWARD, FORWARD, Boundaries
from .parallel.pipeline import Stages
from .settings import HashSettings

# The limit of one rank: at 35 bytes per hash, a result file stays below two megabytes.
MAX_HASHES = 50_000
# Adam keeps the step and two moments.
_STATES_PER_PARAMETER = 3


class _Hashed(NamedTuple):
    """One logical tensor."""

    name: str
    shape: list[int]
    hash: str


class StepHashes:
    """Hashes all weights after each step of ``hash_every``, and one by one the tensors that ``hash_tensors`` names.

    Attributes:
        weight_hashes: step -> hash of all weights.
        tensor_hashes, boundary_hashes: as in :class:`~pytest_aorta.worker.RankResult`.
    """

    def __init__(
        self,
        settings: HashSettings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stages: Stages | None = None,
        *,
        steps: int,
        micro_batches: int,
    ) -> None:
        """Hook the modules if ``hash_tensors`` includes their boundaries.

        Args:
            model: the whole model, or this rank's part of ``stages``; hashes are of the whole model.
            steps: number of measured steps.
            micro_batches: number of micro-batches of each step.

        Raises:
            ValueError: ``hash_tensors_step`` or ``hash_operators_step`` is not a measured step, or there would be too
                many hashes.
        """
        self._settings, self._model, self._optimizer = settings, model, optimizer
        self._num_steps, self._num_micro_batches = steps, micro_batches
        self._stages = stages or Stages()
        self._kinds = settings.hash_tensors
        self._check()
        self._boundaries = Boundaries(model) if {FORWARD, BACKWARD} & set(self._kinds) else None
        self._operators = None if settings.hash_operators_step is None else OperatorCapture(model)
        self._wants_tensors = False
        self.weight_hashes: dict[str, str] = {}
        self.tensor_hashes: dict[str, TensorHashes] = {}
        self.boundary_hashes: dict[str, TensorHashes] = {}

    def begin(self, step: int) -> None:
        """Prepare for measured step ``step``."""
        self._wants_tensors = step in self._tensor_steps()
        if self._boundaries and self._wants_tensors:
            self._boundaries.begin()
        if self._operators and step == self._settings.hash_operators_step:
            self._operators.begin(step)

    def forward(self, *args: Any) -> Any:
        """Call the model."""
        return self._model(*args) if self._boundaries is None else self._boundaries.forward(*args)

    def after_backward(self, step: int) -> None:
        """Hash gradients, if asked for, when the step has computed all of them and has not used them yet."""
        if self._wants_tensors and "gradients" in self._kinds:
            named = [(name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None]
            with OperatorCapture.paused():
                self._add("gradients", step, self._hash(named))

    def end_operators(self) -> None:
        """End the capture of operators and write the captured calls, if this step is captured."""
        if self._operators:
            self._operators.end()

    def end(self, step: int) -> None:
        """Hash the weights and tensors that the config asks for after measured step ``step``."""
        if self._is_hashed(step) or (self._wants_tensors and "weights" in self._kinds):
            weights = self._hash(self._model.named_parameters())
            self.weight_hashes[str(step)] = WeightHash.of({tensor.name: tensor.hash for tensor in weights}).hex
            if self._wants_tensors and "weights" in self._kinds:
                self._add("weights", step, weights)
        if self._wants_tensors and "optimizer" in self._kinds:
            self._add("optimizer", step, self._hash(self._named_state()))
        if self._boundaries and self._wants_tensors:
            for kind, hashes in self._boundaries.end(step).items():
                if kind in self._kinds:
                    known = self.boundary_hashes.setdefault(kind, hashes)
                    known.steps.update(hashes.steps)
        self._wants_tensors = False

    def _hash(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[_Hashed]:
        """Hash the tensors of all stages, given this stage's; collective."""
        own = list(named)
        per_tensor = hash_parameters(own, self._stages.group).per_tensor
        hashed = {name: _Hashed(name, list(one.shape), per_tensor[name]) for name, one in own}
        return list(self._stages.merged(hashed).values())

    def _add(self, kind: str, step: int, tensors: list[_Hashed]) -> None:
        names, shapes = [tensor.name for tensor in tensors], [tensor.shape for tensor in tensors]
        hashes = self.tensor_hashes.setdefault(kind, TensorHashes(names, shapes, {}))
        hashes.steps[str(step)] = [tensor.hash for tensor in tensors]

    def _named_state(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{name}.{key}", torch.as_tensor(value))
            for name, parameter in self._model.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if value is not None
        ]

    def _is_hashed(self, step: int) -> bool:
        return is_hashed(step, self._num_steps, self._settings.hash_every)

    def _tensor_steps(self) -> list[int]:
        if not self._kinds:
            return []
        if (only := self._settings.hash_tensors_step) is not None:
            return [only]
        return [step for step in range(1, self._num_steps + 1) if self._is_hashed(step)]

    def _check(self) -> None:
        only, steps = self._settings.hash_tensors_step, self._num_steps
        operators = self._settings.hash_operators_step
        if operators is not None and operators > steps:
            raise ValueError(
                f"hash_operators_step is {operators}, and steps is {steps}: allowed is 1 to {steps}, or null"
            )
        if only is not None and not self._kinds:
            raise ValueError(
                f"hash_tensors_step is {only} and hash_tensors is empty: name the kinds to hash in that step"
            )
        if only is not None and only > steps:
            raise ValueError(f"hash_tensors_step is {only}, and steps is {steps}: allowed is 1 to {steps}, or null")
        num_hashes = len(self._tensor_steps()) * sum(self._tensors_of(kind) for kind in self._kinds)
        if num_hashes > MAX_HASHES:
            raise ValueError(
                f"hash_tensors is {list(self._kinds)}: up to {num_hashes} hashes of {len(self._tensor_steps())} steps, "
                f"at most {MAX_HASHES} are kept; name fewer kinds, a larger hash_every, or one step in "
                f"hash_tensors_step"
            )

    def _tensors_of(self, kind: str) -> int:
        """Return the largest number of tensors of a kind that a step can hash."""
        num_parameters = len(self._stages.merged({name: None for name, _ in self._model.named_parameters()}))
        if kind in (FORWARD, BACKWARD):
            return 2 * sum(1 for _ in self._model.modules()) * self._num_micro_batches
        return num_parameters * (_STATES_PER_PARAMETER if kind == "optimizer" else 1)
