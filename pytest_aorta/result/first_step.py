"""The first step of a launch, as its ranks have written it: gradients before clipping, weights, losses and samples."""

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_aorta.common.errors import ResultError
from pytest_aorta.result.folder import FIRST_STEP_FILE, rank_folder

Array: TypeAlias = NDArray[Any]
# What a rank's file has of each parameter, before its name.
GRADIENT: Final = "gradient"
BEFORE: Final = "before"
AFTER: Final = "after"
SHAPE: Final = "shape"
INDEX: Final = "index"
# What a rank's file has once.
# Samples that loaders have returned, and those that the outermost module was given.
DRAWN: Final = "drawn"
GIVEN: Final = "given"
SAMPLES: Final = (GIVEN, DRAWN)
TRAITS: Final = "traits"
LOSS: Final = "loss"
EPS: Final = "eps"
# Traits of a forward pass whose numbers depend on the arrangement, as they may.
RANDOM: Final = "random numbers"
BATCH_NORM: Final = "BatchNorm"


def key(kind: str, name: str) -> str:
    """Return the name of an array of a parameter in a rank's file."""
    return f"{kind}:{name}"


@dataclass(frozen=True)
class FirstStep:
    """The first step of all ranks.

    Attributes:
        tensors: What is kept of each parameter -> its name -> the logical tensor, flat float64.
        apart: What is kept -> the parameters of which it is not the same on ranks that hold the same elements.
        samples: The hash of each sample of all ranks, by the way in which samples are known.
        loss: The mean over ranks of the sum of the losses that a rank has trained with.
        eps: The largest machine epsilon of the types that modules have computed with.
        traits: What the forward pass has whose numbers depend on the arrangement.
    """

    tensors: dict[str, dict[str, Array]] = field(default_factory=dict)
    apart: dict[str, list[str]] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)
    loss: float = math.nan
    eps: float = 0.0
    traits: frozenset[str] = frozenset()


def read_first_step(run_dir: Path, ranks: Sequence[int]) -> FirstStep:
    """Return the first step of a launch.

    Raises:
        ResultError: A rank's file is absent or damaged.
    """
    parts = [_read(rank_folder(run_dir, rank) / FIRST_STEP_FILE) for rank in ranks]
    tensors: dict[str, dict[str, Array]] = {GRADIENT: {}, BEFORE: {}, AFTER: {}}
    apart: dict[str, list[str]] = {kind: [] for kind in tensors}
    for kind, found in tensors.items():
        known: dict[str, NDArray[np.bool_]] = {}
        for part in parts:
            for name in (one.removeprefix(f"{kind}:") for one in part if one.startswith(f"{kind}:")):
                size = math.prod(part[key(SHAPE, name)].tolist())
                whole = found.setdefault(name, np.zeros(size))
                held = known.setdefault(name, np.zeros(size, dtype=bool))
                index, own = part.get(key(INDEX, name), np.arange(size)), part[key(kind, name)]
                if own.size != index.size:
                    raise ResultError(f"{name}: a rank holds {own.size} of {size} elements, and not which of them")
                if name not in apart[kind] and not np.array_equal(whole[index][held[index]], own[held[index]]):
                    apart[kind].append(name)
                # Of replicas, the first rank's is taken.
                own = np.where(held[index], whole[index], own)
                whole[index], held[index] = own, True
        if incomplete := [name for name, held in known.items() if not held.all()]:
            raise ResultError(f"{incomplete[0]}: the ranks hold only some of its elements")
    return FirstStep(
        tensors,
        apart,
        {kind: [text for part in parts for text in _texts(part[kind])] for kind in SAMPLES},
        float(np.mean([part[LOSS].sum() for part in parts])),
        max(float(part[EPS]) for part in parts),
        frozenset(text for part in parts for text in _texts(part[TRAITS])),
    )


def _texts(array: Array) -> list[str]:
    return [str(text, "ascii") for text in array]


def _read(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ResultError(
            f"{path}: no first step was kept: those of optimizers are, where the script does not call recorder.step()"
        ) from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ResultError(f"{path}: can't be read: {error}") from None
