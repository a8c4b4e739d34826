"""Capture of every operator that a rank runs in one step, with hashes of what the operator reads and writes.

A dispatch mode receives each call of an operator below autograd, in forward, in backward and in the optimizer, from
eager code and from the graphs of ``aot_eager``. Kernels that inductor generates are not operators and are not captured.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.folder import OPERATORS_FILE
from pytest_aorta.result.trace.rank_files import (
    MAX_CALLS,
    RANDOM_STATE,
    WITHOUT_DEFINED_OUTPUT,
    OperatorCall,
    StepOperators,
)
from pytest_aorta.worker.finite import CHECKED
from pytest_aorta.worker.layout import Axis, Grid, dtensor_type, local_part
from pytest_aorta.worker.own_plan import own_folder
from pytest_aorta.worker.places import Places
from pytest_aorta.worker.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    c10d,
    disable_current_modes,
    tree_leaves,
    wait_tensor,
    zip_schema,
)
from pytest_aorta.worker.weight_hash import stacked, tensor_sums

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
# Operators whose outputs hold whatever was in memory before.
_UNINITIALIZED = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
# Arguments and results of attention that its kernels allocate and, without dropout, never write.
_UNDEFINED = ("philox_seed", "philox_offset", "rng_state", "unused")
_MAX_TEXT = 200


class _Sums(NamedTuple):
    """The two sums of a tensor and a flag of NaN or infinity, int64 ``[3]`` on its device, with its dtype and shape."""

    sums: torch.Tensor
    signature: str


class OperatorCapture(TorchDispatchMode):
    """Dispatch mode that captures the operators of one step into ``operators.json`` in the rank's folder.

    While it captures, it zeroes uninitialized outputs, and waits for each collective at once, so that the collective's
    outputs can be hashed. It leaves out operators that change no bits, and tensors without a defined value.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch.compile runs its graphs under this mode."""
        return True

    def __init__(self, model: nn.Module) -> None:
        """Prepare to capture steps of ``model``; captured calls name its modules and parameters."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._parameters: dict[int, str] = {}
        # Calls without the hashes of their inputs and outputs, which are still sums on the device.
        self._calls: list[tuple[OperatorCall, list[_Sums], list[_Sums]]] = []
        self._places = Places(model, {})
        self._step: int | None = None

    @staticmethod
    def paused() -> AbstractContextManager[Any]:
        """Return a context without any dispatch mode, in which no operator is captured."""
        return disable_current_modes()

    def begin(self, step: int) -> None:
        """Start to capture measured step ``step``, counted from 1."""
        self._calls.clear()
        parts = ((name, local_part(parameter).detach()) for name, parameter in self._model.named_parameters())
        self._parameters = {local.data_ptr(): name for name, local in parts if local.numel()}
        self._places = Places(self._model, self._parameters)
        self._step = step
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop, and write the captured calls; do nothing if no step is being captured."""
        if self._step is None:
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if (folder := own_folder()) is not None:
            operators = StepOperators(self._step, self.calls())
            write_json(folder / OPERATORS_FILE, to_builtins(operators), durable=False)
        self._step = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and keep its hashes.

        Each operator of the step comes here. What this method computes itself runs without dispatch modes, or it would
        be captured too. Nothing is read from the device, since the host would wait for each operator; collectives are
        the exception.
        """
        # What is not captured runs as it is.
        kwargs = kwargs or {}
        dtensor = dtensor_type()
        if dtensor is not None and any(issubclass(kind, dtensor) for kind in types):
            # The DTensor runs the operator on its local part, and this method receives that call too.
            return NotImplemented
        leaves = tree_leaves((args, kwargs))
        if _is_untracked(func) or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return func(*args, **kwargs)
        # Memory that nobody has written differs between launches.
        if func._schema.name.split("::")[1] in _UNINITIALIZED:
            result = func(*args, **kwargs)
            with disable_current_modes():
                for tensor in _tensors(result):
                    tensor.zero_()
            return result
        if len(self._calls) >= MAX_CALLS:
            return func(*args, **kwargs)

        # What it reads is hashed before it runs, since it may write there.
        with disable_current_modes():
            read = list(_read_tensors(func, args, kwargs))
            inputs = [_sums(tensor) for tensor in read]
            state = _random_state(func, args, kwargs)
        result = func(*args, **kwargs)

        # A collective has written its outputs only when it was waited for.
        is_collective = func.namespace in _COLLECTIVE_NAMESPACES
        with disable_current_modes():
            written = list(_written_tensors(func, args, kwargs, result))
            if is_collective:
                _wait(result, written)
            has_outputs = str(func) not in WITHOUT_DEFINED_OUTPUT
            outputs = [_sums(tensor) for tensor in written if has_outputs]
            # Attention without dropout draws nothing.
            drawn_from = state if state and state != _random_state(func, args, kwargs) else ""

        # The Python stack still shows who has called it.
        if inputs or outputs:
            phase, place = self._places.now()
            names = ((number, self._parameters.get(tensor.data_ptr())) for number, tensor in enumerate(written))
            call = OperatorCall(
                name=str(func)[:_MAX_TEXT],
                phase=phase,
                module=place.module,
                source=place.source,
                is_collective=is_collective,
                arguments="" if is_collective else _arguments(func, args, kwargs, drawn_from),
                inputs=(),
                outputs=(),
                parameters=tuple((number, name) for number, name in names if name is not None),
                group=_group(args, kwargs) if is_collective else "",
                sources=tuple(
                    self._parameters.get(tensor.data_ptr(), sums.signature)
                    for tensor, sums in zip(read, inputs, strict=True)
                ),
            )
            self._calls.append((call, inputs, outputs))
        return result

    def calls(self) -> list[OperatorCall]:
        """Return the captured calls, in order."""
        tensors = iter(_digests([sums for _, inputs, outputs in self._calls for sums in (*inputs, *outputs)]))
        calls = []
        for call, inputs, outputs in self._calls:
            read, written = list(islice(tensors, len(inputs))), list(islice(tensors, len(outputs)))
            calls.append(
                call.replace(
                    inputs=tuple(text for text, _ in read),
                    outputs=tuple(text for text, _ in written),
                    read=max((kind for _, kind in read), default=0),
                    wrote=max((kind for _, kind in written), default=0),
                )
            )
        return calls


def _is_untracked(func: Any) -> bool:
    """Return True for operators that change no bits."""
    if func.namespace in _COLLECTIVE_NAMESPACES:
        return "wait" in func._schema.name or "barrier" in func._schema.name
    if any(_is_written(argument) for argument in func._schema.arguments):
        return False
    return all(value.alias_info is not None for value in func._schema.returns)


def _read_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator reads; a tensor that is only overwritten is left out."""
    for argument, value in zip_schema(func._schema, args, kwargs):
        if not _is_overwritten(func, argument) and argument.name not in _UNDEFINED:
            yield from _tensors(value)


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator returns and those that it writes in place, each once."""
    written = [value for argument, value in zip_schema(func._schema, args, kwargs) if _is_written(argument)]
    # Schemas of c10d name no tensor as written.
    if func.namespace == "c10d":
        written = [value for _, value in zip_schema(func._schema, args, kwargs)]
    results = result if isinstance(result, tuple | list) and len(func._schema.returns) > 1 else [result]
    defined = [value for one, value in zip(func._schema.returns, results, strict=False) if one.name not in _UNDEFINED]
    tensors = (*_tensors(written), *_tensors(defined))
    yield from {id(tensor): tensor for tensor in tensors}.values()


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_overwritten(func: Any, argument: Any) -> bool:
    if func.namespace in _COLLECTIVE_NAMESPACES:
        return str(argument.name).startswith("out")
    return _is_written(argument) and (argument.is_out or func._schema.name == "aten::copy_")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _wait(result: Any, written: Sequence[torch.Tensor]) -> None:
    """Wait until a collective has written its outputs.

    On a GPU, wait for all streams: NCCL returns no work for a collective of the current stream. A dispatch mode then
    receives an empty script object, whose ``wait`` is a segmentation fault.
    """
    if devices := {tensor.device for tensor in written if tensor.device.type != "cpu"}:
        for device in devices:
            torch.accelerator.synchronize(device)
        return
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            wait_tensor(leaf)
        elif isinstance(leaf, torch.ScriptObject) and hasattr(leaf, "wait"):
            leaf.wait()


def _sums(tensor: torch.Tensor) -> _Sums:
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    sums = tensor_sums(plain, Grid.of(Axis(plain.numel(), range(plain.numel()))))
    if plain.dtype in CHECKED and plain.numel():
        # The largest magnitude is NaN if any element is.
        largest = torch.linalg.vector_norm(plain, math.inf)
        kind = largest.isnan().to(sums.dtype) + ~largest.isfinite()
    else:
        kind = sums.new_zeros(())
    return _Sums(torch.cat([sums, kind[None]]), f"{tensor.dtype}{tuple(tensor.shape)}")


def _group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the ranks of a collective, with the names of its operation and its group if it has them."""
    leaves = tree_leaves((args, kwargs))
    names = [leaf for leaf in leaves if isinstance(leaf, str)]
    objects = (leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject))
    groups = [dist.ProcessGroup.unbox(leaf) for leaf in objects if "ProcessGroup" in str(leaf._type())]
    if not groups and names:
        # The group of a functional collective comes last.
        groups = [c10d._resolve_process_group(names.pop())]
    ranks = "".join(f"ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}" for group in groups[:1])
    return " of ".join([*names, ranks])[:_MAX_TEXT]


def _digests(every: Sequence[_Sums]) -> list[tuple[str, int]]:
    """Return 32 hex digits and the flag of NaN or infinity of each tensor, with one transfer from the device."""
    rows = stacked([sums for sums, _ in every]).tolist() if every else []
    texts = (f"{signature}{row[:2]}" for row, (_, signature) in zip(rows, every, strict=True))
    return [
        (hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), row[2])
        for text, row in zip(texts, rows, strict=True)
    ]


def _random_state(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a hash of the state of the generator from which an operator may draw; empty if it never draws."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return ""
    leaves = tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    tensors = (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    device = torch.device(kwargs.get("device") or next(tensors, "cpu"))
    default: Any = torch if device.type in ("cpu", "meta") else torch.get_device_module(device)
    state = given[0].get_state() if given else default.get_rng_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=4).hexdigest()


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drawn_from: str) -> str:
    """Return the plain arguments as text, with defaults, since callers differ in the arguments that they pass.

    The random state that an operator has ``drawn_from`` comes first.
    """
    given = {argument.name: value for argument, value in zip_schema(func._schema, args, kwargs)}
    values = [given.get(argument.name, argument.default_value) for argument in func._schema.arguments]
    plain = (leaf for leaf in tree_leaves(values) if isinstance(leaf, bool | int | float | str | torch.dtype))
    return repr([*([f"{RANDOM_STATE} {drawn_from}"] if drawn_from else []), *plain])[:_MAX_TEXT]
