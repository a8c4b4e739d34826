"""Names of collectives and kernels, read as kinds of communication."""

from __future__ import annotations

import pytest

from pytest_aorta.result.trace.kineto import collective_of

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("", ALL_GATHER), "all_gather"),
        (("", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"), "reduce_scatter"),
        (("", "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL"), "all_reduce"),
        (("", "ncclDevKernel_Broadcast_RING_LL"), "broadcast"),
        (("", "ncclDevKernel_SendRecv"), "send_recv"),
        (("all_to_allv", "ncclDevKernel_SendRecv"), "all_to_all"),
        (("_allgather_base", "ncclDevKernel_Generic_1"), "all_gather"),
        (("reduce_scatter_tensor_coalesced", "ncclDevKernel_Generic_4"), "reduce_scatter"),
        (("", "ncclDevKernel_Generic_4"), "other"),
        (("", "ncclDevKernel_Reduce_Sum"), "other"),
        (("", "ncclSymkDevKernel_AllGather_LL"), "all_gather"),
        (("gloo:all_to_all",), "all_to_all"),
        (("gloo:barrier",), "other"),
    ],
)
def test_collective_is_what_was_asked_for_or_what_the_kernel_says(names, kind):
    assert collective_of(*names) == kind
