"""A launch under torch's profiler: traces beside the results, and a result like that of any other launch."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

from pytest_aorta.devices import World
from pytest_aorta.launch import launch
from pytest_aorta.plan import LaunchPlan
from pytest_aorta.spec import find_workload, resolve_config
from pytest_aorta.validation import collect_result


def test_launch_that_profiles_nothing_by_itself_leaves_traces_and_no_overlap(tmp_path: Path):
    spec = find_workload("fsdp", [])
    config = {"steps": 3, "warmup": 1, "verify": 1, "layers": 1, "profile_steps": 0}
    plan = LaunchPlan(
        name="fsdp",
        spec=spec,
        config=resolve_config(spec, config),
        script=None,
        args=(),
        world=World(2, "cpu"),
        timeout_s=90.0,
        run_dir=tmp_path / "run",
        cwd=tmp_path,
    )
    plan = replace(plan, profiler="torch")
    result = collect_result(plan, launch(plan))
    assert (result.profiler, result.overlap, result.total_iterations) == ("torch", [], 3)
    assert not {"overlap_ratio", "exposed_comm_ms"} & set(result.metrics)
    for rank in ("0", "1"):
        trace = json.loads(gzip.decompress((plan.run_dir / "ranks" / rank / "trace.json.gz").read_bytes()))
        assert any("allgather" in event.get("name", "") for event in trace["traceEvents"])
