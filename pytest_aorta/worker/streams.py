"""Marks in a profile of what torch's Python calls say about streams: the current one, events, and waits.

torch's own classes of the device are used: those of ``torch.cpu`` do nothing but stand in for a device's, so a step on
CPU ranks shows the streams that the same step has on a device. They are replaced during a counted step alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from pytest_aorta.result.trace.kineto_graph import MARK, Said
from pytest_aorta.worker.torch_private import c10d, disable_dynamo, functional_operators, tree_leaves

# The methods of a process group that request a collective.
_REQUEST = re.compile("_?(all|reduce|broadcast|gather|scatter|barrier|send|recv)")


class _Numbers:
    """Numbers of objects in the order in which they are met; the objects stay alive, so that no other takes an id."""

    def __init__(self) -> None:
        self._kept: dict[object, tuple[int, object]] = {}

    def of(self, one: object) -> int:
        # Objects of one stream of CUDA are equal; streams of torch.cpu are equal only to themselves.
        key = one if isinstance(one, torch.Stream) else id(one)
        return self._kept.setdefault(key, (len(self._kept), one))[0]


class _Called:
    """The function of an operator, around which another one is called; tables find the operator by its hash."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._original, self._call = original, call

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self._call(self._original, *args, **given)

    def __hash__(self) -> int:
        return hash(self._original)


def _id_of(one: object) -> int:
    """Return an id that a tensor has in common with its views."""
    return one.untyped_storage()._cdata if isinstance(one, torch.Tensor) else id(one)


def _global_rank(group: dist.ProcessGroup, number: int) -> int:
    """Return the rank that has a number in a group."""
    return next((rank for rank, own in c10d._world.pg_group_ranks.get(group, {}).items() if own == number), number)


@contextmanager
def marked_streams(device: torch.device) -> Iterator[None]:
    """Leave marks of streams, events and waits of the body in the profile that runs."""
    module, numbers, undo = torch.get_device_module(device), _Numbers(), ExitStack()
    # The number of each request by the id of its work, or by those of the storages of its results. A later request may
    # take an id over.
    works: dict[int, int] = {}
    # Requests between the begin and the end of a batch have one work, and one number.
    batches: list[object] = []
    stream_of: Callable[[], object] = module.current_stream

    def say(what: Said, *about: object) -> None:
        with record_function(" ".join([MARK, what, *(str(numbers.of(one)) for one in about)])):
            pass

    def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
        # torch.cpu has no stream that the host waits for.
        if (original := vars(owner).get(name)) is None:
            return

        @wraps(original)
        @disable_dynamo
        def replacement(*args: Any, **given: Any) -> Any:
            return call(original, *args, **given)

        setattr(owner, name, replacement)
        undo.callback(setattr, owner, name, original)

    def waits(what: Said, original: Callable[..., Any], stream: Any, other: Any) -> Any:
        say(what, stream, other)
        return original(stream, other)

    def recorded(original: Callable[..., Any], event: Any, stream: Any = None) -> Any:
        say(Said.RECORDS, event, stream or stream_of())
        return original(event, *filter(None, [stream]))

    def awaited(original: Callable[..., Any], event: Any, stream: Any = None) -> Any:
        say(Said.WAITS_EVENT, stream or stream_of(), event)
        return original(event, *filter(None, [stream]))

    def of_stream(original: Callable[..., Any], stream: Any, event: Any = None) -> Any:
        # An event of torch.cpu's stream is None, for which FSDP2 does not wait.
        event = event or module.Event()
        event.record(stream)
        original(stream)
        return event

    def switched(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
        found = original(*args, **given)
        say(Said.ON, stream_of())
        return found

    def host(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
        say(Said.HOST, *args[:1] if isinstance(next(iter(args), None), (module.Stream, module.Event)) else ())
        return original(*args, **given)

    def requested(original: Callable[..., Any], *args: Any, peer: object = "", **given: Any) -> Any:
        number = numbers.of(batches[-1] if batches else object())
        with record_function(f"{MARK} {Said.REQUESTS} {number} {peer}"):
            results = original(*args, **given)
        works.update((_id_of(one), number) for one in tree_leaves(results))
        return results

    def messaged(original: Callable[..., Any], group: Any, tensors: object, *to: Any, **given: Any) -> Any:
        return requested(original, group, tensors, *to, peer=_global_rank(group, to[0]) if to else "", **given)

    def opened(original: Callable[..., Any], *args: Any) -> Any:
        batches.append(object())
        return original(*args)

    def closed(original: Callable[..., Any], *args: Any) -> Any:
        work = original(*args)
        works[_id_of(work)] = numbers.of(batches.pop() if batches else object())
        return work

    def work_waits(original: Callable[..., Any], work: Any, *args: Any, **given: Any) -> Any:
        # Only the first wait for a tensor waits. That for a work does on each stream.
        take = works.pop if isinstance(work, torch.Tensor) else works.get
        number = take(_id_of(work), None)
        # The mark holds what a process group of CPU ranks computes in the wait.
        with nullcontext() if number is None else record_function(f"{MARK} {Said.WAITS_WORK} {number}"):
            return original(work, *args, **given)

    with undo:
        say(Said.ON, stream_of())
        if device.type == "cpu":
            # The streams of a device call the methods of events.
            replace(module.Stream, "wait_stream", partial(waits, Said.WAITS_STREAM))
            replace(module.Stream, "wait_event", partial(waits, Said.WAITS_EVENT))
            replace(module.Stream, "record_event", of_stream)
            # FSDP2 asks for it only where it has an event, which it now has on CPU ranks too.
            replace(torch.accelerator, "current_stream", lambda *_: stream_of())
        replace(module.Event, "record", recorded)
        replace(module.Event, "wait", awaited)
        for owner, name in (
            (module.StreamContext, "__enter__"),
            (module.StreamContext, "__exit__"),
            (module, "set_stream"),
        ):
            replace(owner, name, switched)
        for owner in (module.Stream, module.Event, module):
            replace(owner, "synchronize", host)
        for name in filter(_REQUEST.match, [*vars(dist.ProcessGroup)]):
            replace(dist.ProcessGroup, name, messaged if name in ("send", "recv") else requested)
        replace(dist.ProcessGroup, "_start_coalescing", opened)
        replace(dist.ProcessGroup, "_end_coalescing", closed)
        for owner in (dist.Work, *dist.Work.__subclasses__()):
            replace(owner, "wait", work_waits)
        for operator in functional_operators():
            call = work_waits if "wait_tensor" in str(operator) else requested
            undo.callback(setattr, operator, "_op", operator._op)
            operator._op = _Called(operator._op, call)
        yield
