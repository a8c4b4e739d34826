"""Bisections of real launches on CPU ranks: does ``aorta bisect`` name the commit that made a step slower?

Run: python -m benchmarks.verdict.bisections [--repositories 10] [--commits 8] [--slower 0.05] [--metric NAME]
    [--at-once 1] [--out DIR]
Each repository has a script whose step multiplies matrices for about 70 ms on 2 warm ranks; one commit, chosen by the
seed, multiplies them more often. A search follows the metric that changed most clearly, or the given one. A row tells
the commit that was planted, the one that was named, by which metric, and the time.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pytest_aorta.plan.workloads import pinned_cpu_kernels

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from pytest_aorta.worker import recorder
from settings import PRODUCTS

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
matrix = torch.randn(128, 128)
recorder.start(warmup=2)
for step in range(26):
    with recorder.step():
        for _ in range(PRODUCTS):
            matrix @ matrix
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
TEST = """
import pytest

@pytest.mark.launch_timeout(240)
@pytest.mark.world(size=2, device="cpu", warm=True)
@pytest.mark.tolerance({metric}="2%")
def test_speed(workload):
    workload.check(workload.run_script("train.py"))
"""
STEP_S = 0.07


def products_of_a_step() -> int:
    """Return how many products take the time of a step on this machine, beside as many ranks as a launch has."""
    program = (
        "import time, torch; torch.set_num_threads(1); m = torch.randn(128, 128)\n"
        "for _ in range(300): m @ m\n"
        "b = time.perf_counter()\n"
        "for _ in range(1000): m @ m\n"
        "print((time.perf_counter() - b) / 1000)"
    )
    # Ranks of a script with the recorder run with these variables, which slow products down.
    environ, command = os.environ | pinned_cpu_kernels(), [sys.executable, "-c", program]
    ranks = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return round(STEP_S / max(float(rank.communicate()[0]) for rank in ranks))


def git(folder: Path, *words: str) -> str:
    """Run git in ``folder`` and return its output."""
    identity = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_repository(
    folder: Path, commits: int, planted: int, products: int, slower: float, metric: str | None
) -> list[str]:
    """Make the repository and return its commits, the oldest first."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    for number in range(commits + 1):
        count = round(products * (1 + slower)) if number >= planted else products
        (folder / "settings.py").write_text(f"PRODUCTS = {count}  # {number}\n", encoding="utf-8")
        git(folder, "add", "train.py", "settings.py")
        git(folder, "commit", "-qm", f"change {number}")
    (folder / "test_train.py").write_text(TEST.format(metric=metric or "step_time_p50"), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return git(folder, "rev-list", "--reverse", "HEAD").splitlines()


def search(folder: Path, commits: list[str], planted: int, metric: str | None) -> tuple[str, str]:
    """Bisect the repository; return the outcome, and a row of the table."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "AORTA_LEASE_DIR": str(folder / "leases"), "OMP_NUM_THREADS": "1"}
    environ |= {"XDG_CACHE_HOME": str(folder.parent / f"{folder.name}-cache")}
    command = [sys.executable, "-m", "pytest_aorta.cli", "bisect", commits[0], commits[-1]]
    command += [f"--metric={metric}"] if metric else []
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--", "test_train.py::test_speed"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "bisect.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    found = re.search(r": found: \w+ change (\d+)\nE\s+\w+: (\w+)", done.stdout)
    named = int(found[1]) if found else None
    outcome = "none named" if done.returncode else "right" if named == planted else "wrong"
    took = time.monotonic() - began
    return outcome, f"| {folder.name} | {planted} | {named} | {outcome} | {found[2] if found else ''} | {took:.0f} s |"


def main() -> int:
    """Make and search the repositories; return 1 if fewer than nine of ten searches were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=int, default=10)
    parser.add_argument("--commits", type=int, default=8)
    parser.add_argument("--slower", type=float, default=0.05)
    parser.add_argument("--metric", help="metric that is compared with a tolerance of 2%% and searched")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="aorta-bisections-"))
    draws, products = random.Random(given.seed), products_of_a_step()
    print(f"{products} products a step, {given.slower:+.0%} planted, logs in {out}", flush=True)
    places = [draws.randint(1, given.commits) for _ in range(given.repositories)]

    def run(number: int) -> str:
        folder = out / f"repository-{number}"
        commits = make_repository(folder, given.commits, places[number], products, given.slower, given.metric)
        outcome, row = search(folder, commits, places[number], given.metric)
        print(row, flush=True)
        return outcome

    with ThreadPoolExecutor(given.at_once) as pool:
        outcomes = list(pool.map(run, range(given.repositories)))
    right = outcomes.count("right")
    print(
        f"{right} of {len(outcomes)} right, {outcomes.count('wrong')} wrong, {outcomes.count('none named')} none named"
    )
    return 0 if 10 * right >= 9 * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
