from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import (
    ENDED_WELL,
    make_plan,
    rank_values,
    replace,
    write_plan_file,
    write_rank_file,
    write_ranks,
)


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


def exited(run_dir, running: tuple[int, ...] = (), **codes: int) -> None:
    failures = [{"rank": int(rank[1:]), "pid": 9, "exit_code": code} for rank, code in codes.items()]
    (run_dir / "agent.json").write_text(json.dumps({"failures": failures, "running": running}))


def ended(reason: EndReason = EndReason.EXIT, status: int | None = 1, survivors: tuple[int, ...] = ()) -> LaunchOutcome:
    return LaunchOutcome(reason, status, (), survivors, 1.0)


def failure(run_dir, outcome: LaunchOutcome, world_size: int = 2) -> str:
    found = launch_failure(make_plan(run_dir, world=World(world_size, "cpu")), outcome)
    assert found is not None
    assert f": {found.kind}" in found.text.splitlines()[0]
    assert found.rank is None or re.search(rf"ranks? (\d+, )*{found.rank}\b", found.text)
    assert found.text.splitlines()[-1] == f"plan, logs and stacks: {run_dir}"
    return found.text


def test_launch_whose_ranks_ended_well_with_results_is_no_failure(tmp_path):
    write_ranks(tmp_path, rank_values(), rank_values())
    assert launch_failure(make_plan(tmp_path), ENDED_WELL) is None


def test_first_failing_rank_is_the_earliest_by_nanoseconds(tmp_path):
    raised(tmp_path, 0, 1_700_000_000_000_000_002)
    raised(tmp_path, 1, 1_700_000_000_000_000_001, "the cause")
    lines = failure(tmp_path, ended()).splitlines()
    assert lines[0] == "toy on 2 cpu ranks: rank exception: rank 1 failed first: ValueError: the cause"
    assert lines[1:3] == ["Traceback (most recent call last):", '  File "train.py", line 1']
    assert lines[3] == "  then rank 0: ValueError: boom"


@pytest.mark.parametrize(
    "complaint",
    [
        "Connection closed by peer [127.0.0.1]:3",
        "read: connection reset by peer",
        "Broken pipe",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "[c10d] recvValue failed on SocketImpl",
        "Timed out waiting 800ms for recv operation to complete",
        "wait timeout after 32000ms, keys: /default_pg/0//cpu//0/1",
    ],
)
def test_rank_that_complains_about_its_peer_comes_last_however_early(tmp_path, complaint):
    raised(tmp_path, 0, 1, complaint, "RuntimeError")
    raised(tmp_path, 1, 2)
    assert "rank 1 failed first: ValueError: boom" in failure(tmp_path, ended()).splitlines()[0]


def test_exit_code_is_reported_before_the_errors_of_its_peers(tmp_path):
    raised(tmp_path, 0, 1, "Connection closed by peer", "RuntimeError")
    exited(tmp_path, _1=3)
    write_rank_file(tmp_path, 1, "output.log", "first\nlast words\n")
    lines = failure(tmp_path, ended()).splitlines()
    assert lines[0] == "toy on 2 cpu ranks: rank 1 failed first: exit code 3"
    assert lines[1:4] == [
        "  | first",
        "  | last words",
        "  then rank 0: connection to a peer lost (follows from rank 1)",
    ]


def test_rank_that_is_killed_while_torchrun_is_stopped_is_named_with_its_signal(tmp_path):
    write_rank_file(tmp_path, 0, "pid", "7")
    write_rank_file(tmp_path, 1, "pid", "8")
    exited(tmp_path, _1=-9)
    lines = failure(tmp_path, ended(EndReason.RANK_GONE, -9)).splitlines()
    assert lines[0] == "toy on 2 cpu ranks: rank 1 failed first: signal SIGKILL"
    assert lines[1] == (
        "  next: look for rank 1 in dmesg, since the kernel sends SIGKILL if the host or a container runs out of memory"
    )


@pytest.mark.parametrize(("code", "name"), [(-11, "SIGSEGV"), (-9, "SIGKILL"), (-15, "SIGTERM"), (-99, "99")])
def test_signal_is_named_before_its_peers_complaints(tmp_path, code, name):
    raised(tmp_path, 0, 1, "Connection reset by peer", "RuntimeError")
    exited(tmp_path, _1=code)
    headline = failure(tmp_path, ended()).splitlines()[0]
    assert headline.startswith("toy on 2 cpu ranks: rank 1 failed first: signal ")
    assert name in headline


def test_fatal_signal_of_a_rank_that_was_still_ending_is_read_from_its_stack(tmp_path):
    raised(tmp_path, 0, 1, "Connection closed by peer", "RuntimeError")
    stuck(tmp_path, 1, f"Fatal Python error: Segmentation fault\n\n{COMPUTING}", 3)
    lines = failure(tmp_path, ended()).splitlines()
    assert lines[0] == "toy on 2 cpu ranks: rank 1 failed first: signal SIGSEGV"
    assert "  then rank 0: connection to a peer lost (follows from rank 1)" in lines


def test_out_of_memory_is_a_kind_of_its_own(tmp_path):
    raised(tmp_path, 1, 5, "CUDA out of memory", "OutOfMemoryError")
    assert "out of memory: rank 1 failed first" in failure(tmp_path, ended())


def test_error_of_a_rank_whose_peers_hung_is_still_reported(tmp_path):
    raised(tmp_path, 1, 5)
    assert "rank exception: rank 1 failed first" in failure(tmp_path, ended(EndReason.RANK_ERROR, None))


def test_only_a_few_further_failures_are_listed(tmp_path):
    for rank in range(8):
        raised(tmp_path, rank, rank, "abcdefgh"[rank])
    lines = failure(tmp_path, ended(), world_size=8).splitlines()
    assert [line for line in lines if "then" in line] == [
        *(f"  then rank {rank}: ValueError: {'abcdefgh'[rank]}" for rank in range(1, 5)),
        "  then ranks 5-7: other errors",
    ]


def test_ranks_that_ended_in_one_way_share_a_line(tmp_path):
    raised(tmp_path, 1, 1, "layer 1 of 4")
    raised(tmp_path, 0, 2, "layer 1 of 4")
    raised(tmp_path, 7, 2, "layer 7 of 4")
    for rank in (2, 3, 4):
        raised(tmp_path, rank, 3, f"Connection closed by peer [127.0.0.1]:{rank}", "RuntimeError")
    for rank in (5, 6):
        stuck(tmp_path, rank, COMPUTING, rank)
    exited(tmp_path, _8=-6)
    lines = failure(tmp_path, ended(), world_size=9).splitlines()
    assert [line for line in lines if "then" in line] == [
        "  then rank 0: the same error",
        "  then ranks 2-4: connection to a peer lost (follows from rank 1)",
        "  then rank 7: the same error with other numbers",
        "  then rank 8: signal SIGABRT (follows from rank 1)",
        "  then ranks 5, 6: stopped in steps 5 to 6",
    ]


def test_message_of_several_lines_is_written_once(tmp_path):
    message = "CUDA error\nCompile with TORCH_USE_CUDA_DSA"
    frame = '  File "/a/train.py", line 3, in step\n    run()\n'
    text = f"Traceback (most recent call last):\n{frame}torch.AcceleratorError: {message}\n"
    raised(tmp_path, 0, 1, message, "AcceleratorError", text)
    write_rank_file(tmp_path, 0, "output.log", f"loading\n{text}")
    assert failure(tmp_path, ended()).splitlines()[:-1] == [
        "toy on 2 cpu ranks: rank exception: rank 0 failed first: AcceleratorError: CUDA error",
        "    Compile with TORCH_USE_CUDA_DSA",
        "Traceback (most recent call last):",
        '  File "/a/train.py", line 3, in step',
        "    run()",
        "  | loading",
    ]


def test_lines_of_a_message_that_are_indented_keep_their_indentation(tmp_path):
    message = "pattern 'x' matches no line of a.log, which ends:\n  | [5] loss=0.2"
    raised(tmp_path, 0, 1, message, "AdapterError", f"AdapterError: {message}\n")
    write_rank_file(tmp_path, 0, "output.log", "[5] loss=0.2\n")
    assert failure(tmp_path, ended()).splitlines()[1:-1] == ["  | [5] loss=0.2"]


def test_message_that_ends_with_a_traceback_of_the_same_type_is_shown_once(tmp_path):
    inner = 'Traceback (most recent call last):\n  File "data.py", line 9, in load\nKeyError: 3\n'
    message = f"Caught KeyError in DataLoader worker process 0.\nOriginal {inner}"
    outer = f'Traceback (most recent call last):\n  File "train.py", line 1, in step\nKeyError: {message}\n'
    raised(tmp_path, 1, 5, message, "KeyError", outer)
    assert failure(tmp_path, ended()).splitlines()[:-1] == [
        "toy on 2 cpu ranks: rank exception: rank 1 failed first: "
        "KeyError: Caught KeyError in DataLoader worker process 0.",
        "    Original Traceback (most recent call last):",
        '  File "data.py", line 9, in load',
        "    KeyError: 3",
        "Traceback (most recent call last):",
        '  File "train.py", line 1, in step',
    ]


def test_notes_of_an_error_are_kept(tmp_path):
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: boom\nwhile loading shard 7\n'
    raised(tmp_path, 0, 1, text=text)
    assert failure(tmp_path, ended()).splitlines()[1:-1] == [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "while loading shard 7",
    ]


@pytest.mark.parametrize(("message", "last"), [("", "AssertionError"), ("no", "AssertionError: no")])
def test_error_without_frames_is_its_message_alone(tmp_path, message, last):
    raised(tmp_path, 0, 1, message, "AssertionError", f"{last}\n")
    write_rank_file(tmp_path, 0, "output.log", f"many\nwords\n{last}\n")
    assert failure(tmp_path, ended()).splitlines()[:-1] == [
        f"toy on 2 cpu ranks: rank exception: rank 0 failed first: {last}"
    ]


@pytest.mark.parametrize(
    ("kind", "shown"), [("RuntimeError", ["  | found no GPU, done"]), ("AdapterError", [])], ids=["recorder", "adapter"]
)
def test_script_that_returned_without_a_measured_step_is_shown_with_its_last_lines(tmp_path, kind, shown):
    raised(tmp_path, 0, 1, "no step", kind, f"{kind}: no step\n")
    write_rank_file(tmp_path, 0, "marks", "started 1000000000\nran 2000000000\n")
    write_rank_file(tmp_path, 0, "output.log", f"found no GPU, done\n{kind}: no step\n")
    assert failure(tmp_path, ended()).splitlines()[1:-1] == shown


def test_line_of_a_script_that_can_not_be_compiled_is_reported(tmp_path):
    text = '  File "train.py", line 1\n    def main(:\n             ^\nSyntaxError: invalid syntax\n'
    raised(tmp_path, 0, 1, "invalid syntax (train.py, line 1)", "SyntaxError", text)
    assert failure(tmp_path, ended()).splitlines()[:-1] == [
        "toy on 2 cpu ranks: rank exception: rank 0 failed first: SyntaxError: invalid syntax (train.py, line 1)",
        '  File "train.py", line 1',
        "    def main(:",
        "             ^",
    ]


def test_long_traceback_keeps_its_outer_and_inner_frames_whole(tmp_path):
    frames = "".join(f'  File "m{number}.py", line 1, in f\n    call()\n' for number in range(60))
    raised(tmp_path, 1, 1, text=f"Traceback (most recent call last):\n{frames}ValueError: boom\n")
    lines = failure(tmp_path, ended()).splitlines()[1:-1]
    assert lines[:3] == ["Traceback (most recent call last):", '  File "m0.py", line 1, in f', "    call()"]
    assert lines[-2:] == ['  File "m59.py", line 1, in f', "    call()"]
    left_out = next(number for number, line in enumerate(lines) if "left out" in line)
    assert lines[left_out] == f"  ... {121 - len(lines) + 1} lines left out, see ranks/1/error.json"
    assert lines[left_out - 1] == "    call()"
    assert lines[left_out + 1].startswith("  File ")
    assert len(lines) <= 25


# The kernel keeps the lowest byte of an exit code.
EXITS = [("3", "exit code 3"), ("-1", "exit code 255"), ("set DATA_DIR", "exit code 1: set DATA_DIR")]


@pytest.mark.parametrize(("code", "text"), EXITS)
def test_script_that_exits_is_reported_with_its_exit_code(tmp_path, code, text):
    place = 'Traceback (most recent call last):\n  File "/a/train.py", line 9, in main\n    sys.exit()\n'
    raised(tmp_path, 1, 1, code, "SystemExit", f"{place}SystemExit: {code}\n")
    found = launch_failure(make_plan(tmp_path), ended())
    assert (found.kind, found.rank) == ("exit code", 1)
    assert found.text.splitlines()[:-1] == [
        f"toy on 2 cpu ranks: rank 1 failed first: {text}",
        *place.splitlines(),
        "  ranks/1/output.log is empty",
    ]


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


def test_empty_log_says_so(tmp_path):
    exited(tmp_path, _1=3)
    assert "  ranks/1/output.log is empty" in failure(tmp_path, ended()).splitlines()
    write_ranks(tmp_path, rank_values())
    assert "  ranks/1/output.log is empty" in failure(tmp_path, ENDED_WELL).splitlines()


def test_hung_rank_without_stacks_and_output_says_so(tmp_path):
    write_rank_file(tmp_path, 0, "pid", "7")
    lines = failure(tmp_path, ended(EndReason.TIME_LIMIT, None)).splitlines()
    assert "  ranks 0, 1, step 0: no stack, and output.log is empty" in lines


def test_stacks_have_no_frames_of_the_harness(tmp_path):
    places = (
        "/p/pytest_aorta/launch/process/last_words.py:<lambda>", "/p/torch/nn/module.py:call", "/home/me/train.py:step",
        "<frozen runpy>:_run_code", "/p/pytest_aorta/worker/lifecycle.py:run_rank",
    )  # fmt: skip
    stuck(tmp_path, 0, frames(*places), 2)
    lines = failure(tmp_path, ended(EndReason.TIME_LIMIT, None)).splitlines()
    assert "  rank 0, step 2: call (torch/nn/module.py:1) < step (home/me/train.py:1)" in lines


def test_position_reaches_the_users_own_code(tmp_path):
    libraries = [f"/lib/python3.11/site-packages/torch/nn/m{number}.py:call" for number in range(9)]
    stuck(tmp_path, 0, frames(*libraries, "/home/me/train.py:step", "/home/me/train.py:main"), 2)
    assert (
        "  rank 0, step 2: call (torch/nn/m0.py:1) < call (torch/nn/m1.py:1) < ... < step (home/me/train.py:1)"
    ) in failure(tmp_path, ended(EndReason.TIME_LIMIT, None)).splitlines()


def test_ranks_at_one_place_share_a_line(tmp_path):
    for rank in range(5):
        stuck(tmp_path, rank, WAITING if rank != 3 else COMPUTING, 7)
    lines = failure(tmp_path, ended(EndReason.TIME_LIMIT, None), world_size=5).splitlines()
    assert lines[0].endswith("ranks 0-2, 4 wait for rank 3")
    assert lines[1].startswith("  rank 3, step 7: tokenize ")
    assert lines[2].startswith("  ranks 0-2, 4, step 7: all_reduce ")


def test_position_of_stopped_ranks_is_reported_where_the_first_rank_is_a_victim(tmp_path):
    raised(tmp_path, 0, 1, "Timed out waiting 48000ms for recv operation", "RuntimeError")
    stuck(tmp_path, 1, COMPUTING, 2)
    assert "  rank 1, step 2: tokenize (train.py:1) < step (train.py:1)" in failure(tmp_path, ended())


def test_time_limit_names_the_ranks_that_had_not_finished_and_where_they_are(tmp_path):
    write_ranks(tmp_path, rank_values())
    stacks = (
        "Thread 0x01 (most recent call first):\n"
        '  File "threading.py", line 1 in wait\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "train.py", line 30 in forward\n'
        '  File "train.py", line 20 in step\n'
    )
    write_rank_file(tmp_path, 1, "stacks.txt", stacks)
    write_rank_file(tmp_path, 1, "pid", "7")
    (tmp_path / "ranks" / "1" / "progress").write_bytes((7).to_bytes(8, "little"))
    lines = failure(tmp_path, ended(EndReason.TIME_LIMIT, None)).splitlines()
    assert lines[0] == "toy on 2 cpu ranks: hang elsewhere: time limit of 60 s reached; rank 1 in no collective"
    assert "  rank 1, step 7: forward (train.py:30) < step (train.py:20)" in lines


def test_time_limit_before_any_step_says_that_the_start_may_just_be_slow(tmp_path):
    for rank in (0, 1):
        write_rank_file(tmp_path, rank, "pid", "7")
        write_rank_file(
            tmp_path, rank, "stacks.txt", "Current thread 0x02:\n" + '  File "abc.py", line 3 in get_code\n'
        )
    assert failure(tmp_path, ended(EndReason.TIME_LIMIT, None)).splitlines()[0] == (
        "toy on 2 cpu ranks: hang elsewhere: time limit of 60 s reached; ranks 0, 1 in no collective, before the first "
        "measured step: a hang, or a start that takes longer than the limit"
    )


def test_rank_that_imports_torch_distributed_waits_in_no_collective(tmp_path):
    places = ["/v/torch/autograd/__init__.py:<module>", "/v/torch/distributed/rpc/__init__.py:<module>"]
    stuck(tmp_path, 0, frames(*places), 0)
    stuck(tmp_path, 1, frames("/v/torch/distributed/tensor/_api.py:_ToTorchTensor", *places), 0)
    assert "hang elsewhere: time limit of 60 s reached; ranks 0, 1 in no collective" in failure(
        tmp_path, ended(EndReason.TIME_LIMIT, None)
    )


def test_rank_without_stacks_is_reported_with_the_end_of_its_log(tmp_path):
    write_rank_file(tmp_path, 0, "output.log", "\n".join(f"line {number}" for number in range(50)))
    write_rank_file(tmp_path, 0, "pid", "7")
    assert "rank 0, step 0: no stack; the log ends with: line 48 | line 49" in failure(
        tmp_path, ended(EndReason.TIME_LIMIT, None)
    )


@pytest.mark.parametrize(
    ("reason", "headline"),
    [
        (EndReason.TIME_LIMIT, "rendezvous: no rank started; time limit of 60 s reached"),
        (EndReason.OUTPUT_CAP, "output cap: logs exceed 64 MiB, rank 0 wrote most; ranks 0, 1 left no result"),
        (EndReason.PARENT_GONE, "interrupted: pytest ended before the launch did"),
        (EndReason.GUARD_LOST, "guard lost: the process that watches the ranks was killed"),
    ],
)
def test_reason_of_the_guard_is_the_headline(tmp_path, reason, headline):
    assert failure(tmp_path, ended(reason, None)).splitlines()[0] == f"toy on 2 cpu ranks: {headline}"


def test_missing_result_is_reported_though_all_ranks_exited_with_code_0(tmp_path):
    write_ranks(tmp_path, rank_values())
    headline = failure(tmp_path, ENDED_WELL).splitlines()[0]
    assert headline == "toy on 2 cpu ranks: result missing: rank 1 exited with code 0 and left no result"


def test_agent_that_failed_before_any_rank_is_reported_with_its_log(tmp_path):
    (tmp_path / "agent.log").write_text("rendezvous failed\n")
    lines = failure(tmp_path, ended(status=1)).splitlines()
    assert lines[0].endswith("rendezvous: no rank started; torchrun ended with exit code 1")
    assert "  | rendezvous failed" in lines


def test_agent_of_a_warm_launch_is_not_called_torchrun(tmp_path):
    outcome = replace(ended(status=1), launcher=LauncherKind.FORKSERVER)
    headline = "rendezvous: no rank started; the fork server's agent ended with exit code 1"
    assert failure(tmp_path, outcome).splitlines()[0].endswith(headline)
    write_rank_file(tmp_path, 0, "pid", "7")
    headline = (
        "rendezvous: the fork server's agent ended with exit code 1 before any rank failed; ranks 0, 1 left no result"
    )
    assert failure(tmp_path, outcome).splitlines()[0].endswith(headline)


@pytest.mark.parametrize("reason", [EndReason.EXIT, EndReason.TIME_LIMIT, EndReason.RANK_GONE, EndReason.GUARD_LOST])
@pytest.mark.parametrize("is_partly_there", [False, True])
def test_run_folder_that_the_script_deleted_is_named(tmp_path, reason, is_partly_there):
    shutil.rmtree(tmp_path)
    if is_partly_there:
        write_rank_file(tmp_path, 1, "result.json", "{}")
    found = launch_failure(make_plan(tmp_path), ended(reason))
    assert (found.kind, found.rank) == ("results deleted", None)
    assert found.text.splitlines() == [
        f"toy on 2 cpu ranks: results deleted: the launch's folder {tmp_path} was deleted during the launch, "
        "e.g. by the script; torchrun ended with exit code 1",
        "next: choose a folder of results that the script keeps (--aorta-results; aorta run: --results)",
    ]


def test_rank_that_failed_after_its_result_is_a_failure(tmp_path):
    write_ranks(tmp_path, rank_values(), rank_values())
    exited(tmp_path, _1=7)
    assert "rank 1 failed first: exit code 7" in failure(tmp_path, ended(status=1))


def test_processes_that_could_not_be_ended_make_a_failure(tmp_path):
    write_ranks(tmp_path, rank_values(), rank_values())
    text = failure(tmp_path, ended(status=0, survivors=(41, 42)))
    assert "processes [41, 42] could not be ended; their devices are not usable" in text
    assert text.splitlines()[0] == "toy on 2 cpu ranks: process left: a process outlived the launch"


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_empty_error_file_does_not_hide_the_failure(tmp_path, text):
    write_rank_file(tmp_path, 1, "error.json", text)
    assert "toy on 2 cpu ranks" in failure(tmp_path, ended())


def test_huge_log_is_read_from_its_end_only(tmp_path):
    path = write_rank_file(tmp_path, 0, "output.log", "")
    with path.open("wb") as file:
        file.truncate(200 << 20)
        file.seek(0, 2)
        file.write(b"\n\xff last words\n")
    exited(tmp_path, _0=3)
    assert "last words" in failure(tmp_path, ended())


def frames(*places: str) -> str:
    lines = [f'  File "{file}", line 1 in {function}' for file, function in (place.split(":") for place in places)]
    return "\n".join(["Current thread 0x02 (most recent call first):", *lines, ""])


def stuck(run_dir, rank: int, stacks: str, steps: int) -> None:
    write_rank_file(run_dir, rank, "pid", "7")
    write_rank_file(run_dir, rank, "stacks.txt", stacks)
    entered(run_dir, rank, steps)


def entered(run_dir, rank: int, steps: int) -> None:
    (run_dir / "ranks" / str(rank) / "progress").write_bytes(steps.to_bytes(8, "little"))


WAITING = frames("/site/torch/distributed/distributed_c10d.py:all_reduce", "train.py:step")
WAITING_FOR_WORK = frames("lanes.py:wait", "train.py:step")
IN_BACKWARD = frames("/site/torch/autograd/graph.py:_engine_run_backward", "train.py:step")
BROADCASTING = frames("/site/torch/nn/parallel/distributed.py:_distributed_broadcast_coalesced", "train.py:step")
COMPUTING = frames("train.py:tokenize", "train.py:step")


@pytest.mark.parametrize("waiting", [WAITING, WAITING_FOR_WORK, IN_BACKWARD, BROADCASTING])
def test_rank_that_is_not_in_the_collective_is_named_as_the_first(tmp_path, waiting):
    stuck(tmp_path, 0, waiting, 5)
    stuck(tmp_path, 1, COMPUTING, 4)
    found = launch_failure(make_plan(tmp_path), ended(EndReason.TIME_LIMIT, None))
    assert (found.kind, found.rank) == ("hang in collective", 1)
    assert "rank 0 waits for rank 1" in found.text
    assert "rank 1, step 4: tokenize (train.py:1) < step (train.py:1)" in found.text


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


def test_when_all_wait_in_collectives_the_earliest_is_named(tmp_path):
    stuck(tmp_path, 0, WAITING, 5)
    stuck(tmp_path, 1, WAITING, 4)
    found = launch_failure(make_plan(tmp_path), ended(EndReason.TIME_LIMIT, None))
    assert (found.kind, found.rank) == ("hang in collective", 1)


@pytest.mark.parametrize(
    ("reason", "limit"),
    [
        (EndReason.TIME_LIMIT, "time limit of 60 s reached"),
        (EndReason.STRAGGLER, "a rank was done for 60 s and others were not"),
    ],
)
def test_rank_that_ended_before_the_others_is_named_as_the_one_they_wait_for(tmp_path, reason, limit):
    write_ranks(tmp_path, rank_values())
    entered(tmp_path, 0, 4)
    for rank in (1, 2, 3):
        stuck(tmp_path, rank, WAITING, 5)
    text = failure(tmp_path, ended(reason, None), 4)
    assert text.splitlines()[0] == (
        f"toy on 4 cpu ranks: hang in collective: {limit}; "
        f"ranks 1-3 wait for rank 0, which ended without an error in step 4"
    )


def test_rank_that_ended_without_an_error_before_its_peers_lost_it_is_named(tmp_path):
    write_ranks(tmp_path, rank_values())
    entered(tmp_path, 0, 5)
    raised(tmp_path, 1, 1, "Connection reset by peer", "RuntimeError")
    lines = failure(tmp_path, ended()).splitlines()
    assert "rank exception: rank 0 ended without an error in step 5, and then rank 1 failed: Runtime" in lines[0]


@pytest.mark.parametrize("reason", [EndReason.EXIT, EndReason.RANK_ERROR])
def test_suspended_rank_is_named_before_the_peers_that_timed_out(tmp_path, reason):
    for rank in range(3):
        write_rank_file(tmp_path, rank, "pid", "7")
        entered(tmp_path, rank, 4)
    write_rank_file(tmp_path, 1, "suspended", "")
    raised(tmp_path, 0, 1, "Timed out waiting 800ms for recv operation to complete", "RuntimeError")
    write_rank_file(tmp_path, 2, "stacks.txt", WAITING)
    lines = failure(tmp_path, ended(reason), 3).splitlines()
    assert lines[:-1] == [
        "toy on 3 cpu ranks: hang in collective: rank 1 suspended by a signal such as SIGSTOP in step 4",
        "  then rank 0: gave up waiting for a peer (follows from rank 1)",
        "  rank 2, step 4: all_reduce (torch/distributed/distributed_c10d.py:1) < step (train.py:1)",
    ]


def test_rank_that_did_not_start_is_named_before_the_peers_that_waited_for_it(tmp_path):
    write_rank_file(tmp_path, 0, "pid", "7")
    raised(tmp_path, 0, 1, "wait timeout after 800ms, keys: /default_pg/0//cpu//0/1", "DistStoreError")
    lines = failure(tmp_path, ended()).splitlines()
    assert lines[:-1] == [
        "toy on 2 cpu ranks: rendezvous: rank 1 did not start, and rank 0 gave up waiting",
        "  then rank 0: gave up waiting for a peer (follows from rank 1)",
    ]


def test_rank_that_was_killed_without_a_trace_is_not_said_to_have_exited(tmp_path):
    for rank in range(2):
        write_rank_file(tmp_path, rank, "pid", "7")
        entered(tmp_path, rank, 4)
    raised(tmp_path, 0, 1, "Timed out waiting 800ms for recv operation to complete", "RuntimeError")
    exited(tmp_path, running=(1,), _0=1)
    lines = failure(tmp_path, ended()).splitlines()
    assert lines[:-1] == [
        "toy on 2 cpu ranks: hang in collective: rank 0 gave up waiting for rank 1",
        "  rank 1, step 4: no stack, and output.log is empty",
        "  then rank 0: gave up waiting for a peer (follows from rank 1)",
    ]


TIMED_OUT = "Timed out waiting 800ms for recv operation to complete"


def test_ranks_that_ran_on_are_named_before_the_peers_that_gave_up_waiting_for_them(tmp_path):
    for rank, stacks in enumerate(("", COMPUTING, WAITING, COMPUTING)):
        stuck(tmp_path, rank, stacks, 4 + rank % 2)
    text = 'Traceback (most recent call last):\n  File "train.py", line 7, in step\n    reduce()\n'
    raised(tmp_path, 0, 1, TIMED_OUT, "RuntimeError", f"{text}RuntimeError: {TIMED_OUT}\n")
    exited(tmp_path, running=(1, 2, 3), _0=1)
    lines = failure(tmp_path, ended(), 4).splitlines()
    assert lines[0] == "toy on 4 cpu ranks: hang in collective: rank 0 gave up waiting for ranks 1, 3"
    assert lines[1].startswith("  ranks 1, 3, step 5: ")
    assert lines[2:-1] == [
        "  then rank 0: gave up waiting for a peer (follows from rank 1)",
        "  rank 0, step 4: step (train.py:7)",
        "  rank 2, step 4: all_reduce (torch/distributed/distributed_c10d.py:1) < step (train.py:1)",
    ]


def test_rank_that_gave_up_is_named_before_peers_that_then_lost_their_connection_to_it(tmp_path):
    raised(tmp_path, 0, 2, TIMED_OUT, "RuntimeError")
    raised(tmp_path, 1, 1, "Connection closed by peer", "RuntimeError")
    assert f"rank 0 failed first: RuntimeError: {TIMED_OUT}" in failure(tmp_path, ended()).splitlines()[0]


@pytest.mark.parametrize(("message", "kind", "rank"), [("boom", "ValueError", 0), ("EPIPE", "OSError", 1)])
def test_exit_code_of_a_rank_that_the_agent_was_stopping_comes_after_what_did_not_follow_from_it(
    tmp_path, message, kind, rank
):
    write_rank_file(tmp_path, 1, "pid", "8")
    raised(tmp_path, 0, 1, message, kind)
    exited(tmp_path, running=(1,), _0=1, _1=5)
    assert f": rank {rank} failed first: " in failure(tmp_path, ended()).splitlines()[0]


@pytest.mark.parametrize("reason", [EndReason.TIME_LIMIT, EndReason.STRAGGLER])
def test_rank_that_had_failed_at_the_time_limit_is_named_with_its_error(tmp_path, reason):
    stuck(tmp_path, 0, WAITING, 4)
    stuck(tmp_path, 1, "", 4)
    raised(tmp_path, 1, 5)
    text = failure(tmp_path, ended(reason, None))
    assert text.splitlines()[0] == "toy on 2 cpu ranks: rank exception: rank 1 failed first: ValueError: boom"


def test_error_of_a_rank_that_was_stopped_at_the_time_limit_does_not_hide_the_hang(tmp_path):
    stuck(tmp_path, 0, WAITING, 4)
    stuck(tmp_path, 1, COMPUTING, 4)
    raised(tmp_path, 1, 5, "terminated", "RuntimeError")
    assert "rank 0 waits for rank 1" in failure(tmp_path, ended(EndReason.TIME_LIMIT, None))


def test_rank_with_a_result_that_lost_its_peers_is_not_said_to_have_ended_without_an_error(tmp_path):
    write_ranks(tmp_path, rank_values())
    entered(tmp_path, 0, 4)
    raised(tmp_path, 0, 2, "Connection closed by peer", "RuntimeError")
    raised(tmp_path, 1, 1, TIMED_OUT, "RuntimeError")
    text = failure(tmp_path, ended())
    assert "  rank 0 had left a result in step 4, and waited for the other ranks" in text.splitlines()
    assert "without an error" not in text


def test_ranks_in_different_collectives_are_named_with_their_positions(tmp_path):
    for rank, line in enumerate((7, 8, 7)):
        stuck(tmp_path, rank, "", 4)
        text = f'Traceback (most recent call last):\n  File "train.py", line {line}, in step\n    reduce()\n'
        raised(tmp_path, rank, 1, TIMED_OUT, "RuntimeError", f"{text}RuntimeError: {TIMED_OUT}\n")
    lines = failure(tmp_path, ended(), 3).splitlines()
    assert lines[1:-1] == [
        "Traceback (most recent call last):",
        '  File "train.py", line 7, in step',
        "    reduce()",
        "  rank 1, step 4: step (train.py:8)",
        "  then ranks 1, 2: the same error",
    ]


def test_fatal_signal_of_another_thread_is_located_in_that_thread(tmp_path):
    loader = frames("loader.py:decode", "/lib/python3.11/threading.py:_bootstrap")
    waiting = WAITING.replace("Current thread", "Thread")
    stuck(tmp_path, 1, f"Fatal Python error: Segmentation fault\n\n{loader}\n{waiting}", 3)
    assert "  at decode (loader.py:1)" in failure(tmp_path, ended()).splitlines()


def test_stack_with_code_of_no_file_is_read(tmp_path):
    stuck(tmp_path, 0, frames(":compiled", "train.py:step"), 3)
    assert "compiled (:1) < step (train.py:1)" in failure(tmp_path, ended(EndReason.TIME_LIMIT, None))


@pytest.mark.parametrize("reason", [EndReason.RANK_ERROR, EndReason.TIME_LIMIT])
def test_rank_that_the_guard_stopped_is_not_said_to_have_exited_although_it_left_no_stack(tmp_path, reason):
    for rank, pid in enumerate(("7", "8")):
        write_rank_file(tmp_path, rank, "pid", pid)
        entered(tmp_path, rank, 4)
    raised(tmp_path, 0, 1, TIMED_OUT, "RuntimeError")
    outcome = ended(reason, None)
    assert "rank 1 exited with code 0" in failure(tmp_path, outcome)
    text = failure(tmp_path, replace(outcome, stopped=(5, 8)))
    assert text.splitlines()[0].endswith("hang in collective: rank 0 gave up waiting for rank 1")
    assert "  rank 1, step 4: no stack, and output.log is empty" in text.splitlines()


def test_suspended_rank_is_named_at_the_time_limit(tmp_path):
    stuck(tmp_path, 0, WAITING, 4)
    stuck(tmp_path, 1, "", 4)
    write_rank_file(tmp_path, 1, "suspended", "")
    lines = failure(tmp_path, ended(EndReason.TIME_LIMIT, None)).splitlines()
    assert lines[0].endswith("rank 0 waits for rank 1")
    assert lines[1] == "  rank 1, step 4: suspended by a signal such as SIGSTOP"


def test_suspended_rank_is_named_before_a_rank_that_runs_on(tmp_path):
    stuck(tmp_path, 0, COMPUTING, 4)
    stuck(tmp_path, 1, "", 4)
    write_rank_file(tmp_path, 1, "suspended", "")
    found = launch_failure(make_plan(tmp_path), ended(EndReason.TIME_LIMIT, None))
    assert (found.kind, found.rank) == ("hang elsewhere", 1)


def test_straggler_is_named_with_where_it_is(tmp_path):
    write_ranks(tmp_path, rank_values())
    stuck(tmp_path, 1, COMPUTING, 4)
    found = launch_failure(make_plan(tmp_path), ended(EndReason.STRAGGLER, None))
    assert (found.kind, found.rank) == ("hang elsewhere", 1)
    assert "a rank was done for 60 s and others were not" in found.text


@pytest.mark.parametrize("has_result", [False, True])
@pytest.mark.parametrize(
    ("steps", "reached"), [(5, "having entered step 5"), (0, "and its steps were not counted")], ids=str
)
def test_rank_that_stays_after_its_script_returned_is_named_with_its_steps(tmp_path, has_result, steps, reached):
    for rank in range(2):
        write_rank_file(tmp_path, rank, "marks", "started 1000000000\nran 2000000000\n")
    stuck(tmp_path, 0, frames("/torch/distributed/c10d.py:barrier", "worker/lifecycle.py:finish"), steps)
    stuck(tmp_path, 1, frames("worker/lifecycle.py:run_script"), steps)
    if has_result:
        write_ranks(tmp_path, rank_values(), rank_values())
    lines = failure(tmp_path, ended(EndReason.TIME_LIMIT, None)).splitlines()
    assert lines[0].startswith("toy on 2 cpu ranks: process left: time limit of ")
    assert lines[0].endswith(f"; rank 1 did not leave after its script returned, {reached}")
    assert f"rank 1, step {steps}: run_script" in lines[1]


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({"_0": 1, "_1": -11}, "signal SIGSEGV"),
        ({"_0": -6}, "ValueError: boom"),
        ({"_0": -15, "_1": 1}, "ValueError: boom"),
    ],
)
def test_exit_codes_that_follow_from_another_failure_come_after_the_cause(tmp_path, codes, first):
    if first == "ValueError: boom":
        raised(tmp_path, 1, 5)
    exited(tmp_path, **codes)
    assert f"rank 1 failed first: {first}" in failure(tmp_path, ended()).splitlines()[0]


def test_rank_that_nccl_waited_for_is_named_with_the_collective(tmp_path):
    timeout = "[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1"
    write_rank_file(tmp_path, 0, "output.log", timeout)
    write_rank_file(tmp_path, 1, "output.log", "nothing")
    exited(tmp_path, _0=-6)
    found = launch_failure(make_plan(tmp_path), ended())
    assert (found.kind, found.rank) == ("hang in collective", 1)
    assert "rank 0 timed out in ALLREDUCE number 5; rank 1 not in this collective" in found.text


def test_position_of_stopped_ranks_is_reported_with_their_collective(tmp_path):
    exited(tmp_path, _0=-15, _1=-9)
    stuck(tmp_path, 0, WAITING, 3)
    record = {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 2}]}
    write_rank_file(tmp_path, 0, "collectives.json", json.dumps(record))
    text = failure(tmp_path, ended())
    assert "rank 1 failed first: signal SIGKILL" in text
    assert "  rank 0, step 3: in nccl:all_reduce number 2, all_reduce (torch/distributed/distributed_c10d.py:1)" in text


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (EndReason.NODE_LOST, "node lost"),
        (EndReason.NODE_LAUNCHER, "node launcher"),
        (EndReason.NODE_MISMATCH, "node mismatch"),
    ],
)
def test_failure_of_a_node_is_reported_in_the_coordinators_words(tmp_path, reason, kind):
    (tmp_path / "agent.log").write_text("== node 1 (b) ==\nno such partition\n")
    raised(tmp_path, 0, 1, "connection closed by peer")
    plan = make_plan(tmp_path, world=World(4, "cpu", nodes=2))
    found = launch_failure(plan, LaunchOutcome(reason, None, (), (), 1.0, detail="node 1 (b) was lost"))
    assert found is not None
    assert (found.kind, found.rank) == (kind, None)
    assert found.text.splitlines()[0] == f"toy on 4 cpu ranks of 2 nodes: {kind}: node 1 (b) was lost"
    assert "  | no such partition" in found.text
