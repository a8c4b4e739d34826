"""A compiled graph of a whole step as a CUDA graph, which replays the kernels without the host's work between them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..common.gradients import own_shard

Run = Callable[[list[Any]], Sequence[Any]]


class CapturedStep:
    """A function that runs a compiled graph in its first call, captures it in the second, and replays it from then on.

    A replay writes its results over those of the replay before, so a caller uses them before its next call.
    """

    # Torch then passes one list, and keeps none of its tensors.
    _boxed_call = True

    def __init__(self, run: Run, parameters: Sequence[torch.Tensor]) -> None:
        """Prepare the graph.

        Args:
            run: the compiled graph; it empties its list of arguments.
            parameters: the arguments that stay where they are in memory, because an optimizer changes them in place. A
                replay copies all other tensors to where the captured ones are.
        """
        self._run, self._parameters = run, parameters
        self._is_warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: set[int] = set()
        self._inputs: list[Any] = []
        self._outputs: Sequence[Any] = ()

    def __call__(self, given: list[Any]) -> Sequence[Any]:
        """Run the graph on ``given``, which is emptied."""
        if not self._is_warm:
            # Compiles kernels and makes handles, which can't be captured.
            self._is_warm = True
            return self._run(given)
        if self._graph is None:
            self._graph = self._capture(given)
        for value, kept in zip(given, self._inputs, strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            if kept.data_ptr() not in self._addresses:
                kept.copy_(value)
            elif value.data_ptr() != kept.data_ptr():
                raise RuntimeError("cuda_graphs is true: a parameter has moved in memory since its step was captured")
        given.clear()
        self._graph.replay()
        # Autograd attaches its nodes to the tensors that it is given.
        return [value.detach() if isinstance(value, torch.Tensor) else value for value in self._outputs]

    def _capture(self, given: Sequence[Any]) -> torch.cuda.CUDAGraph:
        self._addresses = {own_shard(value).data_ptr() for value in self._parameters}

        def kept(value: Any) -> Any:
            is_copied = isinstance(value, torch.Tensor) and value.data_ptr() not in self._addresses
            return value.clone() if is_copied else value

        self._inputs = [kept(value) for value in given]
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the watchdog of NCCL, may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._outputs = self._run(list(self._inputs))
        return graph
