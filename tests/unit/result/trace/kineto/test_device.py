"""Traces of known kernels, with the host's events and without, read into lanes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.trace.families import is_communication
from pytest_aorta.result.trace.kineto import learn_step, overlap_of_device
from pytest_aorta.result.trace.profiled_steps import waits_ms
from tests.unit.builders import broken_rule
from tests.unit.kineto_traces import boundary, event, families, kernel, overlap_with_host, totals_ms, trace

ALL_GATHER, REDUCE_SCATTER = (
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_ReduceScatter",
)


def on_device(*events):
    return overlap_with_host(trace(boundary(0, 1, 50), *events, boundary(30, 2, 150)))


def named(name, *rows, stream=20, asked=None):
    """Return kernels of one stream, 10 us each; ``asked`` is the requested collective of each, as in host events."""
    extra = {"Collective name": asked} if asked else {}
    return [kernel(name, begin, 10, stream=stream, **extra) for begin in rows]


def alone(*events, edges=(50, 150, 250)):
    """Return a trace of two steps with device activity alone."""
    return trace(*(kernel("fill", edge, 1) for edge in edges), *events)


def learned(*events):
    return learn_step(trace(boundary(0, 1, 50), *events, boundary(30, 2, 150)))


GENERIC = "ncclDevKernel_Generic_1"


def test_device_alone_is_read_by_what_one_step_with_the_host_said():
    step = learned(*named(GENERIC, 60, asked="_allgather_base"), *named(GENERIC, 80, asked="alltoall_base"))
    found = overlap_of_device(alone(*named(GENERIC, 70, 90, 170, 230), kernel("gemm", 70, 15)), step, 2)
    first, second = found.steps
    assert [round(each.step_ms, 6) for each in found.steps] == [0.1, 0.1]
    assert totals_ms(first) == {
        "all_gather": 0.01,
        "all_to_all": 0.01,
    }
    assert first.hidden_comm_ms == pytest.approx(0.010)
    assert (set(second.collectives), second.hidden_comm_ms) == ({"all_gather", "all_to_all"}, 0)


def test_stream_that_did_something_else_is_read_by_its_kernels_names_alone():
    step = learned(
        *named(GENERIC, 60, asked="alltoall_base"), *named("ncclDevKernel_SendRecv", 80, asked="alltoall", stream=21)
    )
    found = overlap_of_device(
        alone(*named(GENERIC, 60, 160, 180), *named("ncclDevKernel_SendRecv", 60, 160, stream=21)), step, 2
    )
    assert [set(each.collectives) for each in found.steps] == [{"other", "all_to_all"}] * 2


def test_communication_before_the_first_boundary_is_no_part_of_it():
    """Ignore the ranks' own barrier and the additional step before the first boundary."""
    step = learned(*named(GENERIC, 60, asked="alltoall_base"))
    found = overlap_of_device(alone(*named(GENERIC, 5, 20, 60, 160)), step, 2)
    assert [set(each.collectives) for each in found.steps] == [{"all_to_all"}] * 2


def copied(begin_us: float, number: int, asked: str = "", stream: int = 20, copy_us: float = 0.0) -> list[dict]:
    """Return a copy of the device of 10 us, its call on the host and, of a collective, torch's record around it."""
    record = event("cpu_op", "record_param_comms", begin_us, 3, **GATHER | {"Collective name": asked})
    return [
        *([record] if asked else []),
        event("cuda_runtime", "cudaMemcpyAsync", begin_us + 1, 1, correlation=number),
        event("gpu_memcpy", COPY, copy_us, 10, stream, stream=stream, correlation=number),
    ]


COPY = "Memcpy DtoD (Device -> Device)"


def test_copies_by_which_copy_engines_serve_a_collective_communicate():
    work = (
        copied(10, 11, "_allgather_base", copy_us=60),
        copied(14, 12, copy_us=80),
        copied(18, 13, stream=7, copy_us=90),
    )
    step = learned(*work)
    later = [event("gpu_memcpy", COPY, begin, 10, 20, stream=20) for begin in (60, 80, 160, 180)]
    own = [event("gpu_memcpy", COPY, begin, 10, 7, stream=7) for begin in (90, 190)]
    for found in (on_device(*work), overlap_of_device(alone(*later, *own, kernel("gemm", 65, 50)), step, 2)):
        assert totals_ms(found.steps[0]) == {"all_gather": 0.01}
        assert found.steps[0].copy_ms == pytest.approx(0.020)
        assert {family: is_communication(family) for family in found.kernels if "Memcpy" in family} == {
            "Memcpy DtoD": False,
            "Memcpy DtoD[all_gather]": True,
        }
        (calls,) = found.collectives
        assert (calls.kind, calls.group, calls.num_bytes) == ("all_gather", "0 [0, 1]", None)


NCCL = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
GATHER = NCCL | {"Collective name": "_allgather_base", "In msg nelems": 1024, "Out msg nelems": 2048}


def test_kernels_of_the_steps_are_kept_by_family_without_the_boundarys_own():
    found = overlap_of_device(
        alone(
            kernel("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", 60, 20),
            kernel("nvjet_tst_64x64_64x4_1x2_v_bz_NTT", 160, 10),
            kernel("gemm", 20, 20),
            kernel("gemm", 250, 20),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 60, 4, 22),
            *named(ALL_GATHER, 100),
        ),
        learned(),
        2,
    )
    assert families(found) == {
        "nvjet_tst_NTT": (0.015, 1.0),
        "ncclDevKernel_AllGather_RING_LL": (0.005, 0.5),
        "Memcpy DtoD": (0.002, 0.5),
    }


def test_calls_of_collectives_get_group_and_bytes_from_the_step_with_the_host():
    step = learned(
        kernel(ALL_GATHER, 60, 10, stream=20, dtype="BFloat16", **GATHER),
        kernel(ALL_GATHER, 80, 10, stream=20, dtype="Float8_e4m3fn", **GATHER),
    )
    found = overlap_of_device(
        alone(*named(ALL_GATHER, 60, 80, 160, 180), *named(REDUCE_SCATTER, 60, stream=3)), step, 2
    )
    group = "0 [0, 1]"
    assert [(each.kind, each.group, each.group_size, each.num_bytes) for each in found.collectives] == [
        ("all_gather", group, 2, 4096),
        ("all_gather", group, 2, 2048),
        ("reduce_scatter", "", None, None),
    ]
    assert [len(each.ms) for each in found.collectives] == [2, 2, 1]
    assert found.collectives[0].ms == [0.010, 0.010]


def skewed(early_us: float) -> dict:
    """Return a trace of two steps whose gathers transfer 10 us, after a rank has waited ``early_us`` in each."""
    gathers = [kernel(ALL_GATHER, end - 10 - early_us, 10 + early_us, stream=20) for end in (100, 140, 200, 240)]
    return alone(*gathers, *(kernel("gemm", begin, 35) for begin in (60, 160)))


def test_communication_does_not_depend_on_how_early_a_rank_arrives():
    """Compare an early rank with the rank that it waits for; the first gather of a step is half hidden."""
    step = learned(*(kernel(ALL_GATHER, begin, 10, stream=20, **GATHER) for begin in (60, 80)))
    early, late = (overlap_of_device(skewed(us), step, 2) for us in (12, 0))
    calls = [early.collectives, late.collectives]
    assert [entry.ms for entries in calls for entry in entries] == [[0.022] * 4, [0.010] * 4]
    assert early.metrics() != late.metrics()
    found = [overlap_of_device(skewed(us), step, 2, waits_ms(calls, rank)) for rank, us in enumerate((12, 0))]
    assert (
        found[0].metrics()
        == found[1].metrics()
        == {"exposed_comm_ms": pytest.approx(0.015), "overlap_ratio": pytest.approx(0.25)}
    )
    assert [entry.ms for entry in found[0].collectives] == [[0.022] * 4]
    # The wait for the first gather is hidden, that for the second is not.
    assert [round(one.exposed_wait_ms, 6) for one in found[0].steps] == [0.012, 0.012]
    assert [broken_rule(one) for one in found[0].steps] == [None, None]
    assert found[1] == late


def test_wait_belongs_to_the_call_of_its_size_and_group():
    step = learned(
        kernel(ALL_GATHER, 60, 10, stream=20, dtype="BFloat16", **GATHER),
        kernel(ALL_GATHER, 80, 10, stream=20, dtype="Float", **GATHER),
    )
    document = alone(*named(ALL_GATHER, 60, 80, 160, 180))
    first, second = (entry.key for entry in overlap_of_device(document, step, 2).collectives)
    waits = {first: [0.0, 0.004], second: [0.001, 0.0]}
    found = overlap_of_device(document, step, 2, waits)
    assert [round(one.collectives["all_gather"].total_ms, 6) for one in found.steps] == [0.019, 0.016]


def routed(*elements: int, asked: str = "all_to_allv"):
    """Return the step of a rank that sends ``elements`` bytes by layer, and where two such steps have their kernels."""
    name, group = "ncclDevKernel_SendRecv", NCCL | {"Collective name": asked, "dtype": "Byte"}
    rows = [60 + 20 * place for place in range(len(elements))]
    sizes = zip(rows, elements, strict=True)
    step = learned(*(kernel(name, row, 10, 20, **group, **{"In msg nelems": count}) for row, count in sizes))
    return step, [row + 100 * number for number in (0, 1) for row in rows]


def uneven(lengths_us, step, rows):
    rows_us = zip(rows, lengths_us, strict=True)
    return alone(*(kernel("ncclDevKernel_SendRecv", row, length, 20) for row, length in rows_us)), step


@pytest.mark.parametrize("asked", ["all_to_allv", "all_gather", "reduce_scatter"])
def test_calls_whose_sizes_differ_by_rank_wait_in_their_order(asked):
    """Route tokens unevenly: the first layer of a rank sends as much as the second layer of its peer."""
    sizes, lengths_us = [(100, 130), (130, 100)], [(5, 12, 5, 12), (5, 12, 5, 15)]
    ranks = [uneven(us, *routed(*each, asked=asked)) for each, us in zip(sizes, lengths_us, strict=True)]
    captures = [overlap_of_device(document, step, 2) for document, step in ranks]
    calls = [capture.collectives for capture in captures]
    waits = [waits_ms(calls, rank) for rank in (0, 1)]
    assert [[[round(ms, 6) for ms in each] for each in rank.values()] for rank in waits] == [
        [[0.0, 0.0, 0.0, 0.0]],
        [[0.0, 0.0, 0.0, 0.003]],
    ]
    clipped = overlap_of_device(*ranks[1], 2, waits[1])
    assert [round(each.comm_ms, 6) for each in clipped.steps] == [0.017, 0.017]
    assert captures[0] == overlap_of_device(*ranks[0], 2, waits[0])


def test_all_to_all_calls_of_a_group_keep_their_order_and_their_mean_size():
    document, step = uneven((5, 12, 6, 13), *routed(100, 130))
    (entry,) = overlap_of_device(document, step, 2).collectives
    assert (entry.num_bytes, entry.ms) == (115, [0.005, 0.012, 0.006, 0.013])


@pytest.mark.parametrize(
    "strange",
    [
        {"dtype": "QInt8"},
        {"dtype": "Float", "Out msg nelems": "many", "In msg nelems": -1},
        # Torch records the size of the rank's own part, which other ranks need not share.
        {"dtype": "Float", "Collective name": "all_gather"},
    ],
)
def test_size_of_a_call_that_is_not_understood_is_unknown(strange):
    step = learned(kernel(ALL_GATHER, 60, 10, stream=20, **GATHER | strange))
    assert overlap_of_device(alone(*named(ALL_GATHER, 60, 160)), step, 2).collectives[0].num_bytes is None


@pytest.mark.parametrize("edges", [(50, 150), (50, 150, 250, 260)])
def test_lost_boundaries_are_an_error(edges):
    with pytest.raises(ValueError, match=f"lost activity: {len(edges)} kernels fill between 2 steps"):
        overlap_of_device(alone(edges=edges), learned(), 2)


def test_workload_that_runs_the_boundarys_kernel_is_an_error():
    message = r"kernel fill separates .*, but the workload runs it too; set profile_steps: 0"
    with pytest.raises(ValueError, match=message):
        learned(kernel("fill", 70, 1))


UNKNOWN = "void vendor::exchange<float>(float*)"


def test_kernel_that_served_a_collective_communicates_under_any_name():
    found = on_device(kernel(UNKNOWN, 80, 10, **GATHER, dtype="Byte"), kernel("gemm", 80, 5))
    assert (found.steps[0].comm_ms, found.steps[0].hidden_comm_ms) == (pytest.approx(0.010), pytest.approx(0.005))
    assert [(each.kind, each.num_bytes, each.ms) for each in found.collectives] == [("all_gather", 2048, [0.010])]
    (family,) = set(found.kernels) - {"gemm"}
    assert family == "exchange[all_gather]"
    assert is_communication(family)


def test_kernel_that_served_a_collective_is_known_in_traces_of_the_device_alone():
    step = learned(*named(UNKNOWN, 60, asked="_allgather_base"))
    # The second stream does not repeat the learned step.
    found = overlap_of_device(alone(*named(UNKNOWN, 60, 160), *named(UNKNOWN, 80, stream=21)), step, 2)
    assert [round(each.comm_ms, 6) for each in found.steps] == [0.020, 0.010]
    assert [set(each.collectives) for each in found.steps] == [{"all_gather", "other"}, {"all_gather"}]


def test_name_that_other_work_has_too_is_not_learned():
    """Keep a kernel as compute that fills a buffer within a collective, and tensors elsewhere."""
    shared = kernel("elementwise", 60, 10, **GATHER), kernel("elementwise", 80, 10)
    assert on_device(*shared).steps[0].comm_ms == 0
    assert overlap_of_device(alone(kernel("elementwise", 60, 10)), learned(*shared), 2).steps[0].comm_ms == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)", "all_reduce"),
        ("void (anonymous namespace)::multimem_one_shot_reduce_kernel<float, 16>(...)", "other"),
        ("void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", "other"),
        ("c10d::nccl_extension::nccl_wait_for_signal_kernel(void**, int, unsigned long)", "other"),
        ("c10d::nvshmem_extension::allToAllV(void*, void*, long*, unsigned long, int)", "all_to_all"),
        ("void c10d::nvshmem_extension::exchangeSplitAndOffset_2d<true>(long*, long*, int, int)", "other"),
        ("void c10d::rocshmem_extension::allToAllVPush(void*, void*, long*, long*, long)", "all_to_all"),
        ("void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)", "other"),
        ("void alltoall_on_stream_kernel<char, (threadgroup_t)2>(int, char*, char const*)", "all_to_all"),
        ("void fcollect_on_stream_kernel<char, (threadgroup_t)2>(int, char*, char const*)", "all_gather"),
        ("nvshmemi_proxy_rma_entrypoint_blocking(rma_verb_t)", "other"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)", "all_reduce"),
        ("void oneShotAllReduceKernel<8u, true>(unsigned long, unsigned long)", "all_reduce"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)", "all_to_all"),
        ("void primus_turbo::deep_ep::internode_ll::combine<true, 8>(void*)", "all_to_all"),
        ("_Z23ncclDevKernel_Generic_424ncclDevKernelArgsStorageILm4096EE", "other"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
        ("mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)", "other"),
        ("void mscclpp::allreduce7<__half>(__half*, unsigned long)", "all_reduce"),
    ],
)
def test_kernels_on_symmetric_memory_and_of_other_libraries_communicate(name, kind):
    found = on_device(kernel(name, 80, 10))
    assert (list(found.steps[0].collectives), found.steps[0].comm_ms) == ([kind], pytest.approx(0.010))
    assert all(map(is_communication, found.kernels))
    (step,) = overlap_of_device(alone(kernel(name, 80, 10), edges=(50, 150)), learned(), 1).steps
    assert list(step.collectives) == [kind]


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_all_reduce_add_3",
        "triton_nccl_all_gather_Kernel",
        "nccl_layout_Kernel_0d1d2d",
        "void all_reduce_softmax<float>(float*)",
        "void c10d::checkForNaN<float>(float*, unsigned long)",
        "void split_with_sizes_copy_out_contiguous_no_cast_kernel<16>(char**, char**)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<Opaque<2u>, 2, 128, 1>(...)",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
        "void copy_kernel<c10d::ReduceOp>(float*)",
    ],
)
def test_kernels_that_only_sound_like_communication_compute(name):
    found = on_device(kernel(name, 80, 10))
    assert (found.steps[0].comm_ms, found.steps[0].compute_ms) == (0, pytest.approx(0.011))
    assert not any(map(is_communication, found.kernels))


COPIES = {"Memcpy HtoD (Pinned -> Device)": "gpu_memcpy", "Memset (Device)": "gpu_memset"}
# NCCL's note of a collective is no work.
NOTE = "nccl:_all_gather_base"
DEVICE = st.lists(
    st.tuples(
        st.sampled_from(["gemm", "attention", ALL_GATHER, REDUCE_SCATTER, *COPIES, GENERIC, NOTE]),
        st.integers(0, 300),
        st.integers(0, 90),
        st.integers(0, 3),
    ),
    max_size=25,
)


@given(DEVICE)
def test_lengths_of_any_kernels_on_any_streams_are_those_of_single_moments(kernels):
    """Compare with sets of moments of one microsecond; a kernel may be empty or cross the steps' boundaries."""
    lanes = {"gemm": "compute", "attention": "compute", ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter"}
    lanes |= dict.fromkeys(COPIES, "copy") | {GENERIC: "other", NOTE: "note"}
    moments = {lane: set() for lane in lanes.values()}
    moments["compute"] |= {50, 150, 250}
    events = []
    for name, begin, duration, stream in kernels:
        category = (COPIES | {NOTE: "gpu_user_annotation"}).get(name, "kernel")
        events.append(event(category, name, begin, duration, stream, stream=stream))
        moments[lanes[name]] |= set(range(begin, begin + duration))
    for number, step in enumerate(overlap_of_device(alone(*events), learned(), 2).steps):
        inside = set(range(50 + 100 * number, 150 + 100 * number))
        kinds = {kind: moments[kind] & inside for kind in ("all_gather", "reduce_scatter", "other")}
        communication, compute = set().union(*kinds.values()), moments["compute"] & inside
        assert [round(1000 * ms) for ms in (step.comm_ms, step.hidden_comm_ms, step.compute_ms, step.copy_ms)] == [
            len(part) for part in (communication, communication & compute, compute, moments["copy"] & inside)
        ]
        assert round(1000 * step.idle_ms) == len(inside - communication - compute - moments["copy"])
        assert {kind: round(1000 * time.hidden_ms) for kind, time in step.collectives.items()} == {
            kind: len(part & compute) for kind, part in kinds.items() if part
        }
        assert broken_rule(step) is None


def test_repeated_events_count_once_in_every_length():
    rows = kernel("gemm", 60, 40), kernel(ALL_GATHER, 80, 40, stream=20)
    assert on_device(*rows, *rows).steps == on_device(*rows).steps


def test_boundary_is_never_another_kernel_without_a_correlation():
    """Kernels of a replayed graph, and calls of some runtimes, have no correlation."""
    first = boundary(0, 1, 50)
    first[1]["args"] = {}
    with pytest.raises(ValueError, match="did not record the device"):
        overlap_with_host(trace(first[:2], kernel("gemm", 60, 40), boundary(30, 2, 150)))
