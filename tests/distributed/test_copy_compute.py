"""Copies beside matrix products on a CPU rank, alone in its world."""

import pytest

pytestmark = [pytest.mark.world(size=1, device="cpu", warm=True), pytest.mark.launch_timeout(120)]

SMALL = {"steps": 4, "warmup": 1, "matrix_size": 64, "gemms": 5, "copy_mb": 0.5}


def test_each_variant_is_timed_and_variables_are_set_before_the_rank_starts(workload):
    result = workload.run("copy_compute", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, **SMALL)
    assert result.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    times = {name: result.rank_metrics[f"time_{name}_ms"][0] for name in ("serial", "overlapped", "compute", "copy")}
    assert all(time_ms > 0 for time_ms in times.values())
    assert result.rank_metrics["overlap_saving"][0] == pytest.approx(1 - times["overlapped"] / times["serial"])
    assert times["overlapped"] == pytest.approx(sum(result.rank_step_times_ms[0]) / 4)
    assert result.rank_metrics["copy_bytes_per_step"] == [3 * 2**19]
    tflops = 5 * 2 * 64**3 / times["compute"] / 1e9
    assert result.rank_metrics["gemm_throughput_tflops"][0] == pytest.approx(tflops)
