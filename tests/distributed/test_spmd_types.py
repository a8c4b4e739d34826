"""A script that starts the checker of spmd_types in a simulated world: its errors fail the test at their line."""

import pytest

from pytest_aorta import LaunchError

pytestmark = [pytest.mark.extended, pytest.mark.world(size=8, simulated=True)]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import spmd_types as spmd
import spmd_types.checker

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))
data, tensor = mesh["data"].get_group(), mesh["tensor"].get_group()
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(8):
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck("permissive"):
        part = weight * 2
        spmd.assert_type(part, {data: spmd.R, tensor: spmd.P})
        whole = spmd.all_reduce(part, tensor, src=spmd.P, dst=spmd.R)
        loss = (part * part if "wrong" in sys.argv else whole * whole).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_types_of_a_script_are_checked_without_its_ranks(workload, tmp_path):
    pytest.importorskip("spmd_types")
    (script := tmp_path / "typed.py").write_text(SCRIPT)
    workload.run_script(script)
    with pytest.raises(LaunchError, match=r"(?s)SpmdTypeError: Partial in multiple factors.*typed.py\", line 18"):
        workload.run_script(script, ["wrong"])
