"""Each knob of docs/tuning.md whose effect needs GPUs, by its effect on profiled steps."""

from statistics import fmean

import pytest

from pytest_aorta import ComparisonFailed, WorkloadRunner
from pytest_aorta.common.errors import LaunchError

pytestmark = [
    pytest.mark.overlap,
    pytest.mark.world(size="all", device="cuda", warm=True, simulated=False),
    pytest.mark.launch_timeout(300),
]


def collective_ms(result, kind):
    """Return the mean time of one kind of collective over profiled steps, of the rank with the shortest time."""
    return fmean(min(step.collectives[kind].total_ms for step in ranks) for ranks in zip(*result.overlap, strict=True))


def hidden_share(result):
    return fmean(result.rank_metrics["overlap_ratio"])


@pytest.fixture
def ranking(workload, config_of):
    """Return a function that runs `ranking` with some keys changed, for its profiled steps."""
    short = {"n_layers": 3, "steps": 5, "profile_steps": 4}
    return lambda **changes: workload.run("ranking", **config_of("ranking") | short | changes)


@pytest.mark.timed
def test_what_is_not_resharded_is_gathered_once_and_wider_dtypes_communicate_longer(ranking):
    plain, once, wide = ranking(), ranking(reshard_after_forward=False), ranking(reduce_dtype="float32")
    assert collective_ms(once, "all_gather") < 0.7 * collective_ms(plain, "all_gather")
    assert collective_ms(wide, "reduce_scatter") > 1.4 * collective_ms(plain, "reduce_scatter")


@pytest.mark.timed
def test_larger_batches_and_more_of_them_leave_less_exposed_a_sample(ranking):
    """Compare exposed time per sample: communication is constant, and more compute hides it."""
    small, large = ranking(batch_size=64), ranking(batch_size=512)
    accumulated = ranking(batch_size=64, gradient_accumulation=4)
    assert hidden_share(large) > hidden_share(small)
    # Gradients are reduced only in the last micro-batch.
    assert collective_ms(accumulated, "reduce_scatter") < 2 * collective_ms(small, "reduce_scatter")


def test_steps_in_line_and_beside_compute_have_the_same_bits(workload: WorkloadRunner, config_of):
    small = {"dim": 256, "ffn_hidden": 512, "n_heads": 4, "n_layers": 3, "steps": 5, "warmup": 0, "hash_every": 1}
    exact = {"deterministic": True, "profile_steps": 0, "rows_per_table": 100}
    beside = workload.run("ranking", **config_of("ranking") | small | exact)
    in_line = workload.run("ranking", **config_of("ranking") | small | exact | {"one_stream": True})
    assert in_line.weight_hashes == beside.weight_hashes
    config = config_of("ddp") | small | exact | {"bucket_cap_mb": 1, "overlap_reduce_scatter": True}
    hooked = workload.run("ddp_overlap", **config)
    late = workload.run("ddp_overlap", **config | {"enable_overlap": False, "gradient_as_bucket_view": False})
    assert late.weight_hashes == hooked.weight_hashes
    assert hooked.rank_metrics["all_reduces_per_step"][0] > 2


@pytest.mark.timed
@pytest.mark.tolerance(overlap_ratio="5 points")
def test_one_hardware_queue_loses_overlap(workload: WorkloadRunner, config_of):
    """Start the kernels of all streams in the order in which the host enqueued them."""
    variant = {"workload": "ddp_overlap", **config_of("ddp"), "steps": 5, "profile_steps": 4}
    one = variant | {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    with pytest.raises(ComparisonFailed) as regression:
        workload.compare(one, variant, metrics=["overlap_ratio"])
    assert set(regression.value.metrics) == {"overlap_ratio"}


@pytest.mark.timed
@pytest.mark.world(size=1, device="cuda", warm=True, simulated=False)
@pytest.mark.parametrize("kind", ["h2d", "d2h"])
def test_copies_between_host_and_device_are_hidden_on_streams_of_their_own(workload: WorkloadRunner, config_of, kind):
    config = config_of("copy") | {"steps": 20, "copy_kind": kind}
    beside, in_line = (workload.run("copy_compute", overlap=overlap, **config) for overlap in (True, False))
    assert min(beside.rank_metrics["overlap_saving"]) > 0.1
    assert max(map(abs, in_line.rank_metrics["overlap_saving"])) < 0.05


@pytest.mark.world(size=1, device="cuda", warm=True, simulated=False)
def test_priority_that_the_device_lacks_is_reported(workload: WorkloadRunner, config_of):
    with pytest.raises(LaunchError, match=r"priority is -99; allowed on this device is -\d+ to 0"):
        workload.run("copy_compute", **config_of("copy") | {"priority": -99})
