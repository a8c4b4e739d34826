"""Time of many short tests of two ranks: by ``run_function``, and by the classes of torch and DeepSpeed, in turn.

Run: python -m benchmarks.launch.functions [--tests N] [--theirs N] [--deepspeed CHECKOUT/tests]
torch's class needs the package expecttest, DeepSpeed's a checkout of its repository beside the package deepspeed. Each
test joins a process group and makes one all-reduce on CPU ranks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = """
import pytest, torch
import torch.distributed as dist

def reduced(number):
    tensor = torch.full((4,), float(number + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.tolist()

@pytest.mark.world(size=2, device="cpu")
@pytest.mark.parametrize("number", range({tests}))
def test_reduced(distributed_world, number):
    assert distributed_world.run_function(reduced, number) == [[2.0 * number + 1] * 4] * 2
"""
THEIRS = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestReduced(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def reduced(self, number):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.full((4,), float(number + self.rank))
        dist.all_reduce(tensor)
        self.assertEqual(tensor.tolist(), [2.0 * number + 1] * 4)
        dist.destroy_process_group()

for number in range({tests}):
    setattr(TestReduced, f"test_{{number}}", lambda self, number=number: self.reduced(number))
"""
OF_DEEPSPEED = """
import pytest, torch
import torch.distributed as dist
from unit.common import DistributedTest

class TestReduced(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("number", range({tests}))
    def test_reduced(self, number):
        tensor = torch.full((4,), float(number + dist.get_rank()))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * number + 1] * 4
"""
# As the conftest.py of DeepSpeed's tests does: an instance of the class runs the test on each rank.
CONFTEST = """
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = bool
"""


def seconds(source: str, tests: int, folder: Path, search: str) -> float:
    """Return the wall time of a run of pytest on a file of tests, which have to pass."""
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_many.py").write_text(source.format(tests=tests), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    # DeepSpeed takes the number of CPU ranks from LOCAL_SIZE, and 1 without it.
    environ = os.environ | {"PYTHONPATH": search, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    wall_s = time.monotonic() - began_s
    if done.returncode or f"{tests} passed" not in done.stdout:
        raise SystemExit(done.stdout + done.stderr)
    return wall_s


def main() -> None:
    """Print the wall time of the runs, and the seconds of a test."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", type=int, default=200, help="tests by run_function")
    parser.add_argument("--theirs", type=int, default=20, help="tests by each other class")
    parser.add_argument("--deepspeed", type=Path, help="the folder tests of DeepSpeed, which has unit/common.py")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [("run_function", OURS, given.tests), ("MultiProcessTestCase", THEIRS, given.theirs)]
        if given.deepspeed is not None:
            runs.append(("DistributedTest", OF_DEEPSPEED, given.theirs))
        search = os.pathsep.join([str(Path(__file__).parents[2]), *([str(given.deepspeed)] if given.deepspeed else [])])
        for name, source, tests in runs:
            wall_s = seconds(source, tests, Path(folder, name), search)
            print(f"{name}: {tests} tests in {wall_s:.1f} s, {wall_s / tests:.2f} s each", flush=True)


if __name__ == "__main__":
    main()
