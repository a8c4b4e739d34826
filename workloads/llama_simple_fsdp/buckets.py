"""Buckets: lists of the parameters that share a collective, by name, made from the model's modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, groupby

from torch import nn

Bucket = tuple[str, ...]
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def block_buckets(model: nn.Module, blocks_per_bucket: int = 1) -> tuple[Bucket, ...]:
    """Return a bucket for each ``blocks_per_bucket`` blocks, and one for each run of parameters before or after blocks.

    Blocks are the elements of the outermost module lists, and the blocks of a bucket follow one another in one list.
    These are also the groups of ``llama_fsdp2``.

    Raises:
        ValueError: The model has no module list.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outermost:
        raise ValueError(f"bucketing is transformer_block and {type(model).__name__} has no nn.ModuleList of blocks")
    block_of = re.compile(f"({'|'.join(map(re.escape, outermost))})\\.\\d+\\.").match
    names = [name for name, _ in model.named_parameters()]
    found = {name: match for name in names if (match := block_of(name))}
    runs = [tuple(run) for _, run in groupby(names, lambda name: found[name][0] if name in found else "")]
    buckets: list[Bucket] = []
    for container, same in groupby(runs, lambda run: found[run[0]][1] if run[0] in found else ""):
        parts, size = list(same), blocks_per_bucket if container else 1
        buckets += [tuple(chain.from_iterable(parts[first : first + size])) for first in range(0, len(parts), size)]
    return tuple(buckets)


def num_blocks(bucket: Bucket) -> int:
    """Return how many elements of ``layers`` have a parameter in the bucket."""
    return len({name.split(".")[1] for name in bucket if name.startswith("layers.")})


def module_buckets(model: nn.Module, groups: Sequence[str]) -> tuple[Bucket, ...]:
    """Return a bucket for each group of modules; every parameter has to be in exactly one bucket.

    A group is one module's name, or several names joined by ``+``. A range, as in ``layers.[0-5]``, makes a bucket for
    each of its modules; joined by ``+``, all modules of the range are in one bucket.

    Raises:
        ValueError: A name belongs to no module, a module has no parameters, or a parameter is in two groups or in none.
    """
    expanded = [modules for group in groups for modules in _expand(group)]
    names = [name for name, _ in model.named_parameters()]
    _check_known("bucket_modules", model, [module for modules in expanded for module in modules])
    inside = {
        module: [name for name in names if name.startswith(f"{module}.")] for modules in expanded for module in modules
    }
    if empty := [module for module, found in inside.items() if not found]:
        raise ValueError(f"bucket_modules: modules {empty} have no parameters")
    buckets = [[name for module in modules for name in inside[module]] for modules in expanded]
    _check_cover(names, [name for bucket in buckets for name in bucket])
    return tuple(tuple(bucket) for bucket in buckets)


def no_reorder_buckets(model: nn.Module, buckets: Sequence[Bucket], modules: Sequence[str]) -> tuple[Bucket, ...]:
    """Return the buckets that are not reordered: those without a parameter of ``modules``; none for no modules.

    Raises:
        ValueError: A name belongs to no module, or a bucket has parameters of named modules and of others.
    """
    if not modules:
        return ()
    named = [name for module in modules for name in _expand_range(module)]
    _check_known("overlap_reorder_modules", model, named)
    inside = {name for name, _ in model.named_parameters() if any(name.startswith(f"{module}.") for module in named)}
    for bucket in buckets:
        if inside.intersection(bucket) and (others := [name for name in bucket if name not in inside]):
            raise ValueError(
                f"overlap_reorder_modules: {list(modules)} lack {others}, which are in one of their buckets"
            )
    return tuple(bucket for bucket in buckets if not inside.intersection(bucket))


def buckets_of_stage(stage: nn.Module, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return the parts of the whole model's ``buckets`` that a pipeline's ``stage`` has; empty parts are left out."""
    own = {name for name, _ in stage.named_parameters()}
    parts = (tuple(name for name in bucket if name in own) for bucket in buckets)
    return tuple(part for part in parts if part)


def _check_known(key: str, model: nn.Module, modules: Sequence[str]) -> None:
    known = {name for name, _ in model.named_modules() if name}
    if unknown := [module for module in modules if module not in known]:
        top = [name for name, _ in model.named_children()]
        raise ValueError(f"{key}: the model has no modules {unknown}; at its top there are {top}")


def _expand(group: str) -> list[list[str]]:
    """Return the modules of each bucket that ``group`` makes."""
    parts = [_expand_range(part.strip()) for part in group.split("+")]
    if len(parts) == 1:
        return [[module] for module in parts[0]]
    return [[module for part in parts for module in part]]


def _expand_range(name: str) -> list[str]:
    found = _RANGE.search(name)
    if found is None:
        return [name]
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise ValueError(f"{name!r} is an empty range of modules")
    numbered = [f"{name[: found.start()]}{number}{name[found.end() :]}" for number in range(first, last + 1)]
    return [module for one in numbered for module in _expand_range(one)]


def _check_cover(names: Sequence[str], listed: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(listed).items() if count > 1]:
        raise ValueError(f"bucket_modules: in more than one group are {twice}")
    if absent := [name for name in names if name not in set(listed)]:
        raise ValueError(f"bucket_modules: in no group are {absent}")
