"""The share of counting costs in a launch's wall time: launches with and without the count, in turn.

Run: WALL_PAIRS=8 python -m pytest benchmarks/verdict/costs_wall.py -s --aorta-launcher=forkserver
A ``sitecustomize`` in the search path of the ranks switches the count off while a file exists. The first pair of each
program, which starts the fork server, is left out. A warm launch imports no torch, which a cold one does in both sides.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import pytest

from benchmarks.verdict.costs_repeat import HEAD, SCRIPTS
from pytest_aorta import WorkloadRunner

PAIRS = int(os.environ.get("WALL_PAIRS", "8"))
WORKLOADS = ("ddp_overlap", "llama_fsdp2")
ALLOWED = 0.1
_NO_COUNT = """
import os
from pytest_aorta.worker import overlap, profiling
is_free, counted = profiling.ScriptProfiler.is_free, overlap._counted
def is_on(self):
    self.problem = self.problem or "switched off" * os.path.exists({off!r})
    return is_free(self)
def counted_if_on(step, device):
    if os.path.exists({off!r}):
        raise overlap._OwnProfilerError("switched off")
    return counted(step, device)
profiling.ScriptProfiler.is_free, overlap._counted = is_on, counted_if_on
"""


@pytest.mark.world(size=2, device="cpu", warm=True)
@pytest.mark.launch_timeout(280)
@pytest.mark.parametrize("name", [*WORKLOADS, "FSDP2 by hand", "DDP, loader"])
def test_wall_share(workload: WorkloadRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Launch each pair in alternating order, and print the median of the shares with their range."""
    script = tmp_path / "train.py"
    script.write_text(HEAD + SCRIPTS.get(name, ""), encoding="utf-8")
    off = tmp_path / "off"
    (tmp_path / "sitecustomize.py").write_text(_NO_COUNT.format(off=str(off)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def wall_s(*, counted: bool) -> float:
        off.unlink(missing_ok=True) if counted else off.touch()
        began = time.perf_counter()
        result = workload.run(name, profile_steps=0) if name in WORKLOADS else workload.run_script(str(script))
        took = time.perf_counter() - began
        assert all(bool(group.costs.problem) is not counted for group in result.facts.costs)
        return took

    shares, plain = [], []
    for number in range(PAIRS + 1):
        order = (True, False) if number % 2 else (False, True)
        took = {counted: wall_s(counted=counted) for counted in order}
        shares.append(took[True] / took[False] - 1)
        plain.append(took[False])
    shares, plain = shares[1:], plain[1:]
    spread = f"{min(shares):+.1%} to {max(shares):+.1%}"
    print(f"\n{name}: {PAIRS} pairs of {median(plain):.2f} s: {median(shares):+.1%} ({spread}); allowed {ALLOWED:.0%}")
    assert median(shares) <= ALLOWED
