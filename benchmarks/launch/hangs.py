"""Counts the launches of sound scripts that hang where gloo can deadlock; none may hang.

Run: python -m benchmarks.launch.hangs [--script NAME] [--launcher NAME] [--launches N] [--busy N]

If the last reference to a process group goes before the rank has left, the main thread holds the GIL while it joins
gloo's thread, and that thread needs the GIL to free the last collective.

- ``global``: a ``DistributedDataParallel`` in a global of the script holds the last reference;
- ``local``: it is a local of ``main()``, which has destroyed the group and whose steps end with broadcasts;
- ``again``: the script makes its process group three times, which then can read the old addresses in the store.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from pytest_aorta.launch.launchers import Launchers
from pytest_aorta.plan.launch_plan import LaunchPlan, StepRecording
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.reading import collect_result

NUM_RANKS = 2
# A launch takes a few seconds beside the busy processes; a hanging launch takes all of this time.
LAUNCH_LIMIT_S = 60.0
PASSED = "passed"
TRAIN = """
import torch
import torch.distributed as dist

def train():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(24):
        model.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        for owner, parameter in enumerate(model.parameters()):
            parameter.data.add_(parameter.grad, alpha=-0.001)
            dist.broadcast(parameter.data, src=owner)
    return model
"""
SCRIPTS = {
    "global": f"{TRAIN}\nmodel = train()",
    "local": f"{TRAIN}\ndef main():\n    model = train()\n    dist.destroy_process_group()\n\nmain()",
    "again": f"{TRAIN}\nfor _ in range(3):\n    train()\n    dist.destroy_process_group()",
}


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run ``number`` processes that never sleep."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def launch(servers: Launchers, script: Path, number: int, launcher: LauncherKind) -> str:
    """Launch the script and read its result; return ``passed`` or the class of the failure."""
    plan = LaunchPlan(
        name=script.name,
        spec=None,
        config={},
        script=str(script),
        args=(),
        world=World(NUM_RANKS, "cpu"),
        timeout_s=LAUNCH_LIMIT_S,
        run_dir=script.parent / str(number),
        cwd=script.parent,
        launcher=launcher,
        record=StepRecording(hash_weights=True),
    )
    outcome = servers.launch(plan)
    if outcome.launcher != launcher:
        return f"launched by {outcome.launcher}"
    if failure := launch_failure(plan, outcome):
        return failure.kind
    collect_result(plan, outcome)
    return PASSED


def main() -> None:
    """Print the launches by outcome and their wall times; return 1 if one did not pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", choices=SCRIPTS, default="local")
    parser.add_argument(
        "--launcher",
        type=LauncherKind,
        choices=[LauncherKind.TORCHRUN, LauncherKind.FORKSERVER],
        default=LauncherKind.FORKSERVER,
    )
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside the launches")
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    walls_s = []
    with tempfile.TemporaryDirectory(prefix="aorta-hangs-") as scratch, closing(Launchers()) as servers:
        script = Path(scratch, "train.py")
        script.write_text(SCRIPTS[given.script], encoding="utf-8")
        with busy_processes(given.busy):
            for number in range(given.launches):
                began_s = time.monotonic()
                outcomes[launch(servers, script, number, given.launcher)] += 1
                walls_s.append(time.monotonic() - began_s)
    beside = f"{given.script}: {given.launches} launches by {given.launcher} beside {given.busy} busy processes"
    print(f"{beside}: {dict(outcomes.most_common())}")
    print(f"wall time of a launch: p50 {median(walls_s):.2f} s, longest {max(walls_s):.2f} s")
    sys.exit(set(outcomes) != {PASSED})


if __name__ == "__main__":
    main()
