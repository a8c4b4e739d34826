"""All tensors of a run, allocated once before the first step."""

import torch

from .oracle import INPUT_SLOTS, CodeTable, chunk_index, world_index
from .settings import Settings


class Gemm:
    """Operands and results of a layer's GEMMs, shared by all layers.

    GEMMs do not use the gathered parameters: codes would overflow float16, and speed should not depend on codes.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """Allocate random square operands, scaled so that results stay in range."""
        generator = torch.Generator(device).manual_seed(seed)
        operands = [torch.randn(size, size, device=device, generator=generator) for _ in range(2)]
        self.activation, self.weight = ((operand / size**0.5).to(dtype) for operand in operands)
        self.output, self.activation_gradient, self.weight_gradient = (
            torch.zeros(size, size, dtype=dtype, device=device) for _ in range(3)
        )


class Buffers:
    """A rank's tensors; lists are by layer, except the pairs ``inputs``, ``gathered`` and ``gradients``."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        """Allocate for ``settings``; buffers start as zeros, which stand for data that never arrived."""

        def zeros(count: int, *shape: int) -> list[torch.Tensor]:
            return [torch.zeros(shape, dtype=settings.dtype, device=device) for _ in range(count)]

        shard_size, world_size = settings.fsdp_shard_size, settings.world_size
        self.index = world_index(shard_size, world_size, device)
        self.own_index = self.index.view(world_size, shard_size)[settings.rank]
        self.input_index = chunk_index(settings.h2d_tensor_size, settings.rank, device)
        pin = settings.pin_memory and device.type == "cuda"
        self.host_inputs = _host_inputs(settings, self.input_index.cpu(), pin=pin)
        self.inputs = zeros(2, settings.h2d_tensor_size)
        self.shards = zeros(settings.layers, shard_size)
        self.gathered = zeros(2, world_size, shard_size)
        self.gradients = zeros(2, world_size * shard_size)
        self.reduced = zeros(settings.layers, shard_size)
        self.weights = _initial_weights(settings, self.own_index)
        self.gemm = Gemm(settings.gemm_size, settings.dtype, device, settings.seed)


def _host_inputs(settings: Settings, index: torch.Tensor, *, pin: bool) -> list[torch.Tensor]:
    codes = CodeTable(settings.dtype, torch.device("cpu"), settings.seed)
    ring = []
    for slot in range(INPUT_SLOTS):
        host = torch.empty(index.numel(), dtype=settings.dtype, pin_memory=pin)
        codes.write(host, index, iteration=slot, layer=settings.layers)
        ring.append(host)
    return ring


def _initial_weights(settings: Settings, own_index: torch.Tensor) -> list[torch.Tensor]:
    """Return integers in float32 that depend on seed, layer and global position; none without an optimizer."""
    if settings.optimizer == "none":
        return []
    codes = CodeTable(torch.float32, own_index.device, settings.seed)
    weights = [torch.empty(own_index.numel(), device=own_index.device) for _ in range(settings.layers)]
    for layer, weight in enumerate(weights):
        codes.write(weight, own_index, iteration=0, layer=layer)
    return weights
