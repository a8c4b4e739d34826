"""Records launches of unchanged code on CPU ranks, to be compared with each other.

Run: RECORD_OUT=DIR RECORD_LIMIT_S=3600 python -m pytest benchmarks/verdict/unchanged.py --aorta-launcher=forkserver
Each stretch launches one workload or script again and again on 2 warm ranks; every second stretch runs beside a process
that keeps a core busy. Each launch is appended to DIR/unchanged.jsonl, so a run can be stopped at any moment.
"""

from __future__ import annotations

import json
import os
import time
from itertools import count
from pathlib import Path

import pytest

from benchmarks.verdict.costs_repeat import HEAD, SCRIPTS, load
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.facts import launch_facts
from pytest_aorta.session.launcher import DistributedWorld

FILE = "unchanged.jsonl"
STRETCH = int(os.environ.get("RECORD_STRETCH", "24"))
# A 99th percentile needs 100 steps.
STEPS = 110
WORKLOADS = {
    "copy_compute": {"steps": STEPS, "gemms": 2, "copy_mb": 0.5},
    "ddp_overlap": {"steps": 30, "n_layers": 1, "num_tables": 2, "batch_size": 16},
    "fsdp": {"steps": STEPS, "verify": 0, "layers": 2},
    "llama_fsdp2": {"steps": 20, "n_layers": 1},
    "ranking": {"steps": 20, "n_layers": 1, "num_tables": 2, "batch_size": 16},
}
_SCRIPTS = {
    "FSDP2 by hand": SCRIPTS["FSDP2 by hand"].replace("range(8)", f"range({STEPS})"),
    "DDP, loader": SCRIPTS["DDP, loader"].replace("randn(128", f"randn({16 * STEPS}"),
    "GAN": SCRIPTS["GAN"].replace("range(8)", f"range({STEPS})"),
}


@pytest.mark.world(size=2, device="cpu", warm=True)
@pytest.mark.launch_timeout(120)
def test_record(distributed_world: DistributedWorld, tmp_path: Path) -> None:
    """Launch stretch by stretch until the time is over."""
    out, ends_s = Path(os.environ.get("RECORD_OUT", ".")) / FILE, time.monotonic() + _limit_s()
    for stretch in count():
        name = [*WORKLOADS, *_SCRIPTS][stretch // 2 % (len(WORKLOADS) + len(_SCRIPTS))]
        busy = stretch % 2
        with load(busy), out.open("a", encoding="utf-8") as file:
            for _ in range(STRETCH):
                if time.monotonic() > ends_s:
                    return
                try:
                    line = _launch(distributed_world, name, tmp_path)
                except LaunchError as error:
                    print(f"{name}: {error}")
                    continue
                print(json.dumps({"case": name, "busy": busy} | line), file=file, flush=True)


def _limit_s() -> float:
    return float(os.environ.get("RECORD_LIMIT_S", "60"))


def _launch(world: DistributedWorld, name: str, folder: Path) -> dict[str, object]:
    """Launch once and return the platform and the facts of the launch."""
    if name in WORKLOADS:
        result = world.launch(name, **WORKLOADS[name])
    else:
        script = folder / "train.py"
        script.write_text(HEAD + _SCRIPTS[name], encoding="utf-8")
        result = world.launch_script(script)
    return {"platform": world.platform, "facts": to_builtins(launch_facts(result))}
