"""Tensor parallelism with sequence parallelism: Megatron-LM's split of a block (arXiv 1909.08053, 2205.05198)."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..models.common.chunked_loss import Output, Vocabulary
from ..models.common.decoder import Block, Decoder
from ..models.common.dtensors import SEQUENCE, distribute_parameter, local_value


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, chunked_loss: bool) -> None:
    """Make every parameter a DTensor on the one-dimensional ``mesh``, and add the collectives between modules.

    With ``chunked_loss``, the output is the loss, and ranks exchange sums of their logits instead of logits.
    """
    outer = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": SequenceParallel(),
        "output": (
            _VocabularyParallel()
            if chunked_loss
            else ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate())
        ),
    }
    kept = [name for name in outer if not isinstance(model.get_submodule(name), nn.Identity)]
    parallelize_module(model, mesh, {name: outer[name] for name in kept})
    for layer in model.layers:
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh, _block_plan(layer))
    # A copy of the embedding's output waits for the collective that writes the output: torch 2.13 loses the gradient of
    # a compiled block's input that a collective has not written yet.
    model.tok_embeddings.register_forward_hook(lambda _module, _inputs, output: output.clone())


class _VocabularyParallel(ParallelStyle):
    """Splits the vocabulary of an :class:`Output` that computes the loss, and gathers its input along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Output)
        distribute_parameter(module, "weight", device_mesh, [Shard(0)])
        num_rows = module.out_features // device_mesh.size()
        group = device_mesh.get_group().group_name
        module.vocabulary = Vocabulary(device_mesh.get_local_rank() * num_rows, group)

        def gather(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            # The norm before it returns a DTensor that is split along the sequence.
            whole = inputs[0].redistribute(placements=[Replicate()])
            # Each rank has the gradient of its own part of the vocabulary.
            return local_value(whole), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


def _block_plan(block: Block) -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        # The second input, freqs_cis, is a plain tensor.
        "attention": PrepareModuleInput(input_layouts=(SEQUENCE, None), desired_input_layouts=(Replicate(), None)),
        **{f"attention.{name}": style for name, style in block.attention.tensor_plan().items()},
        "attention.wo": RowwiseParallel(output_layouts=SEQUENCE),
        "ffn_norm": SequenceParallel(),
        **{f"feed_forward{name}": style for name, style in block.feed_forward.tensor_plan().items()},
    }
