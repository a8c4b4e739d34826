"""Hashes of weights and tensors after chosen steps, and of module boundaries within them, on each rank."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from pytest_aorta.worker import OperatorCapture, TensorHashes, WeightHash, hash_local, hash_parameters, is_simulated

from .common.gradients import own_shard
from .common.settings import HashSettings, TrainingSettings
from .distributed.pipeline import Stages

# The limit of one rank: at 35 bytes per hash, a result file stays below two megabytes.
MAX_HASHES = 50_000


class StepHashes:
    """Hashes all weights after each step of ``hash_every``, and one by one the tensors that ``hash_tensors`` names.

    Attributes:
        weight_hashes: step -> hash of all weights.
        tensor_hashes, boundary_hashes: as in :class:`~pytest_aorta.worker.RankResult`.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: HashSettings | None = None,
        stages: Stages | None = None,
    ) -> None:
        """Hook the modules if ``hash_tensors`` includes their boundaries.

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
        self._boundaries = Boundaries(model) if {FORWARD, BACKWARD} & set(self._kinds) else None
        self._wants_tensors = False
        self.weight_hashes: dict[str, str] = {}
        self.tensor_hashes: dict[str, TensorHashes] = {}
        self.boundary_hashes: dict[str, TensorHashes] = {}

    def begin(self, step: int) -> None:
        """Prepare for measured step ``step``."""
        self._step, self._wants_tensors = step, step in self._tensor_steps()
        if self._boundaries and self._wants_tensors:
            self._boundaries.begin()

    def forward(self, *args: Any) -> Any:
        """Call the model."""
        return self._model(*args) if self._boundaries is None else self._boundaries.forward(*args)

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
        if self._boundaries and self._wants_tensors:
            for kind, hashes in self._boundaries.end(step).items():
                if kind in self._kinds:
                    self.boundary_hashes.setdefault(kind, hashes).steps.update(hashes.steps)
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
        num_boundaries = 2 * sum(1 for _ in self._model.modules()) * self._settings.gradient_accumulation
        # Adam keeps the step and two moments.
        most = {"optimizer": 3 * num_parameters, FORWARD: num_boundaries, BACKWARD: num_boundaries}
        num_hashes = len(steps) * sum(most.get(kind, num_parameters) for kind in self._kinds)
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


FORWARD, BACKWARD = "forward", "backward"


class Boundaries:
    """Hashes each module's first argument and its output, and the output's gradient, as this rank holds them.

    Boundaries are named ``<module>:input`` and ``<module>:output``, followed by ``#2`` and so on for further calls of
    the module in the same step, e.g. by further micro-batches; the root's name is empty. Recomputation by activation
    checkpointing is left out. Hooks must be registered before the model first runs, since compiling traces them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._number = next(_NUMBERS)
        _ALIVE[self._number] = self
        self._phase: str | None = None
        # Name, shape and hash of each boundary of a phase, in order of use.
        self._seen: dict[str, list[tuple[str, list[int], str]]] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._model = model
        for name, module in model.named_modules():
            # A compiled graph ends before the root's hooks run.
            if module is not model:
                module.register_forward_hook(_hook(self._number, name))

    def begin(self) -> None:
        """Start a hashed step; in other steps the operators only copy."""
        self._seen = {FORWARD: [], BACKWARD: []}
        self._calls.clear()
        self._phase = BACKWARD

    def forward(self, *args: Any) -> Any:
        """Call the model."""
        is_seen = self._phase is not None
        if is_seen:
            self._phase, self._begun = FORWARD, len(self._seen[FORWARD])
        output = _hook(self._number, "")(self._model, args, self._model(*args))
        self._phase = BACKWARD if is_seen else None
        return output

    def end(self, step: int) -> dict[str, TensorHashes]:
        """End the step and return the hashes of ``forward`` and of ``backward``."""
        self._phase = None
        return {phase: _of_step(step, seen) for phase, seen in self._seen.items()}

    def see(self, phase: str, module: str, part: str, tensor: torch.Tensor, given: torch.Tensor | None) -> None:
        """Hash one boundary, if its step is hashed and its phase is running."""
        if phase != self._phase:
            return
        seen, name = self._seen[phase], f"{module}:{part}"
        self._calls[phase, name] += 1
        call = f" #{number}" if (number := self._calls[phase, name]) > 1 else ""
        if given is not None:
            # A module receives its input before it calls its children, but its hook runs after theirs.
            inside = f"{module}." if module else ""
            places = range(self._begun, len(seen))
            place = next((place for place in places if seen[place][0].startswith(inside)), len(seen))
            seen.insert(place, (f"{module}:input{call}", list(given.shape), hash_local("", given)))
        seen.append((name + call, list(tensor.shape), hash_local("", tensor)))


# An operator takes only tensors and plain values, so a number stands for the object.
_ALIVE: WeakValueDictionary[int, Boundaries] = WeakValueDictionary()
_NUMBERS = count()


def _hook(number: int, module: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        is_single = not isinstance(output, tuple)
        seen = [
            observe(part, _beside(part, None if index else given), number, module, name, FORWARD)
            if isinstance(part, torch.Tensor)
            else part
            for index, part in enumerate((output,) if is_single else output)
            for name in ("output" if is_single else f"output[{index}]",)
        ]
        return seen[0] if is_single else tuple(seen)

    return hook


def _beside(output: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """Return a module's argument, detached, in a form that an operator takes together with the module's output.

    If other modules read the argument too, passing a copy of it to this module would change the order in which
    gradients are added up, and thus their bits. PyTorch's own full backward hooks pass a copy.
    """
    if given is None:
        return None
    local = own_shard(given.detach())
    if not isinstance(output, DTensor):
        return local
    return DTensor.from_local(local, output.device_mesh, [Replicate()] * output.device_mesh.ndim, run_check=False)


@torch.library.custom_op("aorta::observe", mutates_args=())
def observe(
    tensor: torch.Tensor, given: torch.Tensor | None, number: int, module: str, part: str, phase: str
) -> torch.Tensor:
    """Hash ``tensor`` and ``given``, a module's argument, for boundaries ``number``; return a copy of ``tensor``."""
    if number in _ALIVE:
        _ALIVE[number].see(phase, module, part, tensor, given)
    return tensor.clone()


@observe.register_fake
def _(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.boundary = inputs[2:5]


def _see_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
    return observe(gradient, None, *ctx.boundary, BACKWARD), None, None, None, None, None


observe.register_autograd(_see_gradient, setup_context=_remember)


@register_sharding(torch.ops.aorta.observe.default)  # type: ignore[untyped-decorator]
def _keep_placement(tensor: Any, given: Any, *others: Any) -> list[tuple[list[Any], list[Any]]]:
    """Let each rank hash its own part of a DTensor, for every placement."""
    placements = [Replicate(), Partial("sum"), *(Shard(dim) for dim in range(tensor.ndim))]
    beside = [None if given is None else Replicate(), *(None for _ in others)]
    return [([placement], [placement, *beside]) for placement in placements]
