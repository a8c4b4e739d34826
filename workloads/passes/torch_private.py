"""The private interfaces of torch that only traced graphs need, in modules of inductor that take a second to import.

Torch has nothing public in their place. Each goes when its replacement is in the oldest supported version of torch:

- ``compile_fx`` and ``boxed_nop``, the last steps of a backend that has seen the graph's inputs: with a public way from
  a backend to inductor, and to a graph that frees each input after its last use;
- the class of operators in a graph: with a public name;
- merges of collectives: with buckets by the parameters' order in torch's own bucketing;
- dependencies that inductor keeps, and the scheduler by estimated times: with a scheduler that needs no formulas where
  estimates are given. Torch 2.13 evaluates its own formulas even then, and on ranks without Triton they raise.
"""

from typing import Any

from torch import fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.bucketing import (
    merge_all_gather_bucket,
    merge_all_reduce_bucket,
    merge_reduce_scatter_bucket,
)
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.fx_passes.overlap_scheduling import OverlapScheduler, is_compute_node, schedule_overlap_bucketing
from torch._ops import OpOverload

__all__ = [
    "OpOverload",
    "OverlapScheduler",
    "boxed_nop",
    "compile_fx",
    "is_compute_node",
    "merge_all_gather_bucket",
    "merge_all_reduce_bucket",
    "merge_reduce_scatter_bucket",
    "pre_bucket",
    "preserve_node_ordering",
    "schedule_overlap_bucketing",
]


def pre_bucket(graph_module: fx.GraphModule) -> Any:
    """Merge FSDP's collectives before they are scheduled; from torch 2.13 on."""
    from torch._inductor.fx_passes.fsdp import pre_bucket_fsdp_collectives

    return pre_bucket_fsdp_collectives(graph_module, mode=None, bucket_cap_mb=None)
