"""Names of kernels, grouped into families."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.trace.families import (
    MAX_FAMILIES,
    OTHER,
    family_of,
    family_times,
    is_communication,
    is_copy,
    mean_over_ranks,
)
from pytest_aorta.result.trace.profiled_steps import FamilyTime

NATIVE = "at::native::"
ANONYMOUS = "at::native::(anonymous namespace)::"
SILU = "silu_kernel(at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda(c10::BFloat16)#1}"
COPY = (
    f"{NATIVE}direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#3}}::operator()() const::"
    "{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}"
)
# Names as the profiler shows them on CUDA and ROCm.
FAMILIES = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_"
    "cublas": "xmma_gemm_bf16bf16_bf16f32_f32_tn_n_execute_segment_k_off_kernel_cublas",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "nvjet_tst_NTT",
    "nvjet_tst_192x192_64x4_2x1_v_bz_TNN": "nvjet_tst_TNN",
    "nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT": "nvjet_hsh_splitK_TNT",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn": "bf16_s16816gemm_bf16_f2f_nn",
    "ampere_sgemm_128x64_tn": "sgemm_tn",
    f"void {NATIVE}vectorized_elementwise_kernel<4, {NATIVE}CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, x)":
        "vectorized_elementwise_kernel[CUDAFunctor_add]",
    f"void {NATIVE}vectorized_elementwise_kernel<4, {NATIVE}BUnaryFunctor<float, float, float, {NATIVE}binary_internal"
    "::MulFunctor<float> >, std::array<char*, 2ul> >(int)": "vectorized_elementwise_kernel[MulFunctor]",
    f"void {NATIVE}vectorized_elementwise_kernel<4, {ANONYMOUS}{SILU}, std::array<char*, 2ul> >(int)":
        "vectorized_elementwise_kernel[silu_kernel]",
    f"void {NATIVE}elementwise_kernel<128, 4, {NATIVE}gpu_kernel_impl_nocast<{COPY}>(at::TensorIteratorBase&, {COPY} "
    f"const&)::{{lambda(int)#1}}>(int, {NATIVE}gpu_kernel_impl_nocast<{COPY}>)":
        "elementwise_kernel[direct_copy_kernel_cuda]",
    f"void {NATIVE}reduce_kernel<512, 1, {NATIVE}ReduceOp<float, {NATIVE}func_wrapper_t<float, {NATIVE}sum_functor<"
    "float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4> >(x)":
        "reduce_kernel[sum_functor]",
    f"void {ANONYMOUS}multi_tensor_apply_kernel<{ANONYMOUS}FusedOptimizerTensorListMetadata<4>, {ANONYMOUS}"
    "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double>(x)":
        "multi_tensor_apply_kernel[FusedAdamMathFunctor]",
    f"void {ANONYMOUS}softmax_warp_forward<float, float, float, 8, false>(float*)": "softmax_warp_forward",
    f"{ANONYMOUS}amax_cleanup(float*)": "amax_cleanup",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, cutlass::bfloat16_t>, "
    "false, true>(pytorch_flash::Flash_fwd_params)": "flash_fwd_kernel",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_nn_align8>(x::Params)":
        "Kernel2[cutlass_tensorop_bf16_s16816gemm_relu_bf16_nn]",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop<2> > > >(x)":
        "device_kernel[FlashAttnFwd]",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_31_128x128x128_4x1x1_kernel0_0":
        "cudnn_generated_fort_native_sdpa_flash_fprop_wgmma_f16_knob_kernel0",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(x)": "splitKreduce_kernel",
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, false, 7>(x)": "gemvx_kernel",
    "triton_poi_fused_add_mul_17": "triton_poi_fused_add_mul",
    "triton_red_fused__to_copy_mean_pow_0": "triton_red_fused_to_copy_mean_pow",
    "_fwd_kernel_0d1d2d3de4c": "fwd_kernel",
    "scale_kernel_a1b2c3d4e5f6": "scale_kernel",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "ncclDevKernel_AllGather_RING_LL",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)": "ncclDevKernel_Generic",
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0_APM1_ABV0": "Cijk_Ailk_Bljk_BBS_BH",
    "Memcpy DtoD (Device -> Device)": "Memcpy DtoD",
    "Memset (Device)": "Memset",
    "": "unnamed",
    "128x256": "unnamed",
}  # fmt: skip


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_family_keeps_what_names_the_work(name, family):
    assert family_of(name) == family


def test_kinds_of_families_are_told_apart_by_name():
    communication = [
        "ncclDevKernel_AllGather_RING_LL", "gloo:all_gather", "multimem_all_reduce_kernel",
        "mscclKernel_Sum_hip_bfloat16_Simple_false", "exchange[all_gather]",
    ]  # fmt: skip
    copies, compute = ["Memcpy HtoD", "Memset"], ["reduce_kernel[sum_functor]", "nvjet_tst_NTT", "aten::copy_"]
    every = [*communication, *copies, *compute]
    assert [family for family in every if is_communication(family)] == communication
    assert [family for family in every if is_copy(family)] == copies


def test_times_and_calls_are_per_step():
    found = family_times([("a", 3_000_000), ("b", 1_000_000), ("a", 1_000_000)], 2)
    assert found == {"a": FamilyTime(2.0, 1.0), "b": FamilyTime(0.5, 0.5)}


def test_shortest_families_are_summed():
    found = family_times([(f"f{number}", 1_000 * (100 - number)) for number in range(100)], 1)
    assert (len(found), next(iter(found)), list(found)[-1]) == (MAX_FAMILIES, "f0", OTHER)
    assert found[OTHER] == FamilyTime(pytest.approx(sum(range(1, 38)) / 1e3), 37)


def test_mean_over_ranks_counts_a_rank_without_the_family_as_zero():
    ranks = [{"a": FamilyTime(4.0, 2.0)}, {"a": FamilyTime(2.0, 2.0), "b": FamilyTime(1.0, 1.0)}]
    assert mean_over_ranks(ranks) == {"a": FamilyTime(3.0, 2.0), "b": FamilyTime(0.5, 0.5)}
    assert mean_over_ranks([]) == {}


@given(
    st.lists(
        st.dictionaries(st.sampled_from([OTHER, *map(str, range(90))]), st.integers(1, 10**9)), min_size=1, max_size=3
    )
)
def test_no_time_is_lost_between_ranks_and_limits(ranks):
    per_rank = [family_times(durations.items(), 1) for durations in ranks]
    merged = mean_over_ranks(per_rank)
    assert len(merged) <= MAX_FAMILIES
    total_ms = sum(sum(durations.values()) for durations in ranks) / 1e6
    assert sum(time.ms for time in merged.values()) == pytest.approx(total_ms / len(ranks))
    calls = sum(time.calls for time in merged.values())
    assert calls == pytest.approx(sum(map(len, ranks)) / len(ranks))
