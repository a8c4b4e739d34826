"""One rank of a simulated world: a process group without peers, tensors without data, and an estimate of memory.

Functions of torch that would meet or wait for peers are replaced, as long as torch has no public group without peers.
"""

from __future__ import annotations

import math
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from pytest_aorta.common.clock import time
from pytest_aorta.common.text import some_of
from pytest_aorta.plan.device_kind import Backend
from pytest_aorta.result.measurements import PADDED, RankResult
from pytest_aorta.result.trace.kineto_costs import RecordedCall
from pytest_aorta.worker.accelerator import on_accelerator
from pytest_aorta.worker.finite import untraced
from pytest_aorta.worker.layout import NamedTensor, is_dtensor
from pytest_aorta.worker.own_plan import own_plan
from pytest_aorta.worker.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    TracingContext,
    c10d,
    fake_store,
    functional_collectives,
    get_proxy_mode,
    is_traceable_wrapper_subclass_type,
    tree_leaves,
)

# CUDA's allocator rounds the size of each tensor up to a multiple of this many bytes.
_ROUNDED_BYTES = 512
# Names of padded parameters that a result keeps.
_NAMED = 4
# The tracker of this rank's memory, on tensors without data.
_memory: list[TensorMemory] = []
_without_data = ExitStack()
# Names of padded parameters.
_padded: dict[str, None] = {}
# The methods of process groups that request a collective, whose groups a trace does not name.
_REQUEST = re.compile("_?(all|reduce|broadcast|gather|scatter|barrier)")
# The time of each request on this rank, in nanoseconds, with its group.
_requested: list[tuple[int, RecordedCall]] = []


def is_simulated() -> bool:
    """Return whether this rank is part of a simulated world, in which nothing is exchanged."""
    plan = own_plan()
    return plan is not None and bool(plan.world.simulated)


def simulate_world() -> None:
    """Let every process group that is created from now on, of any backend, be one that exchanges nothing.

    ``init_process_group`` takes the rank and the size of the world from the environment.
    """
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    # The class is a string that every way to a group makes from the name that it is given.
    dist.Backend.__new__ = lambda _class, _name: str(dist.Backend.FAKE)  # type: ignore[assignment,method-assign]
    original = dist.init_process_group

    @wraps(original)
    def init_process_group(*_args: Any, **given: Any) -> None:
        kept = {name: given[name] for name in ("timeout", "group_name") if given.get(name)}
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        original(Backend.FAKE, store=fake_store(), rank=rank, world_size=size, **kept)

    _replace(original, init_process_group)
    for name in filter(_REQUEST.match, [*vars(dist.ProcessGroup)]):
        setattr(dist.ProcessGroup, name, _noted(getattr(dist.ProcessGroup, name)))
    # Only gloo has this barrier, which names the ranks that are missing.
    _replace(dist.monitored_barrier, lambda *_args, **_given: None)
    # A checkpoint would need the other ranks' parts of the tensors.
    _replace(save, lambda *_args, **_given: None)
    _replace(load, lambda *_args, **_given: None)
    # Nobody writes the checkpoint.
    saved = Future[None]()
    saved.set_result(None)
    _replace(async_save, lambda *_args, **_given: saved)
    # Torch waits at once for results without data, as for those in a graph that is compiled.
    _replace(functional_collectives._maybe_wrap_tensor, _in_flight)
    for name in ("Reducer", "_broadcast_coalesced"):
        _replace(getattr(dist, name), partial(_with_requests, getattr(dist, name)))


class _InFlight(torch.autograd.Function):
    """The result of a functional collective, whose first use waits."""

    @staticmethod
    def forward(_context: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that waits."""
        return functional_collectives.AsyncCollectiveTensor(tensor)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradient


def _in_flight(tensor: torch.Tensor) -> Any:
    is_compiled = torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None
    if is_compiled or get_proxy_mode() is not None:
        return functional_collectives.wait_tensor(tensor)
    return _InFlight.apply(tensor)  # type: ignore[no-untyped-call]


class _Requesting(dist.ProcessGroup):
    """A group whose requests from C++, such as DDP's, pass through the methods of another group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    @untraced
    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Request an all-reduce."""
        return self._group.allreduce(tensors, options)

    @untraced
    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Request a broadcast."""
        return self._group.broadcast(tensors, options)


@cache
def _requesting(group: dist.ProcessGroup) -> _Requesting:
    # C++ calls the methods of a Python class only while the object lives in Python.
    return _Requesting(group)


def _with_requests(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call a function of C++ whose requests of a group among its arguments are noted."""
    groups = (_requesting(one) if isinstance(one, dist.ProcessGroup) else one for one in args)
    return original(*groups, **given)


class _Reduced(dist.Work):
    """An all-reduce that has ended, with the future that DDP waits for: that of torch's group has no tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of the tensors."""
        return self._future


def _noted(request: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of process groups that notes each of its calls."""

    @wraps(request)
    def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        _note(group, (args, kwargs))
        work = request(group, *args, **kwargs)
        return _Reduced(args[0]) if request.__name__ == "allreduce" else work

    return noted


def _note(group: dist.ProcessGroup, args: Any) -> None:
    dtype = next((str(leaf.dtype) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), "")
    call = RecordedCall(group.group_name, group.size(), dtype.removeprefix("torch."))
    _requested.append((time.time_ns(), call))


def requested_calls(began_ns: int, ended_ns: int) -> list[RecordedCall]:
    """Return the collectives of a simulated rank between two times of ``time.time_ns``, in order.

    Calls by code in C++, such as DDP's, are missing.
    """
    return [call for moment_ns, call in _requested if began_ns <= moment_ns <= ended_ns]


def _replace(original: object, replacement: Callable[..., Any]) -> None:
    """Replace a function of torch under every name by which modules of torch have imported it."""
    for module in [module for name, module in sys.modules.items() if name.startswith("torch")]:
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, replacement)


def drop_data() -> None:
    """In a simulated world, give tensors that this rank makes from now on no data, so that any model fits.

    Code that runs afterwards must not read a value, as ``.item()`` does. :func:`peak_memory` estimates the memory that
    the data would need. Meshes are made before, since they are tensors that are read.
    """
    if is_simulated():
        _vote_alone()
        _memory.append(_without_data.enter_context(without_data()))


@contextmanager
def without_data() -> Iterator[TensorMemory]:
    """Give tensors that the body makes no data, and count the bytes that the data would need."""
    memory = TensorMemory()
    with memory.follows_resizing(), FakeTensorMode(allow_non_fake_inputs=True), memory:
        yield memory


def _vote_alone() -> None:
    """Let a stage of a pipeline choose its mode by its own vote, which torch 2.13 asks for; no other vote arrives."""
    loaded: Any = sys.modules.get("torch.distributed.pipelining.stage")
    modes: Any = getattr(loaded, "InferenceMode", None)
    if not hasattr(modes, "needs_dynamic"):
        return

    def vote(stage: Any, has_backward: bool, received_acc: object = None) -> SimpleNamespace:
        del received_acc
        is_static = not modes.needs_dynamic(stage._user_meta, has_backward)
        return SimpleNamespace(item=lambda: int(is_static))

    loaded.PipelineStage._warmup_forward_vote = vote
    loaded.PipelineStage._warmup_backward_result = lambda _stage, received_result: received_result


def restore_data() -> None:
    """End the effect of :func:`drop_data`."""
    _without_data.close()


def reset_peak_memory() -> None:
    """Begin to look for the peak of the memory that tensors without data would need; else do nothing."""
    for memory in _memory:
        memory.peak = memory.current


def peak_memory(device: torch.device | None = None) -> int | None:
    """Return the peak of allocated memory of ``device`` in bytes; None on CPU.

    Of workloads it is that since the measured steps began, of scripts that of the whole script. Of tensors without
    data, it is an estimate of what an accelerator would need.
    """
    if _memory:
        return _memory[-1].peak
    has_memory = device is not None and on_accelerator(device)
    return int(torch.accelerator.max_memory_allocated(device)) if has_memory else None


def note_padded(named: Iterable[NamedTensor]) -> None:
    """Note the parameters that have fewer rows than ranks that share them, so that rows are added."""
    _padded.update(
        (name, None)
        for name, parameter in named
        if is_dtensor(parameter)
        and any(
            placement.is_shard(dim) and num_rows < parameter.device_mesh.size(axis)
            for axis, placement in enumerate(parameter.placements)
            for dim, num_rows in enumerate(parameter.shape)
        )
    )


def without_values(result: RankResult, named: Iterable[NamedTensor]) -> RankResult:
    """Return a result without what needs exchanged data: losses, norms, hashes and waits; times stay.

    The result names the parameters that are padded: those that were noted, else those among ``named``. A script may
    have dropped its parameters by now.
    """
    if not _padded:
        note_padded(named)
    if _padded:
        result = result.replace(environment=result.environment | {PADDED: some_of([*_padded], _NAMED)})
    # A metric that a rank computed from values may be NaN.
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    return result.replace(loss=[], grad_norm=[], weight_hashes={}, tensor_hashes={}, collective_ms=[], metrics=metrics)


class TensorMemory(TorchDispatchMode):
    """Sum of the storages of all tensors that operators return, while the storages live; in bytes.

    Attributes:
        current: the sum now.
        peak: the largest sum so far; callers may set it back.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Such as those that compiled checkpointing calls.
        self.supports_higher_order_operators = True
        self.current = self.peak = 0
        # Address of a storage -> its rounded size.
        self._known: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile compiles under this mode, which sees the operators of compiled graphs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count the storages that are new among its results."""
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # such as a DTensor, whose own operators on local tensors come here next
        if func.namespace == "_c10d_functional" and isinstance(args[-1], str):
            _note(c10d._resolve_process_group(args[-1]), args)
        result = func(*args, **(kwargs or {}))
        if TracingContext.try_get() is not None:
            return result  # which a graph keeps that is being compiled, and which no step computes
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not is_dtensor(leaf) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    @contextmanager
    def follows_resizing(self) -> Iterator[None]:
        """Count storages that the body resizes, as FSDP does with those of gathered parameters."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._known:
                self._count(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = 0
            self._count(key, storage.nbytes())
            weakref.finalize(storage, self._forget, key)

    def _count(self, key: int, size: int) -> None:
        rounded = -(-size // _ROUNDED_BYTES) * _ROUNDED_BYTES
        self.current += rounded - self._known[key]
        self._known[key] = rounded
        self.peak = max(self.peak, self.current)

    def _forget(self, key: int) -> None:
        self.current -= self._known.pop(key)
