"""Searches over packages with real launches on a CPU rank: does ``aorta bisect --over packages`` name the right set?

Run: python -m benchmarks.verdict.environments [--repositories 20] [--packages 12] [--seed 1] [--out DIR]
Each repository has two environments, in which every package has another version. The weights differ if one package is
new, or two together (every second repository); of every third repository, a package needs another one, of every fourth,
a package does not start without another new one. A row tells the packages that were planted and named, and the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import msgspec

from tests.unit.wheels import make_wheel

SCRIPT = """
import importlib
import torch

torch.manual_seed(0)
scale = max(getattr(importlib.import_module(name), "SCALE", 1.0) for name in {names!r})
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * scale)
for step in range(8):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
"""
TEST = """
import pytest

@pytest.mark.world(size=1, device="cpu")
@pytest.mark.tolerance(weight_hash="exact")
def test_weights(workload):
    workload.check(workload.run_script("train.py", record={"hash_weights": True, "deterministic": True}))
"""
_NEEDS_NEW = "import {0}\nassert {0}.VERSION == '2.0', '{0} is too old'\n"


def make_repository(folder: Path, number: int, packages: int, draws: random.Random) -> tuple[list[str], list[str]]:
    """Make the environments and the test; return the two sides and the packages that carry the change."""
    names = [f"p{each:02}" for each in range(packages)]
    carriers = sorted(draws.sample(names, 1 + number % 2))
    one, other, first, second = draws.sample([name for name in names if name not in carriers], 4)
    scale = "".join(f"import {name}\n" for name in carriers[1:]) + "SCALE = 2.0"
    scale += "".join(f" if {name}.VERSION == '2.0' else 1.0" for name in carriers[1:])
    texts = {carriers[0]: scale} | ({one: _NEEDS_NEW.format(other)} if number % 4 == 3 else {})
    folder.mkdir(parents=True)
    (folder / "needed").symlink_to(Path(msgspec.__file__).parents[1])
    for version in ("1.0", "2.0"):
        prefix, is_new = folder / version, version == "2.0"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
        [installed] = prefix.glob("lib/python*/site-packages")
        (installed / "base.pth").write_text(str(folder / "needed"), encoding="utf-8")
        for name in names:
            needs = [f"{second}>={version}"] if number % 3 == 2 and name == first else []
            text = texts.get(name, "") if is_new else ""
            with zipfile.ZipFile(make_wheel(folder / "wheels", name, version, text, needs)) as wheel:
                wheel.extractall(installed)
    (folder / "train.py").write_text(SCRIPT.format(names=names), encoding="utf-8")
    (folder / "test_train.py").write_text(TEST, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return [f"python:{folder}/{version}/bin/python" for version in ("1.0", "2.0")], carriers


def search(folder: Path, sides: list[str], carriers: list[str]) -> str:
    """Search the repository, print a row of the table, and return the outcome."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "AORTA_LEASE_DIR": str(folder / "leases")}
    environ |= {"XDG_CACHE_HOME": str(folder.parent / f"{folder.name}-cache")}
    test = ["test_train.py::test_weights", "--aorta-launcher=forkserver"]
    words = [*sides, "--over=packages", "--result=found.json", "--", *test]
    command = [sys.executable, "-m", "pytest_aorta.cli", "bisect", *words]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    (folder / "bisect.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    file = folder / "found.json"
    found = json.loads(file.read_text(encoding="utf-8"))["changes"] if file.exists() else []
    named = [change.partition(" ")[0] for change in found]
    outcome = "none named" if not named else "right" if named == carriers else "wrong"
    took = time.monotonic() - began
    print(f"| {folder.name} | {' '.join(carriers)} | {' '.join(named)} | {outcome} | {took:.0f} s |", flush=True)
    return outcome


def main() -> int:
    """Make and search the repositories; return 1 if fewer than 19 of 20 searches were right, or one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=int, default=20)
    parser.add_argument("--packages", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="aorta-environments-"))
    draws, outcomes = random.Random(given.seed), []
    print(f"logs in {out}", flush=True)
    for number in range(given.repositories):
        folder = out / f"repository-{number}"
        outcomes.append(search(folder, *make_repository(folder, number, given.packages, draws)))
    right, wrong = outcomes.count("right"), outcomes.count("wrong")
    print(f"{right} of {len(outcomes)} right, {wrong} wrong, {outcomes.count('none named')} none named")
    return 0 if 20 * right >= 19 * len(outcomes) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
