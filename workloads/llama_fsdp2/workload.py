"""The ``llama_fsdp2`` workload."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from ..common.fsdp2 import prefetch, sum_gradients
from ..llama.expert_parallel import expert_placement
from ..llama.experts import Experts
from ..llama.mesh import ParallelMesh
from ..llama.model import Llama
from ..llama.training import DTYPES, LlamaWorkload


class LlamaFsdp2Workload(LlamaWorkload):
    """Pre-training steps under eager FSDP2: groups of parameters are the embedding, each block, and norm and output."""

    name = "llama_fsdp2"

    def shard(self, model: Llama, mesh: ParallelMesh) -> None:
        """Apply ``fully_shard`` to the embedding, each block, norm with output, and the model, for its hooks."""
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[self.config["param_dtype"]],
            reduce_dtype=DTYPES[self.config["reduce_dtype"]],
            # The model takes token ids and rotations, neither of which may be rounded.
            cast_forward_inputs=False,
        )
        reshard = self.config["reshard_after_forward"]
        fully_shard(model.tok_embeddings, mesh=mesh.data, mp_policy=policy, reshard_after_forward=reshard)
        blocks = []
        for layer in model.layers:
            if self.config["compile_blocks"]:
                layer.compile(fullgraph=True)
            _shard_experts(layer, mesh, policy, reshard)
            blocks.append(fully_shard(layer, mesh=mesh.data, mp_policy=policy, reshard_after_forward=reshard))
        # Backward begins with them: they would be gathered again at once.
        fully_shard([model.norm, model.output], mesh=mesh.data, mp_policy=policy, reshard_after_forward=False)
        self._root = fully_shard(model, mesh=mesh.data, mp_policy=policy)
        sum_gradients(model)
        prefetch(blocks, self.config["forward_prefetch"], self.config["backward_prefetch"])

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Reduce gradients in the last backward pass of a step only, unless the config says in all."""
        self._root.set_requires_gradient_sync(is_last or self.config["reduce_every_micro_batch"])

    def cleanup(self) -> None:
        """Free the wrapped model too."""
        super().cleanup()
        self.__dict__.pop("_root", None)


def _shard_experts(layer: nn.Module, mesh: ParallelMesh, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Make shared-out experts a group within their block's: their gradients are reduced over other ranks."""
    if mesh.experts is None:
        return
    for module in layer.modules():
        if isinstance(module, Experts):
            placement = partial(_fixed, expert_placement(module, mesh.expert_data))
            fully_shard(
                module,
                mesh=mesh.expert_data,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
            )


def _fixed(placement: Shard, _: nn.Parameter) -> Shard:
    return placement
