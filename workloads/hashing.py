"""Hashes of weights and tensors after chosen steps."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from pytest_aorta.worker import OperatorCapture, TensorHashes, WeightHash, hash_parameters, is_simulated

from .common.settings import HashSettings, TrainingSettings
from .distributed.pipeline import Stages

# The limit of one rank: at 35 bytes per hash, a result file stays below two megabytes.
MAX_HASHES = 50_000


class StepHashes:
    """Hashes all weights after each step of ``hash_every``, and one by one the tensors that ``hash_tensors`` names.

    Attributes:
        weight_hashes: step -> hash of all weights.
        tensor_hashes: as in :class:`~pytest_aorta.worker.RankResult`.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: HashSettings | None = None,
        stages: Stages | None = None,
    ) -> None:
        """Check the number of hashes.

        Args:
            model: the whole model, or this rank's part of ``stages``; hashes are of the whole model.
            tensors: what is hashed besides all weights.

        Raises:
            ValueError: There would be too many hashes.
        """
        self._settings, self._model, self._optimizer = settings, model, optimizer
        self._stages, tensors = stages or Stages(), tensors or HashSettings()
        self._kinds, self._only_step = tensors.hash_tensors, tensors.hash_tensors_step
        self._check()
        self._wants_tensors = False
        self.weight_hashes: dict[str, str] = {}
        self.tensor_hashes: dict[str, TensorHashes] = {}

    def begin(self, step: int) -> None:
        """Prepare for measured step ``step``."""
        self._step, self._wants_tensors = step, step in self._tensor_steps()

    def gradients(self, kind: str) -> None:
        """Hash gradients, if asked for, once they are reduced (``gradients``) and once more clipped (``clipped``)."""
        if self._wants_tensors and kind in self._kinds:
            named = [(name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None]
            with OperatorCapture.paused():
                self._add(kind, self._step, self._hash(named))

    def end(self, step: int) -> None:
        """Hash the weights and tensors that the config asks for after measured step ``step``."""
        if self._is_hashed(step) or (self._wants_tensors and "weights" in self._kinds):
            weights = self._hash(self._model.named_parameters())
            self.weight_hashes[str(step)] = WeightHash.of({name: hashed for name, (_, hashed) in weights.items()}).hex
            if self._wants_tensors and "weights" in self._kinds:
                self._add("weights", step, weights)
        if "optimizer" in self._kinds and (self._wants_tensors or step in self._earlier_steps()):
            self._add("optimizer", step, self._hash(self._named_state()))
        self._wants_tensors = False

    def _hash(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[list[int], str]]:
        """Return shapes and hashes of the tensors of all stages, given this stage's tensors; collective."""
        own = list(named)
        per_tensor = hash_parameters(own, self._stages.group).per_tensor
        return self._stages.merged({name: (list(one.shape), per_tensor[name]) for name, one in own})

    def _add(self, kind: str, step: int, tensors: dict[str, tuple[list[int], str]]) -> None:
        hashes = _of_step(step, [(name, *found) for name, found in tensors.items()])
        self.tensor_hashes.setdefault(kind, hashes).steps.update(hashes.steps)

    def _named_state(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{name}.{key}", torch.as_tensor(value))
            for name, parameter in self._model.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if value is not None
        ] + [
            # Such as the learning rate, which each rank has as a number.
            (f"group {number}.{key}", torch.as_tensor(value, dtype=torch.float64))
            for number, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, float | torch.Tensor)
        ]

    def _earlier_steps(self) -> range:
        """Return the steps before ``hash_tensors_step`` after which the optimizer is hashed too, the last that fit."""
        only = 0 if is_simulated() else self._only_step or 0
        room = MAX_HASHES // 2 // max(1, len(self._named_state()))
        return range(max(1, only - room), only)

    def _is_hashed(self, step: int) -> bool:
        every = self._settings.hash_every
        return not is_simulated() and (step == self._settings.steps or (every > 0 and step % every == 0))

    def _tensor_steps(self) -> list[int]:
        if not self._kinds or is_simulated():
            return []
        if self._only_step is not None:
            return [self._only_step]
        return [step for step in range(1, self._settings.steps + 1) if self._is_hashed(step)]

    def _check(self) -> None:
        if not (steps := self._tensor_steps()):
            return
        num_parameters = len(self._stages.merged({name: None for name, _ in self._model.named_parameters()}))
        # Adam keeps the step and two moments.
        num_hashes = len(steps) * sum(num_parameters * (3 if kind == "optimizer" else 1) for kind in self._kinds)
        if num_hashes > MAX_HASHES:
            raise ValueError(
                f"hash_tensors is {list(self._kinds)}: up to {num_hashes} hashes of {len(steps)} steps, "
                f"at most {MAX_HASHES} are kept; name fewer kinds, a larger hash_every, or one step in "
                f"hash_tensors_step"
            )


def _of_step(step: int, found: Sequence[tuple[str, list[int], str]]) -> TensorHashes:
    """Return the names, shapes and hashes of tensors as those of one step."""
    names, shapes, hashes = map(list, zip(*found, strict=True)) if found else ([], [], [])
    return TensorHashes(names, shapes, {str(step): hashes})
