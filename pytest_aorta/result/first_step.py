"""The first step of a launch, as its ranks have written it: gradients before clipping, weights, losses and samples."""

import math
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_aorta.common.errors import ResultError
from pytest_aorta.result.folder import FIRST_STEP_FILE, rank_folder

Array: TypeAlias = NDArray[Any]
# What a rank's file has of each tensor, before its name.
GRADIENT: Final = "gradient"
# What the rank alone has added to it, folded.
OWN: Final = "own"
BEFORE: Final = "before"
AFTER: Final = "after"
BUFFER: Final = "buffer"
_KINDS = (GRADIENT, BEFORE, AFTER, BUFFER)
SHAPE: Final = "shape"
INDEX: Final = "index"
# The norm that a gradient was clipped by.
NORM: Final = "norm"
RATE: Final = "learning rate"
# What a rank's file has once: samples that the outermost module was given, and that loaders have returned; the integers
# of the former, since ranks may share samples.
GIVEN: Final = "given"
DRAWN: Final = "drawn"
INTEGERS: Final = "integers"
SAMPLES: Final = (GIVEN, DRAWN, INTEGERS)
TRAITS: Final = "traits"
STATE: Final = "state"
LOSS: Final = "loss"
EPS: Final = "eps"
STEPS: Final = "steps"
# Traits of a forward pass whose numbers depend on the arrangement, as they may.
RANDOM: Final = "random numbers"
BATCH_NORM: Final = "BatchNorm"
# A sampler shuffled two epochs alike.
SAME_EPOCHS: Final = "same epochs"


def key(kind: str, name: str) -> str:
    """Return the name of an array of a tensor in a rank's file."""
    return f"{kind}:{name}"


# A prime, so that what is added up lies in other rows and columns.
FOLDS: Final = 1021


def folded(tensor: Array) -> Array:
    """Return a tensor as sums of every 1021st element, by which a sum of tensors can be told from its parts."""
    return np.bincount(np.arange(tensor.size) % FOLDS, tensor.ravel(), FOLDS)


@dataclass(frozen=True)
class FirstStep:
    """The first step of all ranks.

    Attributes:
        tensors: What is kept of each tensor -> its name -> the logical tensor, flat float64.
        apart: What is kept -> the tensors of which it is not the same on ranks that hold the same elements.
        own: What each rank that holds a parameter has added to its gradient, before ranks reduced it, folded; without
            parameters of which no rank has seen that.
        norms: The norms that a gradient was clipped by, of each rank that has clipped it.
        samples: The hash of each sample of all ranks, by the way in which samples are known.
        loss: The mean over ranks of the sum of the losses that a rank has trained with.
        eps: The largest machine epsilon of the types that modules have computed with, and ranks have reduced.
        traits: What the forward pass has whose numbers depend on the arrangement.
        draws_alike: Whether all of several ranks had the same state of random numbers.
        rates: The learning rate of each parameter, on its first rank.
        num_steps: The number of steps of optimizers in the whole launch, on the rank with most.
    """

    tensors: dict[str, dict[str, Array]]
    apart: dict[str, list[str]]
    own: dict[str, dict[int, Array]]
    norms: dict[str, list[float]]
    samples: dict[str, list[str]]
    loss: float
    eps: float
    traits: frozenset[str]
    draws_alike: bool
    rates: dict[str, float]
    num_steps: int


def read_first_step(run_dir: Path, ranks: Sequence[int]) -> FirstStep:
    """Return the first step of a launch.

    Raises:
        ResultError: A rank's file is absent or damaged, or no optimizer has stepped.
    """
    parts = [_read(rank_folder(run_dir, rank) / FIRST_STEP_FILE) for rank in ranks]
    if not any(int(part[STEPS]) for part in parts):
        raise ResultError(f"{run_dir}: no optimizer of torch has stepped, so there is no first step to compare")
    tensors: dict[str, dict[str, Array]] = {kind: {} for kind in _KINDS}
    apart: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for kind, found in tensors.items():
        known: dict[str, NDArray[np.bool_]] = {}
        for part, name in _named(parts, kind):
            size = math.prod(part[key(SHAPE, name)].tolist())
            index, own = part.get(key(INDEX, name), np.arange(size)), part[key(kind, name)]
            whole, held = found.setdefault(name, np.zeros(size)), known.setdefault(name, np.zeros(size, dtype=bool))
            if own.size != index.size or whole.size != size:
                raise ResultError(f"{name}: a rank holds {own.size} of {whole.size} elements, and not which of them")
            if name not in apart[kind] and not np.array_equal(whole[index][held[index]], own[held[index]]):
                apart[kind].append(name)
            # Of replicas, the first rank's is taken.
            whole[index], held[index] = np.where(held[index], whole[index], own), True
        if incomplete := [name for name, held in known.items() if not held.all()]:
            raise ResultError(f"{incomplete[0]}: the ranks hold only some of its elements")
    added = {
        name: {
            rank: one.get(key(OWN, name), np.zeros(FOLDS)) for rank, one in enumerate(parts) if key(BEFORE, name) in one
        }
        for _, name in _named(parts, OWN)
    }
    return FirstStep(
        tensors,
        apart,
        added,
        _numbers(parts, NORM),
        {kind: [text for part in parts for text in _texts(part[kind])] for kind in SAMPLES},
        float(np.mean([part[LOSS].sum() for part in parts])),
        max(float(part[EPS]) for part in parts),
        frozenset(text for part in parts for text in _texts(part[TRAITS])),
        len(parts) > 1 and all(np.array_equal(part[STATE], parts[0][STATE]) for part in parts),
        {name: rates[0] for name, rates in _numbers(parts, RATE).items()},
        max(int(part[STEPS]) for part in parts),
    )


def _named(parts: Sequence[dict[str, Array]], kind: str) -> Iterator[tuple[dict[str, Array], str]]:
    """Yield each rank's file with the name of each tensor of which it has this."""
    for part in parts:
        for name in part:
            if name.startswith(f"{kind}:"):
                yield part, name.removeprefix(f"{kind}:")


def _numbers(parts: Sequence[dict[str, Array]], kind: str) -> dict[str, list[float]]:
    """Return a number of each tensor, of each rank that has this."""
    found = defaultdict[str, list[float]](list)
    for part, name in _named(parts, kind):
        found[name].append(float(part[key(kind, name)]))
    return found


def _texts(array: Array) -> list[str]:
    return [str(text, "ascii") for text in array]


def _read(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ResultError(f"{path}: can't be read: {error}") from None
