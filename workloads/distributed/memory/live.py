"""The bytes of tensors that operators have made and that still exist."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KERNELS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",
    "aten._grouped_mm.default",
)
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make while the mode is active, until each storage is freed.

    Views and results in place share a storage, which counts once. Storages that existed before do not count. With
    ``fused``, the result of an operator that a compiler fuses counts only once an unfused kernel reads the result, or
    :meth:`keep` receives it.

    Attributes:
        current: bytes of the storages that exist now.
        peak: the largest ``current`` so far.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch.compile runs its graphs under this mode."""
        return True

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._fused = fused
        self._counted: set[int] = set()
        # Results of fused operators, which exist in memory only if something else reads them.
        self._virtual: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count the storages that it has made."""
        if any(kind not in _PLAIN for kind in types):
            # A DTensor, or another wrapper, runs the operator on plain tensors, and that call arrives here again.
            return NotImplemented
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        known = self._counted | self._virtual | {_key(tensor) for tensor in given}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and _key(leaf) not in known]
        if self._fused and _is_fused(func):
            for tensor in made:
                self._virtual.add(_key(tensor))
                weakref.finalize(tensor.untyped_storage(), self._virtual.discard, _key(tensor))
        else:
            self.keep(given)
            self._count(made)
        return result

    def reset(self) -> None:
        """Forget all counts; none of the counted storages may still exist."""
        self.current = self.peak = 0
        self._counted.clear()
        self._virtual.clear()

    def keep(self, tensors: Iterable[Any]) -> None:
        """Count the ``tensors`` that are results of fused operators."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and _key(tensor) in self._virtual:
                self._virtual.discard(_key(tensor))
                self._count([tensor])

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._counted:
                continue
            self._counted.add(storage._cdata)
            self.current += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.current)

    def _forget(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.current -= size


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_fused(func: Any) -> bool:
    """Return whether inductor fuses an operator with others instead of calling a separate kernel for it."""
    name = str(func)
    return name.startswith(("aten.", "prims.")) and name not in _KERNELS and "attention" not in name
