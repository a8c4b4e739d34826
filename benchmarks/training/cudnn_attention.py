"""Causal attention through cuDNN's Python frontend, which has a deterministic backward pass that torch does not offer.

The package is nvidia-cudnn-frontend; importing this module fails without it.
"""

from __future__ import annotations

import math
from typing import Any

import cudnn
import torch

_HEURISTICS = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]


class CudnnAttention:
    """Forward and backward graphs for fixed tensors ``[batch, heads, seq_len, head_dim]`` in bfloat16."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool) -> None:
        """Build both graphs.

        Raises:
            RuntimeError: cuDNN has no kernel for such tensors.
        """
        self._given = q, k, v
        self.out = torch.empty_like(q)
        self._stats = q.new_empty((*q.shape[:-1], 1), dtype=torch.float32)
        self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        options = {"attn_scale": 1 / math.sqrt(q.shape[-1]), "use_causal_mask": True}
        self._forward, self._forward_pack = self._forward_graph(options)
        self._grad = torch.empty_like(q)
        self._gradients = [torch.empty_like(tensor) for tensor in self._given]
        self._backward, self._backward_pack = self._backward_graph(
            options | {"use_deterministic_algorithm": deterministic}
        )

    def forward(self) -> torch.Tensor:
        """Return the output, in memory that the next call writes again."""
        self._execute(self._forward, self._forward_pack)
        return self.out

    def backward(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of queries, keys and values, in memory that the next call writes again."""
        self._grad.copy_(grad)
        self._execute(self._backward, self._backward_pack)
        return self._gradients

    def _forward_graph(self, options: dict[str, Any]) -> tuple[Any, dict[Any, torch.Tensor]]:
        graph = self._graph()
        inputs = {name: graph.tensor_like(tensor) for name, tensor in zip("qkv", self._given, strict=True)}
        out, stats = graph.sdpa(name="forward", **inputs, generate_stats=True, **options)
        results = {out: self.out, stats: self._stats}
        _set_outputs(results)
        return _built(graph), dict(zip(inputs.values(), self._given, strict=True)) | results

    def _backward_graph(self, options: dict[str, Any]) -> tuple[Any, dict[Any, torch.Tensor]]:
        graph = self._graph()
        tensors = dict(zip("qkv", self._given, strict=True))
        tensors |= {"o": self.out, "dO": self._grad, "stats": self._stats}
        inputs = {name: graph.tensor_like(tensor) for name, tensor in tensors.items()}
        gradients = graph.sdpa_backward(name="backward", **inputs, **options)
        results = dict(zip(gradients, self._gradients, strict=True))
        _set_outputs(results)
        return _built(graph), {inputs[name]: tensor for name, tensor in tensors.items()} | results

    def _graph(self) -> Any:
        float32 = cudnn.data_type.FLOAT
        return cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self._handle,
        )

    def _execute(self, graph: Any, pack: dict[Any, torch.Tensor]) -> None:
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=self.out.device)
        graph.execute(pack, workspace, handle=self._handle)


def _set_outputs(results: dict[Any, torch.Tensor]) -> None:
    for symbol, tensor in results.items():
        symbol.set_output(True).set_dim(tensor.shape).set_stride(tensor.stride())
        if tensor.dtype == torch.float32:
            symbol.set_data_type(cudnn.data_type.FLOAT)


def _built(graph: Any) -> Any:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(_HEURISTICS)
    graph.check_support()
    graph.build_plans()
    return graph
