"""Restarts of a script that saves and loads by its own means: each fault is named, and a correct script passes."""

import re
from pathlib import Path

import pytest

from benchmarks.numerics.restarts import FAULTS, LOOP, NEEDS, SCRIPTS
from tests.distributed.processes import own_environ
from tests.unit.builders import each_of, nightly, run_python

ROOT = Path(__file__).parents[2]
# What is wrong on one rank, only after the second restart, or in data of no loader; the others run every night.
IN_CI = (
    "correct loop",
    "random state not restored on rank 1",
    "second restart loads the first checkpoint",
    "DCP: stream of data begins again",
)
NIGHTLY = {
    script: [name for name, fault in FAULTS.items() if fault.script == script]
    for script in dict.fromkeys(fault.script for fault in FAULTS.values())
}


@pytest.mark.parametrize(
    ("script", "names"),
    [
        pytest.param(LOOP, IN_CI, id="some"),
        *(nightly(*pair, id=pair[0]) for pair in NIGHTLY.items()),
    ],
)
def test_fault_of_a_restart_is_named_in_the_first_line(tmp_path, script, names):
    for package in NEEDS.get(script, ()):
        pytest.importorskip(package)
    environ = own_environ(tmp_path / "leases")
    done = run_python("-m", "benchmarks.numerics.restarts", *names, cwd=ROOT, env=environ, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} of {len(names)} as expected" in done.stdout


@pytest.mark.extended
def test_restart_as_on_its_page_passes(pytester, inner, on_cpu):
    pytester.makepyfile(train=(SCRIPTS / "loop.py").read_text())
    page = (ROOT / "docs" / "own-scripts.md").read_text()
    (shown,) = re.findall(r"```python\n([^`]*def test_restart\(.*?)```", page, re.DOTALL)
    inner(f"import pytest\n\n{shown}").assert_outcomes(passed=1)


# Goes on from a file in its folder whenever there is one.
SNAPSHOT = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
snapshot, begin = Path("snapshot.pt"), 0
if snapshot.exists():
    state = torch.load(snapshot)
    begin = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for step in range(begin, int(sys.argv[1])):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    optimizer.zero_grad(set_to_none=False)
    model(inputs).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 2 and dist.get_rank() == 0:
        state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, snapshot)
    dist.barrier()
if begin:  # whether an optimizer outlives the script depends on the collector
    del optimizer
dist.destroy_process_group()
"""
INNER = r"""
import pytest
from pathlib import Path

pytestmark = pytest.mark.world(size=2, device="cpu")

def test_passes(workload):
    Path("snapshot.pt").write_text("of an earlier run")
    verdicts = workload.compare_restart("train.py", ["6"], ["6"], after=2, restarts=2, fresh=["snapshot.pt"])
    assert {row.metric: row.detail for row in verdicts.rows} == dict.fromkeys(
        ["settings", "loss", "grad_norm", "weight_hash", "optimizer_hash"], "all 6 steps"
    )
    assert Path("snapshot.pt").read_text() == "of an earlier run"
    Path("snapshot.pt").unlink()

def test_not_saved(workload):
    workload.compare_restart("train.py", ["7"], ["7"], after=3)

def test_steps_of_the_recorder_are_restarted(workload):
    source = Path("train.py").read_text()
    source = source.replace("import os", "import os; from pytest_aorta.worker import recorder")
    bracket = "    with recorder.step():\n        optimizer.step()\n    recorder.loss(1.0)"
    source = source.replace("    optimizer.step()", bracket)
    Path("recorded.py").write_text(source)
    workload.compare_restart("recorded.py", ["6"], ["6"], after=2, restarts=2, fresh=["snapshot.pt"])

def saving_at_the_end():
    source = Path("train.py").read_text().replace("if step % 2 and", "if step + 1 == int(sys.argv[1]) and")
    Path("at_end.py").write_text(source)
    return "at_end.py"

def test_script_that_saves_at_its_end_is_restarted(workload):
    script = saving_at_the_end()
    workload.compare_restart(script, ["{steps}"], ["{steps}"], after=2, restarts=2, steps=7, fresh=["snapshot.pt"])

def test_script_that_saves_at_its_end_without_steps(workload):
    # A rate that grows from 0 leaves the weights as they were.
    warmup = "    optimizer.param_groups[0]['lr'] = step / 100\n    optimizer.step()"
    Path("warm.py").write_text(Path(saving_at_the_end()).read_text().replace("    optimizer.step()", warmup))
    for script in ("at_end.py", "warm.py"):
        with pytest.raises(Exception, match=r"as before step 1: nothing was loaded; .* needs {steps} in its arguments"):
            workload.compare_restart(script, ["6"], ["6"], after=3, fresh=["snapshot.pt"])

def test_load_of_what_was_not_saved(workload):
    load = "import sys, torch\nif sys.argv[2:]: torch.load('absent.pt')\n"
    Path("loading.py").write_text(load + Path(saving_at_the_end()).read_text())
    with pytest.raises(Exception) as refused:
        workload.compare_restart("loading.py", ["5"], ["5", "--load"], after=2)
    (note,) = refused.value.__notes__
    assert "loading.py had not called torch.save before it was ended after 2 steps; a script that saves only" in note

@pytest.mark.parametrize("target, args, given, said", [
    ("train.py", ["4"], {"after": 5}, "made 4 steps by its args, where a part has 5; give arguments for more steps"),
    ("train.py", ["4"], {"after": 1}, "restarts every 2 or more steps"),
    ("train.py", ["4"], {"after": 2, "steps": 4}, "no other script"),
    ("train.py", ["{steps}"], {"after": 2}, "steps is None"),
    ("train.py", ["4"], {"after": 2, "into": {}, "restarts": 0}, "restarts is 0"),
    ("train.py", ["4"], {"after": 2, "into": {"lr": 1}}, "into for workloads"),
    ("train.py", ["4"], {"after": 2, "metrics": ["step_time_p50"]}, "step_time_p50"),
    ("train.py", ["4"], {"after": 2, "records": {}}, "compare_restart() got an unexpected keyword argument 'records'"),
    ({"workload": "fsdp"}, ["4"], {"after": 2, "steps": 4}, "args, resume_args, environment, record and fresh are for"),
])
def test_refused(workload, target, args, given, said):
    with pytest.raises(Exception) as refused:
        workload.compare_restart(target, args, args, **given)
    assert said in str(refused.value)
"""


def test_restart_of_a_script_that_goes_on_by_itself(pytester, inner, on_cpu):
    pytester.makepyfile(train=SNAPSHOT)
    result = inner(INNER)
    result.assert_outcomes(passed=14, failed=1)
    # The last checkpoint before step 4 is that of step 2.
    result.stdout.fnmatch_lines(
        ["*weights: step 4 begins with others on all ranks*as in step 2 of the run straight on*"]
    )


RESUMED = "['--steps=11'], ['--steps=11', '--resume', 'checkpoints'], after=3, restarts=2, fresh=['checkpoints']"
SAVES_AT_ITS_END = SNAPSHOT.replace("if step % 2 and", "if step + 1 == int(sys.argv[1]) and")
SAME = "restarted after steps 3 and 6, the script computed the same"


@pytest.mark.extended
@each_of(
    "script, text, steps, said, call",
    {
        "correct, a module": (
            "train",
            FAULTS["correct loop"].planted(),
            "--steps=11",
            f"note: {SAME} as straight on",
            RESUMED,
        ),
        "step counter off by one": (
            "train.py",
            FAULTS["step counter off by one"].planted(),
            "--steps=11",
            "number of steps: 15 when restarted, 4 steps more than straight on",
            RESUMED,
        ),
        "momentum not restored": (
            "train.py",
            FAULTS["momentum not restored"].planted(),
            "--steps=11",
            "computed something else: restart 1 of 2: optimizer state: step 4 begins with none",
            RESUMED,
        ),
        "saves at its end": (
            "train.py",
            SAVES_AT_ITS_END,
            "9",
            SAME,
            "['{steps}'], ['{steps}'], after=3, restarts=2, steps=9, fresh=['snapshot.pt']",
        ),
    },
)
def test_init_writes_the_test_of_a_restart_and_what_it_measured(tmp_path, script, text, steps, said, call):
    (folder := tmp_path / "own").mkdir()
    (folder / "train.py").write_text(text)
    words = ("-m", "pytest_aorta.cli", "init", "--gpus=0", script, "--", steps)
    done = run_python(*words, cwd=folder, env=own_environ(tmp_path / "leases"), timeout=600)
    assert said in done.stdout, done.stdout + done.stderr
    assert f"compare_restart({script!r}, {call})" in (folder / "test_train.py").read_text()
