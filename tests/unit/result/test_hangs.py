"""Hangs and failures of scripts, by the stacks and collectives that their ranks leave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import make_plan, write_plan_file, write_rank_file


@pytest.fixture(autouse=True)
def plan_file(tmp_path: Path) -> None:
    write_plan_file(tmp_path)


def raised(
    run_dir, rank: int, time_ns: int, message: str = "boom", kind: str = "ValueError", text: str | None = None
) -> None:
    if text is None:
        text = f'Traceback (most recent call last):\n  File "train.py", line {rank}\n{kind}: {message}\n'
    document = {"time_ns": time_ns, "type": kind, "message": message, "traceback": text}
    write_rank_file(run_dir, rank, "error.json", json.dumps(document))


def ended(reason: EndReason = EndReason.EXIT, status: int | None = 1, survivors: tuple[int, ...] = ()) -> LaunchOutcome:
    return LaunchOutcome(reason, status, (), survivors, 1.0)


def failure(run_dir, outcome: LaunchOutcome, world_size: int = 2) -> str:
    found = launch_failure(make_plan(run_dir, world=World(world_size, "cpu")), outcome)
    assert found is not None
    assert f": {found.kind}" in found.text.splitlines()[0]
    assert found.rank is None or re.search(rf"ranks? (\d+, )*{found.rank}\b", found.text)
    assert found.text.splitlines()[-1] == f"plan, logs and stacks: {run_dir}"
    return found.text


def frames(*places: str) -> str:
    lines = [f'  File "{file}", line 1 in {function}' for file, function in (place.split(":") for place in places)]
    return "\n".join(["Current thread 0x02 (most recent call first):", *lines, ""])


def stuck(run_dir, rank: int, stacks: str, steps: int) -> None:
    write_rank_file(run_dir, rank, "pid", "7")
    write_rank_file(run_dir, rank, "stacks.txt", stacks)
    entered(run_dir, rank, steps)


def entered(run_dir, rank: int, steps: int) -> None:
    (run_dir / "ranks" / str(rank) / "progress").write_bytes(steps.to_bytes(8, "little"))


def recorded(run_dir, rank: int, *names: str, retired: int | None = None, **changes: object) -> None:
    """Write the record of a rank that has entered collectives, all of which but the last have ended."""
    entries = [
        {
            "profiling_name": f"gloo:{name.partition(' ')[0]}",
            "collective_seq_id": number,
            "input_sizes": [[int(name.partition(" ")[2] or 1)]],
            "time_created_ns": 100 * number + rank,
            "retired": number <= (len(names) - 1 if retired is None else retired),
            **changes,
        }
        for number, name in enumerate(names, 1)
    ]
    write_rank_file(run_dir, rank, "collectives.json", json.dumps({"entries": entries or None}))


WAITING = frames("/site/torch/distributed/distributed_c10d.py:all_reduce", "train.py:step")
WAITING_FOR_WORK = frames("lanes.py:wait", "train.py:step")
IN_BACKWARD = frames("/site/torch/autograd/graph.py:_engine_run_backward", "train.py:step")
BROADCASTING = frames("/site/torch/nn/parallel/distributed.py:_distributed_broadcast_coalesced", "train.py:step")
COMPUTING = frames("train.py:tokenize", "train.py:step")
STEP = ["broadcast", "all_reduce 64"]
# The collectives of two ranks, of which the second skips one in its last step.
SKIPPED = {
    "the loss": (["all_reduce 64", "all_reduce 1"] * 4, ["all_reduce 64", "all_reduce 1"] * 3 + ["all_reduce 64"] * 2),
    "a barrier": (["all_reduce 64", "barrier"] * 3, ["all_reduce 64", "barrier"] * 2 + ["all_reduce 64"] * 2),
    "a step, with the loss logged in every second": (
        [*STEP, *STEP, "all_reduce 1"] * 2 + STEP * 2,
        [*STEP, *STEP, "all_reduce 1"] * 2 + [*STEP, "all_reduce 1"],
    ),
}


@pytest.mark.parametrize(
    ("kind", "shown"), [("RuntimeError", ["  | found no GPU, done"]), ("AdapterError", [])], ids=["recorder", "adapter"]
)
def test_script_that_returned_without_a_measured_step_is_shown_with_its_last_lines(tmp_path, kind, shown):
    raised(tmp_path, 0, 1, "no step", kind, f"{kind}: no step\n")
    write_rank_file(tmp_path, 0, "marks", "started 1000000000\nran 2000000000\n")
    write_rank_file(tmp_path, 0, "output.log", f"found no GPU, done\n{kind}: no step\n")
    assert failure(tmp_path, ended()).splitlines()[1:-1] == shown


@pytest.mark.parametrize(
    ("reason", "rank"),
    [("planted in step 5", 0), ("Connection closed by peer [127.0.0.1]:3", 1)],
    ids=["own", "peer's"],
)
def test_error_that_a_script_handled_by_exiting_is_named(tmp_path, reason, rank):
    raised(tmp_path, 1, 2)
    document = {"time_ns": 1, "type": "SystemExit", "message": "1", "traceback": "", "after": f"RuntimeError: {reason}"}
    write_rank_file(tmp_path, 0, "error.json", json.dumps(document))
    found = launch_failure(make_plan(tmp_path), ended())
    assert found.rank == rank
    assert rank or found.headline.endswith("rank 0 failed first: exit code 1 after RuntimeError: planted in step 5")


def test_long_traceback_keeps_the_frames_of_the_user_and_the_innermost_ones(tmp_path):
    frame = '  File "{}.py", line 1, in f\n    call()\n    ^^^^^^\n'
    library = "".join(frame.format(f"/v/lib/python3.11/site-packages/torch/m{number}") for number in range(40))
    text = f"Traceback (most recent call last):\n{library}{frame.format('train')}{library}ValueError: boom\n"
    raised(tmp_path, 1, 1, text=text)
    assert failure(tmp_path, ended()).splitlines()[1:-1] == [
        "Traceback (most recent call last):",
        "  ... 120 lines left out, see ranks/1/error.json",
        *frame.format("train").splitlines(),
        "  ... 114 lines left out, see ranks/1/error.json",
        *"".join(library.splitlines(keepends=True)[-6:]).splitlines(),
    ]


def test_rank_that_imports_torch_distributed_waits_in_no_collective(tmp_path):
    places = ["/v/torch/autograd/__init__.py:<module>", "/v/torch/distributed/rpc/__init__.py:<module>"]
    stuck(tmp_path, 0, frames(*places), 0)
    stuck(tmp_path, 1, frames("/v/torch/distributed/tensor/_api.py:_ToTorchTensor", *places), 0)
    assert "hang elsewhere: time limit of 60 s reached; ranks 0, 1 in no collective" in failure(
        tmp_path, ended(EndReason.TIME_LIMIT, None)
    )


@pytest.mark.parametrize("waiting", [WAITING, WAITING_FOR_WORK, IN_BACKWARD, BROADCASTING])
def test_rank_that_is_not_in_the_collective_is_named_as_the_first(tmp_path, waiting):
    stuck(tmp_path, 0, waiting, 5)
    stuck(tmp_path, 1, COMPUTING, 4)
    found = launch_failure(make_plan(tmp_path), ended(EndReason.TIME_LIMIT, None))
    assert (found.kind, found.rank) == ("hang in collective", 1)
    assert "rank 0 waits for rank 1" in found.text
    assert "rank 1, step 4: tokenize (train.py:1) < step (train.py:1)" in found.text


@pytest.mark.parametrize("stacks", [COMPUTING, WAITING, IN_BACKWARD], ids=["computing", "waiting", "in backward"])
def test_rank_that_never_entered_the_collective_is_named_by_the_records(tmp_path, stacks):
    stuck(tmp_path, 0, IN_BACKWARD, 5)
    stuck(tmp_path, 1, stacks, 5)
    recorded(tmp_path, 0, "broadcast", "all_reduce 64", "broadcast")
    recorded(tmp_path, 1, "broadcast", "all_reduce 64", retired=2)
    found = launch_failure(make_plan(tmp_path), ended(EndReason.TIME_LIMIT, None))
    assert (found.kind, found.rank) == ("hang in collective", 1)
    assert found.headline.endswith("rank 0 waits for rank 1, which never entered gloo:broadcast number 3")
    assert "  rank 0, step 5: in gloo:broadcast number 3, _engine_run_backward" in found.text


@pytest.mark.parametrize(("whole", "skipping"), SKIPPED.values(), ids=SKIPPED)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_left_its_own_order_of_collectives_is_named(tmp_path, rank, whole, skipping):
    for number in range(2):
        stuck(tmp_path, number, IN_BACKWARD, 5 + (number == rank))
        recorded(tmp_path, number, *(skipping if number == rank else whole), retired=len(skipping) - 1)
    found = launch_failure(make_plan(tmp_path), ended(EndReason.TIME_LIMIT, None))
    assert (found.kind, found.rank) == ("hang in collective", rank)
    assert f"ranks entered different collectives: rank {rank} gloo:{skipping[-1].split()[0]}" in found.headline
    assert found.headline.count(f"(number {len(skipping)})") == 2


def test_different_collectives_are_shown_with_the_error_that_they_led_to(tmp_path):
    stuck(tmp_path, 0, IN_BACKWARD, 5)
    raised(tmp_path, 1, 1, "Connection closed by peer", "RuntimeError")
    recorded(tmp_path, 0, "barrier")
    recorded(tmp_path, 1, "broadcast")
    assert (
        "  ranks entered different collectives: rank 0 gloo:barrier (number 1) and rank 1 gloo:broadcast of [[1]]"
    ) in failure(tmp_path, ended())


@pytest.mark.parametrize(
    "changes", [{"is_p2p": True}, {"profiling_name": "nccl:coalesced"}, {"process_group": ["7", "pipeline"]}], ids=str
)
def test_sends_and_collectives_of_groups_that_a_rank_never_used_are_not_missed(tmp_path, changes):
    for rank in range(2):
        stuck(tmp_path, rank, COMPUTING if rank else WAITING, 5)
    recorded(tmp_path, 0, "all_reduce", **changes)
    recorded(tmp_path, 1, "broadcast", retired=1)
    assert "never entered" not in failure(tmp_path, ended(EndReason.TIME_LIMIT, None))


def test_rank_that_waits_for_its_data_with_no_collective_in_flight_is_not_waiting_for_peers(tmp_path):
    for rank in range(2):
        stuck(tmp_path, rank, WAITING_FOR_WORK, 5)
        recorded(tmp_path, rank, "all_reduce", retired=1)
    assert "hang elsewhere: time limit of 60 s reached; ranks 0, 1 in no collective" in failure(
        tmp_path, ended(EndReason.TIME_LIMIT, None)
    )
