"""The changes that the axes make to a Llama model."""

from pytest_aorta.worker import is_simulated

from ..config import LlamaSettings
from ..models.common.decoder import Decoder
from ..models.common.float8 import convert_layers
from .context import apply_context_parallel
from .expert import dispatch_tokens, split_experts
from .parallel_dims import ParallelMesh
from .pipeline import keep_stage, own_stages, split_stages
from .tensor import apply_tensor_parallel


def parallelize(model: Decoder, mesh: ParallelMesh, settings: LlamaSettings) -> list[Decoder]:
    """Change the modules of ``model``, which is on the meta device, for all axes but data parallelism.

    Return the models that a step runs: that of each stage of this rank, or ``model`` itself.
    """
    stages, num_stages = own_stages(settings.pipeline_parallel_schedule, mesh.pipeline)
    keep_stage(model, num_stages, *stages)
    if settings.float8_linear:
        convert_layers(model, settings.float8_recipe, with_output=settings.float8_output)
    if mesh.tensor is not None:
        apply_tensor_parallel(model, mesh.tensor, chunked_loss=settings.loss_chunks > 0)
    if mesh.context is not None:
        apply_context_parallel(model, mesh.context, settings.seq_len)
    if (split := mesh.expert_axes.non_dp_mesh) is not None:
        split_experts(model, split, distributed=mesh.experts is not None, tensor_parallel=mesh.tensor is not None)
    if mesh.experts is not None:
        dispatch_tokens(model, mesh.experts, evenly=is_simulated())
    return split_stages(model, num_stages, stages)
