"""Three commands, the first an installation, bring a script under test that was never written for the plugin."""

import subprocess
from pathlib import Path

import pytest

from tests.distributed.processes import own_environ
from tests.unit.builders import each_of, run_python

# As in PyTorch's tutorials: nothing in it mentions the plugin.
STRANGER = """
import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from model import SIZE, make_model

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    data = TensorDataset(torch.randn(256, SIZE), torch.randn(256, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
MODEL = """
import torch

SIZE = 16

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, 1))
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", *command, cwd=folder, env=own_environ(folder.with_name("leases")), timeout=540)


# As in the tutorial on fault tolerance: the script goes on with what the last run has left, and draws without a seed.
RESUMED = (
    STRANGER.replace("    torch.manual_seed(0)\n    torch.use_deterministic_algorithms(True)\n", "")
    .replace(
        "    for epoch in range(arguments.epochs):",
        """    begin = 0
    if os.path.exists("snapshot.pt"):
        begin = torch.load("snapshot.pt")
    for epoch in range(begin, arguments.epochs):""",
    )
    .replace(
        "        if dist.get_rank() == 0:",
        """        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(epoch + 1, "snapshot.pt")""",
    )
)


@pytest.mark.extended
@each_of(
    "script, epochs, options, said",
    {
        "seeded": (
            STRANGER,
            3,
            (),
            ("arranged otherwise, the script computes the same: the same 16 samples in another arrangement",),
        ),
        # Neither weights nor the optimizer's state are loaded, so the test of a restart fails.
        "resuming and without a seed": (
            RESUMED,
            2,
            ("-k", "not restart"),
            ("snapshot.pt, which the script writes", "the recorder sets seeds", "the test fails: restarted after step"),
        ),
    },
)
def test_script_is_under_test_after_two_commands_and_a_change_fails(stranger, script, epochs, options, said):
    (stranger / "train.py").write_text(script.replace("LEARNING_RATE", "1e-2"))
    begun = run(stranger, "pytest_aorta.cli", "init", "train.py", "--", f"--epochs={epochs}", "--batch-size=8")
    assert begun.returncode == 0, begun.stderr
    assert [text for text in said if text not in begun.stdout] == []
    recorded = run(stranger, "pytest", "--update-baselines", "--aorta-launches=3", *options)
    assert recorded.returncode == 0, recorded.stdout
    passed = run(stranger, "pytest", *options)
    assert passed.returncode == 0, passed.stdout
    (stranger / "train.py").write_text(script.replace("LEARNING_RATE", "1.1e-2"))
    failed = run(stranger, "pytest", *options)
    assert failed.returncode == 1
    assert "Regression: weight_hash" in failed.stdout


# Its loss has no gradient, so the weights of a run are those of the snapshot, or else drawn without a seed.
UNLEARNABLE = (
    RESUMED.replace(
        "torch.nn.functional.mse_loss(model(inputs), targets)",
        "torch.nn.functional.cross_entropy(model(inputs), torch.ones_like(targets))",
    )
    .replace('begin = torch.load("snapshot.pt")', 'model.load_state_dict(torch.load("snapshot.pt"))')
    .replace('torch.save(epoch + 1, "snapshot.pt")', 'torch.save(model.state_dict(), "snapshot.pt")')
)


@pytest.mark.extended
def test_snapshot_that_every_launch_after_the_first_loads_is_no_part_of_the_baseline(stranger):
    (stranger / "train.py").write_text(UNLEARNABLE.replace("LEARNING_RATE", "1e-2"))
    # The optimizer's state is not saved, so the test of a restart fails.
    comparing = ("pytest", "-k", "not restart")
    for command in (("pytest_aorta.cli", "init", "train.py"), (*comparing, "--update-baselines"), comparing):
        (done := run(stranger, *command)).check_returncode()
        if "init" in command:
            assert "without snapshot.pt, which the script writes" in done.stdout
            assert "left files in this folder: snapshot.pt" in done.stdout
            (stranger / "snapshot.pt").unlink()  # as in a clean clone
