"""Async tensor parallelism: inductor's micro-pipelines of matrix products and collectives.

A graph pass gathers a single sequence as a matrix, which inductor's own pass expects. Torch gathers ``[1, positions,
dim]`` along its first dimension and views the result, first as ``[1, all positions, dim]`` and then as the operand of a
matrix product. Inductor follows a gather to a product through one view at most.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..common.torch_private import CustomGraphPass, get_hash_for_files, symmetric_memory
from ..config import LlamaSettings
from ..models.common.float8 import FLOAT8_OPTIONS
from .annotate import ALL_GATHER, WAIT

_RESHAPE = torch.ops.aten.reshape.default
_VIEWS = (_RESHAPE, torch.ops.aten.view.default)


@dataclass(frozen=True)
class FlattenGathers(CustomGraphPass):
    """The pass, for gathers of the process group named ``group``."""

    group: str

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place; values stay the same."""
        for gather in graph.find_nodes(op="call_function", target=ALL_GATHER):
            shape = gather.args[0].meta["val"].shape
            if gather.args[-1] == self.group and len(shape) == 3 and shape[0] == 1:
                _flatten(graph, gather)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Return the key of this pass in torch's caches of compiled graphs."""
        return get_hash_for_files((__file__,), self.group)


def _flatten(graph: fx.Graph, gather: fx.Node) -> None:
    """Gather the sequence of ``gather`` as a matrix, and view that matrix wherever a view of the result is read."""
    given, num_ranks, group = gather.args
    assert isinstance(given, fx.Node)
    (wait,) = gather.users
    part = given.meta["val"][0]
    whole = part.new_empty((part.shape[0] * num_ranks, part.shape[1]))
    with graph.inserting_before(wait):
        flat = _node(graph, _RESHAPE, (given, list(part.shape)), part)
        flat_wait = _node(graph, WAIT, (_node(graph, ALL_GATHER, (flat, num_ranks, group), whole),), whole)
    for view in list(_views_of(wait)):
        if view.meta["val"].shape == whole.shape:
            view.replace_all_uses_with(flat_wait)
        else:
            view.args = (flat_wait, view.args[1])
    with graph.inserting_after(flat_wait):
        wait.replace_all_uses_with(_node(graph, _RESHAPE, (flat_wait, list(wait.meta["val"].shape)), wait.meta["val"]))
    # Collectives are never dead code.
    for replaced in (wait, gather):
        graph.erase_node(replaced)


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the views of a node's value, and the views of these."""
    for user in node.users:
        if user.target in _VIEWS:
            yield user
            yield from _views_of(user)


def _node(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node


def inductor_options(settings: LlamaSettings, tensor: DeviceMesh | None) -> dict[str, Any]:
    """Return inductor's options for a model whose matrices are split over ``tensor``."""
    options: dict[str, Any] = dict(FLOAT8_OPTIONS) if settings.float8_linear else {}
    if settings.async_tensor_parallel and tensor is not None:
        options |= micro_pipeline_options(tensor)
    return options


def micro_pipeline_options(mesh: DeviceMesh) -> dict[str, Any]:
    """Return inductor's options that divide matrix products and overlap the parts with their collectives over ``mesh``.

    Torch refuses the options if this version lacks the pass.
    """
    group = mesh.get_group().group_name
    with warnings.catch_warnings():
        # Deprecated from torch 2.10 on, but the pass still ignores groups without this call.
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group)
    return {"_micro_pipeline_tp": True, "post_grad_custom_pre_pass": FlattenGathers(group)}
