"""A workload's config as a frozen dataclass, so that every key has a type and is read once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar, get_origin, get_type_hints

import torch

from .faults import Fault
from .learning_rate import LearningRateSchedule
from .rules import Rule, checkpoint_rules

_T = TypeVar("_T")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_settings(settings_type: type[_T], config: Mapping[str, Any]) -> _T:
    """Return the values of ``config`` as ``settings_type``, a dataclass.

    Names of dtypes become ``torch.dtype`` and lists become tuples. A field whose type is a dataclass reads the block of
    the same name; if ``config`` has no such block, the field groups keys of ``config`` itself. Keys that a block lacks
    keep the defaults of the block's dataclass.
    """
    return settings_type(**{name: _value(kind, name, config) for name, kind in get_type_hints(settings_type).items()})


def _value(kind: Any, name: str, config: Mapping[str, Any]) -> Any:
    if is_dataclass(kind):
        block_type: Any = kind
        return block_type(**config[name]) if name in config else read_settings(block_type, config)
    if kind is torch.dtype:
        return _DTYPES[config[name]]
    return tuple(config[name]) if get_origin(kind) is tuple else config[name]


@dataclass(frozen=True)
class HashSettings:
    """The keys that choose the tensors that are hashed one by one, and the only step in which they are."""

    hash_tensors: tuple[str, ...] = ()
    hash_tensors_step: int | None = None


@dataclass(frozen=True)
class TrainingSettings:
    """The keys of all workloads that train a model; ``lr_schedule`` and ``fault`` are blocks."""

    steps: int
    warmup: int
    profile_steps: int
    batch_size: int
    gradient_accumulation: int
    max_grad_norm: float | None
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    lr_schedule: LearningRateSchedule
    deterministic: bool
    seed: int
    save_checkpoint: str | None
    async_save: bool
    load_checkpoint: str | None
    hash_every: int
    hash_operators_step: int | None
    fault: Fault

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:  # noqa: ARG002
        """Yield the combinations of keys that a launch of ``ranks`` on ``device`` refuses."""
        yield from checkpoint_rules(self.save_checkpoint, self.load_checkpoint)
        yield "hash_operators_step steps", (self.hash_operators_step or 0) > self.steps, "this step is not measured"

    def prepare_environment(self) -> None:
        """Set the variables that libraries read when the process group is made; none by default."""
