"""The private interfaces of torch that workloads use; torch has nothing public in their place.

Those that only traced graphs need are in ``passes/torch_private.py``. Each of the following goes when its replacement
is in the oldest supported version of torch:

- attention as one operator: with compiled ``flex_attention`` in graphs that do not reach inductor (regional inductor);
- base classes of passes, without which inductor caches no graph: with public names;
- tensors without data, modes of dispatch: with public names for them;
- collectives that autograd and compilers follow: with ``torch.distributed`` functions that compilers trace;
- ``capture_scalar_outputs`` of dynamo's config, with which graphs hold numbers that the host reads as symbols: with an
  option of ``torch.compile``;
- a process group over several dimensions of a mesh: with a public name of ``DeviceMesh._flatten``;
- one addition to many tensors: with a public name of ``_foreach_add_``;
- FSDP2's meshes of single parameters: with a public name of ``ShardPlacementResult``, which torch 2.12 has added;
- the pool of symmetric memory, for torch 2.11: with torch 2.11;
- the placement of a parameter that both tensor and data parallelism shard: with a public name of ``_StridedShard``.
"""

import torch._dynamo.config as dynamo_config
import torch._inductor as inductor
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed._symmetric_memory as symmetric_memory
from torch import _foreach_add_ as foreach_add_
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._higher_order_ops.flex_attention import flex_attention as flex_forward
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_backward
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

flatten_mesh = DeviceMesh._flatten

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "StridedShard",
    "TorchDispatchMode",
    "create_fw_bw_graph",
    "disable_current_modes",
    "dynamo_config",
    "flatten_mesh",
    "flex_backward",
    "flex_forward",
    "foreach_add_",
    "fsdp_common",
    "functional_collectives",
    "get_hash_for_files",
    "inductor",
    "symmetric_memory",
]
