"""The place of an operator in the user's program: its phase of the step, its module, and the line of code.

It comes from the Python stack in forward; from autograd's node, which knows its forward operator, in backward; and from
what the tracer stored in graphs.
"""

import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pytest_aorta.worker.layout import local_part
from pytest_aorta.worker.torch_private import (
    CALL_MODULE_NAME,
    RUN_BACKWARD_NAME,
    current_autograd_node,
    sequence_number,
)

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
# The sequence number of a node that accumulates a gradient is above this number.
_NO_SEQUENCE_NUMBER = 2**63
_TRACED_NAME = re.compile(r"^L\['\w+'\]")
_TRACED_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# The phase of operators that follow an optimizer's step and that no module calls.
AFTER = "after the optimizer"


class Place(NamedTuple):
    """The place of a call in the user's program."""

    module: str = ""
    source: str = ""


class Places:
    """The places of the operators of one step, in the order of their calls."""

    def __init__(self, model: nn.Module, parameters: Mapping[int, str]) -> None:
        """Name places by modules of ``model``, and by ``parameters``: their names by the addresses of their parts."""
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._parameters = parameters
        self._last_phase = ""
        # Autograd's sequence number -> the place in forward where the node was made.
        self._forward: dict[int, Place] = {}
        # A graph that ran in this step -> the places of its nodes.
        self._graphs: dict[fx.GraphModule, dict[str, Place]] = {}

    def now(self) -> tuple[str, Place]:
        """Return the phase and the place of the operator that has just run, called by a dispatch mode."""
        # This method's caller is the mode's.
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(2))]
        self._last_phase, place = self._find(frames)
        return self._last_phase, place

    def _find(self, frames: Sequence[FrameType]) -> tuple[str, Place]:
        node = current_autograd_node()
        is_backward = node is not None or any(frame.f_code.co_name == RUN_BACKWARD_NAME for frame in frames)
        if any(isinstance(frame.f_locals.get("self"), torch.optim.Optimizer) for frame in frames):
            return "optimizer", Place(source=_source(frames))
        traced = self._in_graph(frames)
        if self._last_phase in ("optimizer", AFTER) and not is_backward and not self._module(frames):
            return AFTER, Place(source=_source(frames))
        if not is_backward:
            place = traced or Place(self._module(frames), _source(frames))
            # Autograd has just made this operator's node, if it made one.
            self._forward.setdefault(sequence_number(), place)
            return "forward", place
        if traced is not None:
            return "backward", traced
        if module := self._module(frames):
            place = Place(module, _source(frames))
            self._forward.setdefault(sequence_number(), place)
            return "recomputation", place
        if any(_is_generated(frame) for frame in frames):
            # The node stands for the whole graph, whose first line in forward is not this operator's.
            return "backward", self._in_forward(node)._replace(source=_source(frames))
        return "backward", self._in_forward(node)

    def _in_graph(self, frames: Iterable[FrameType]) -> Place | None:
        """Return the place that the tracer stored in the node of a graph that runs; None outside of graphs."""
        for frame in frames:
            module = frame.f_locals.get("self")
            if isinstance(module, fx.GraphModule) and frame.f_code.co_filename.startswith("<eval_with_key>"):
                if module not in self._graphs:
                    self._graphs[module] = {node.name: _place_of_node(node) for node in module.graph.nodes}
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                return self._graphs[module].get(line.partition("=")[0].strip(), Place())
        return None

    def _in_forward(self, node: Any) -> Place:
        """Return the place of the forward operator that an autograd node differentiates."""
        if node is None:
            return Place()
        if (variable := getattr(node, "variable", None)) is not None:
            name = self._parameters.get(local_part(variable).data_ptr(), "")
            return Place(name.rpartition(".")[0], "")
        number = node._sequence_nr()
        return self._forward.get(number, Place()) if number < _NO_SEQUENCE_NUMBER else Place()

    def _module(self, frames: Sequence[FrameType]) -> str:
        """Return the path of the innermost module that is called; empty for the root and outside of modules."""
        for frame in frames:
            # Module._call_impl names its module self; a module's forward may not.
            if frame.f_code.co_name == CALL_MODULE_NAME and id(frame.f_locals.get("self")) in self._modules:
                return str(self._modules[id(frame.f_locals["self"])])
        return ""


def _source(frames: Iterable[FrameType]) -> str:
    """Return ``file:line`` of the innermost frame outside of torch and of this package."""
    for frame in frames:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _PACKAGE, "<")):
            return f"{_short(file)}:{frame.f_lineno}"
    return ""


def _is_generated(frame: FrameType) -> bool:
    """Return whether inductor generated the code that a frame runs; its name is torch's, and its file a cache's."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("torch._inductor.") and not frame.f_code.co_filename.startswith(_TORCH)


def _short(file: str) -> str:
    """Return the last three parts of a path, which are the same in every checkout."""
    return "/".join(Path(file).parts[-3:])


def _place_of_node(node: fx.Node) -> Place:
    """Return the place that the tracer stored in a node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    # Outermost first.
    frames = _TRACED_FRAME.findall(str(node.meta.get("stack_trace") or ""))
    inside = [f"{_short(file)}:{line}" for file, line in frames if not file.startswith((_TORCH, _PACKAGE))]
    return Place(_plain(paths[-1]) if paths else "", inside[-1] if inside else "")


def _plain(path: str) -> str:
    """Return a module's path as ``named_modules`` writes it, from dynamo's ``L['self'].layers[0].norm``."""
    return ".".join(word for word in re.findall(r"[^\[\].']+", _TRACED_NAME.sub("", path)) if word != "_modules")
