"""A process killed while it saves a checkpoint: the folder holds all of it, or is refused."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from aorta_workloads import checkpoint
from aorta_workloads.common.adamw import make_adamw
from aorta_workloads.common.rules import check_rules, checkpoint_rules
from torch import nn

from tests.unit.builders import run_python

EVENLY, LAST = 12, 70
REFUSED = "it holds no complete checkpoint, since the file .metadata is missing"


def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    return model, make_adamw(model, 0.1, (0.9, 0.99), 0.0)


def save_until(folder, last_call):
    """Save in a child, killed at a C call counted from that which makes the folder; return its number of calls."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        count = 0

        def counted(_frame, event, function):
            nonlocal count
            if event == "c_call":
                count += count > 0 or function is os.mkdir
            if count == last_call:
                os.kill(os.getpid(), signal.SIGKILL)

        model = build(0)
        sys.setprofile(counted)
        with checkpoint.saving(folder, lambda: checkpoint.state_of(*model)):
            pass
        sys.setprofile(None)
        os.write(writer, str(count).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as made:
        calls = made.read()
    os.waitpid(child, 0)
    return int(calls or 0)


def try_all_moments(folder):
    """Print, for each moment of the kill, why the checkpoint is refused, or that it is complete."""
    torch.set_num_threads(1)
    saved = build(0)[0].state_dict()
    calls = save_until(f"{folder}/whole", -1)
    # The rename that completes the checkpoint is among the last calls.
    moments = [*range(1, calls - LAST, (calls - LAST) // EVENLY), *range(calls - LAST, calls + 1, 8)]
    for moment in moments:
        torn = f"{folder}/{moment}"
        save_until(torn, moment)
        try:
            check_rules(checkpoint_rules(None, torn), {"save_checkpoint": None, "load_checkpoint": torn})
        except ValueError as refused:
            print(str(refused).rpartition(": ")[2])
            continue
        model, optimizer = build(1)
        checkpoint.load(torn, checkpoint.state_of(model, optimizer))
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        print("complete")


@pytest.mark.extended
def test_a_checkpoint_is_complete_or_refused_whenever_its_save_is_killed(tmp_path):
    # In a process without threads of pytest, so that forked children can't wait for one.
    tried = run_python("-W", "ignore", "-m", __name__, str(tmp_path), cwd=Path(__file__).parents[2])
    assert tried.returncode == 0, tried.stderr
    found = tried.stdout.splitlines()
    assert len(found) >= 20
    assert (found[0], found[-1]) == (REFUSED, "complete")
    # Once complete, it stays complete.
    assert set(found[: found.index("complete")]) == {REFUSED}
    assert set(found[found.index("complete") :]) == {"complete"}


if __name__ == "__main__":
    try_all_moments(sys.argv[1])
