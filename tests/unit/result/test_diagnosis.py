"""Diagnoses of launches, from the files that their ranks left."""

import errno
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.reference import Reference, Worktree
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import LaunchFailure, launch_failure
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from tests.unit.builders import ENDED_WELL, each_of, make_plan, rank_values, replace, write_plan_file, write_rank_file

Files = dict[str, str | bytes]
NOTHING: Files = {}
DONE: Files = {"result.json": json.dumps(rank_values())}
STARTED: Files = {"pid": "7"}
TIMED_OUT = "Timed out waiting 800ms for recv operation to complete"
PEER_CLOSED = "Connection closed by peer"


def ended(reason: EndReason = EndReason.EXIT, status: int | None = 1, survivors: tuple[int, ...] = ()) -> LaunchOutcome:
    return LaunchOutcome(reason, status, (), survivors, 1.0)


EXITED = ended()
AT_LIMIT = ended(EndReason.TIME_LIMIT, None)
STRAGGLED = ended(EndReason.STRAGGLER, None)


@dataclass(frozen=True)
class Left:
    """What a launch left.

    Attributes:
        ranks: Rank -> its files.
        outcome: What the guard reported.
        exits: Rank -> exit code that torchrun's agent reported.
        running: Ranks that ran on when the agent reported.
        starts_ranks: Whether a command has started the ranks by itself.
    """

    ranks: dict[int, Files]
    outcome: LaunchOutcome = EXITED
    exits: dict[int, int] = field(default_factory=dict)
    running: tuple[int, ...] = ()
    starts_ranks: bool = False

    @property
    def size(self) -> int:
        return max([1, *self.ranks, *self.exits]) + 1


def raised(time_ns: int, message: str = "boom", kind: str = "ValueError", text: str | None = None) -> Files:
    if text is None:
        text = f'Traceback (most recent call last):\n  File "train.py", line 3\n{kind}: {message}\n'
    return {"error.json": json.dumps({"time_ns": time_ns, "type": kind, "message": message, "traceback": text})}


def not_finite(time_ns: int, message: str, step: int, *, after: bool = False) -> Files:
    error = json.loads(raised(time_ns, message, "NotFinite", "")["error.json"])
    return {"error.json": json.dumps(error | {"not_finite": {"step": step, "is_after": after}})}


def timed_out_at(line: int) -> Files:
    place = f'Traceback (most recent call last):\n  File "train.py", line {line}, in step\n    reduce()\n'
    return raised(1, TIMED_OUT, "RuntimeError", f"{place}RuntimeError: {TIMED_OUT}\n")


def lost_peer(time_ns: int, message: str = PEER_CLOSED) -> Files:
    return raised(time_ns, message, "RuntimeError")


def entered(step: int) -> Files:
    return {"pid": "7", "progress": step.to_bytes(8, "little")}


RETURNED = {"returned": ""}


def stuck(stacks: str, step: int) -> Files:
    return entered(step) | {"stacks.txt": stacks}


def log(text: str) -> Files:
    return {"output.log": text}


def in_flight(*entries: dict[str, object]) -> Files:
    return {"collectives.json": json.dumps({"entries": entries or None})}


def frames(*places: str) -> str:
    lines = [f'  File "{file}", line 1 in {function}' for file, function in (place.split(":") for place in places)]
    return "\n".join(["Current thread 0x02 (most recent call first):", *lines, ""])


WAITING = frames("/site/torch/distributed/distributed_c10d.py:all_reduce", "train.py:step")
WAITING_FOR_WORK = frames("lanes.py:wait", "train.py:step")
IN_BACKWARD = frames("/site/torch/autograd/graph.py:_engine_run_backward", "train.py:step")
BROADCASTING = frames("/site/torch/nn/parallel/distributed.py:_distributed_broadcast_coalesced", "train.py:step")
COMPUTING = frames("train.py:tokenize", "train.py:step")
FATAL = "Fatal Python error: Segmentation fault\n\n"
DECODING = frames("loader.py:decode", "/lib/python3.11/threading.py:_bootstrap")
OTHER_THREAD = frames("threading.py:wait").replace("Current thread", "Thread")
IMPORTING = frames("/v/torch/autograd/__init__.py:<module>", "/v/torch/distributed/rpc/__init__.py:<module>")
IN_HARNESS = frames(
    "/p/pytest_aorta/launch/process/last_words.py:<lambda>",
    "/p/torch/nn/module.py:call",
    "/home/me/train.py:step",
    "<frozen runpy>:_run_code",
    "/p/pytest_aorta/worker/lifecycle.py:run_rank",
)
LIBRARIES = [f"/lib/python3.11/site-packages/torch/nn/m{number}.py:call" for number in range(9)]
AT_WAIT = "all_reduce (torch/distributed/distributed_c10d.py:1) < step (train.py:1)"
AT_COMPUTE = "tokenize (train.py:1) < step (train.py:1)"


@pytest.fixture(autouse=True)
def plan_file(tmp_path: Path) -> None:
    write_plan_file(tmp_path)


def diagnose(run_dir: Path, left: Left) -> LaunchFailure:
    """Write the files and return the failure, whose first line names its kind and its rank."""
    for rank, files in left.ranks.items():
        for name, content in files.items():
            write_rank_file(run_dir, rank, name, content)
    if left.exits:
        failures = [{"rank": rank, "pid": 9, "exit_code": code} for rank, code in left.exits.items()]
        (run_dir / "agent.json").write_text(json.dumps({"failures": failures, "running": left.running}))
    plan = make_plan(run_dir, world=World(left.size, "cpu"), starts_ranks=left.starts_ranks)
    found = launch_failure(plan, left.outcome)
    assert found is not None
    lines = found.text.splitlines()
    assert lines[0].startswith(f"toy on {left.size} cpu ranks: ")
    assert f": {found.kind}" in lines[0]
    assert found.rank is None or re.search(rf"ranks? (\d+, )*{found.rank}\b", found.text)
    assert lines[-1].endswith(str(run_dir))
    return found


def test_commit_that_lacks_an_untracked_file_is_said_to_be_without_them(tmp_path):
    for rank in (0, 1):
        error = raised(rank, "No module named 'helper'", "ModuleNotFoundError")["error.json"]
        write_rank_file(tmp_path, rank, "error.json", error)
    worktree = Worktree(tmp_path, "a" * 40, tmp_path, tmp_path)
    plan = make_plan(tmp_path, reference=Reference("main", "python", tmp_path, worktree))
    failure = launch_failure(plan, EXITED)
    assert failure is not None
    assert "files of main are those of its commit, without untracked ones and submodules" in failure.details


def test_chain_of_errors_whose_last_has_no_frame_ends_with_the_cause(tmp_path):
    chain = (
        "KeyError: 'a'\n\nThe above exception was the direct cause of the following exception:\n\nValueError: boom\n"
    )
    text = diagnose(tmp_path, Left({0: raised(1, text=chain)})).text
    assert "KeyError: 'a'" in text
    assert "direct cause" not in text


def check_parts(text: str, parts: tuple[str, ...]) -> None:
    """Check that the text has the parts in this order, the first part in its first line."""
    assert parts[0] in text.splitlines()[0]
    place = 0
    for part in parts:
        assert part in text[place:], text
        place = text.index(part, place) + len(part)


ERRORS = {
    "earliest by nanoseconds": (
        Left({0: raised(1_700_000_000_000_000_002), 1: raised(1_700_000_000_000_000_001, "the cause")}),
        "rank exception: rank 1 failed first: ValueError: the cause",
        'Traceback (most recent call last):\n  File "train.py", line 3\n',
        "  then rank 0: ValueError: boom",
    ),
    "exit code after the last step": (
        Left({0: stuck(frames("/torch/a.py:wait"), 31) | RETURNED, 1: entered(31)}, exits={1: 3}),
        "rank 1 failed first: exit code 3",
        "  then rank 0: stopped in step 31\n",
    ),
    "rank whose value is NaN first": (
        Left(
            {
                0: not_finite(1, "loss of rank 0 is nan first in step 11 of 30; look", 11),
                1: not_finite(2, "parameter a of rank 1 is NaN first after step 10; look", 10, after=True),
            }
        ),
        "rank 1 failed first: NotFinite: parameter a of rank 1 is NaN first after step 10",
        "\n  then rank 0: NotFinite: loss of rank 0 is nan first in step 11 of 30",
    ),
    "exit code before the errors of its peers": (
        Left({0: lost_peer(1), 1: log("first\nUSDT: profiler_start\nlast words\n")}, exits={1: 3}),
        "rank 1 failed first: exit code 3",
        "\n  | first\n  | last words\n  then rank 0: connection to a peer lost (follows from rank 1)",
    ),
    "killed while torchrun is stopped": (
        Left({0: {"pid": "7"}, 1: {"pid": "8"}}, ended(EndReason.RANK_GONE, -9), exits={1: -9}),
        "rank 1 failed first: signal SIGKILL",
        "next: look for rank 1 in dmesg",
    ),
    "the device of a GPU on a machine without": (
        Left({0: raised(1, "Found no NVIDIA driver on your system. Please check", "RuntimeError")}),
        "rank 0 failed first: RuntimeError: Found no NVIDIA driver on your system. Please check",
        'next: take the device "cuda" if torch.cuda.is_available() else "cpu"',
    ),
    "NCCL on a machine without GPUs": (
        Left({0: raised(1, "Distributed package doesn't have NCCL built in", "RuntimeError")}),
        "rank 0 failed first: RuntimeError: Distributed package doesn't have NCCL built in",
        "next: call init_process_group() without a backend",
    ),
    "script that starts ranks in each rank": (
        Left({0: raised(1, "process 0 terminated with exit code 1", "ProcessExitedException")}),
        "rank 0 failed first: ProcessExitedException: process 0 terminated",
        "next: where the script starts its ranks itself, launch it as a command: aorta init -- python SCRIPT",
    ),
    "fatal signal of a rank that was still ending": (
        Left({0: lost_peer(1), 1: stuck(FATAL + COMPUTING, 3)}),
        "rank 1 failed first: signal SIGSEGV",
        "  then rank 0: connection to a peer lost (follows from rank 1)",
    ),
    "fatal signal of another thread": (
        Left({1: stuck(f"{FATAL}{DECODING}\n{WAITING.replace('Current thread', 'Thread')}", 3)}),
        "signal SIGSEGV",
        "\n  at decode (loader.py:1)\n",
    ),
    "out of memory": (
        Left({1: raised(5, "CUDA out of memory", "OutOfMemoryError")}),
        "out of memory: rank 1 failed first",
    ),
    "failed after its result": (Left({0: DONE, 1: DONE}, exits={1: 7}), "rank 1 failed first: exit code 7"),
    "many failures": (
        Left({rank: raised(rank, "abcdefgh"[rank]) for rank in range(8)}),
        "rank 0 failed first",
        *(f"  then rank {rank}: ValueError: {'abcdefgh'[rank]}\n" for rank in range(1, 5)),
        "  then ranks 5-7: other errors",
    ),
    "ranks that ended in one way": (
        Left(
            {0: raised(2, "layer 1 of 4"), 1: raised(1, "layer 1 of 4"), 7: raised(2, "layer 7 of 4")}
            | {rank: lost_peer(3, f"{PEER_CLOSED} [127.0.0.1]:{rank}") for rank in (2, 3, 4)}
            | {rank: stuck(COMPUTING, rank) for rank in (5, 6)},
            exits={8: -6},
        ),
        "rank 1 failed first",
        "  then rank 0: the same error\n",
        "  then ranks 2-4: connection to a peer lost (follows from rank 1)\n",
        "  then rank 7: the same error with other numbers\n",
        "  then rank 8: signal SIGABRT (follows from rank 1)\n",
        "  then ranks 5, 6: stopped in steps 5 to 6",
    ),
    "ended without an error before its peers lost it": (
        Left({0: DONE | entered(5), 1: lost_peer(1, "Connection reset by peer")}),
        "rank 0 ended without an error in step 5, and then rank 1 failed: RuntimeError: Connection reset by peer",
    ),
    "gave up before peers that then lost their connection to it": (
        Left({0: lost_peer(2, TIMED_OUT), 1: lost_peer(1)}),
        f"rank 0 failed first: RuntimeError: {TIMED_OUT}",
    ),
    "agent was stopping the rank with an exit code": (
        Left({0: raised(1), 1: {"pid": "8"}}, exits={0: 1, 1: 5}, running=(1,)),
        "rank 0 failed first",
    ),
    "lost its pipe to the rank with an exit code": (
        Left({0: raised(1, "EPIPE", "OSError"), 1: {"pid": "8"}}, exits={0: 1, 1: 5}, running=(1,)),
        "rank 1 failed first",
    ),
    "SIGSEGV before another exit code": (Left({}, exits={0: 1, 1: -11}), "rank 1 failed first: signal SIGSEGV"),
    "error before SIGABRT": (Left({1: raised(5)}, exits={0: -6}), "rank 1 failed first: ValueError: boom"),
    "error before SIGTERM": (Left({1: raised(5)}, exits={0: -15, 1: 1}), "rank 1 failed first: ValueError: boom"),
    **{
        f"error before {outcome.reason}": (
            Left({0: stuck(WAITING, 4), 1: stuck("", 4) | raised(5)}, outcome),
            "rank exception: rank 1 failed first: ValueError: boom",
        )
        for outcome in (AT_LIMIT, STRAGGLED)
    },
    "result left by a rank that lost its peers": (
        Left({0: DONE | entered(4) | lost_peer(2), 1: lost_peer(1, TIMED_OUT)}),
        "rank 1 failed first",
        "\n  rank 0 had left a result in step 4, and waited for the other ranks\n",
    ),
    "stopped ranks with their collective": (
        Left(
            {0: stuck(WAITING, 3) | in_flight({"profiling_name": "nccl:all_reduce", "collective_seq_id": 2})},
            exits={0: -15, 1: -9},
        ),
        "rank 1 failed first: signal SIGKILL",
        "  rank 0, step 3: in nccl:all_reduce number 2, all_reduce (torch/distributed/distributed_c10d.py:1)",
    ),
    "position where the first rank is a victim": (
        Left({0: lost_peer(1, "Timed out waiting 48000ms for recv operation"), 1: stuck(COMPUTING, 2)}),
        "",
        f"  rank 1, step 2: {AT_COMPUTE}",
    ),
    "result missing": (
        Left({0: DONE}, ENDED_WELL),
        "result missing: rank 1 exited with code 0 and left no result; if "
        "the script replaces its process, as by os.execv, launch it by run_command",
        "\n  ranks/1/output.log is empty\n",
    ),
    "process left": (
        Left({0: DONE, 1: DONE}, ended(status=0, survivors=(41, 42))),
        "process left: a process outlived the launch",
        "processes [41, 42] could not be ended; their devices stay leased",
    ),
    **{f"error file {text!r}": (Left({1: {"error.json": text}}), "toy on 2 cpu ranks") for text in ("", "{", "[]")},
}


@each_of("case", ERRORS)
def test_first_failure_is_named_and_what_follows_from_it(tmp_path, case):
    left, *parts = case
    check_parts(diagnose(tmp_path, left).text, tuple(parts))


@pytest.mark.parametrize(
    "complaint",
    [
        "Connection closed by peer [127.0.0.1]:3",
        "read: connection reset by peer",
        "Broken pipe",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "[c10d] recvValue failed on SocketImpl",
        TIMED_OUT,
        "wait timeout after 32000ms, keys: /default_pg/0//cpu//0/1",
        "Wait timeout",
        "Timeout waiting for key: default_pg/0//cpu//0/1 after 32000 ms",
    ],
)
def test_rank_that_complains_about_its_peer_comes_last_however_early(tmp_path, complaint):
    check_parts(diagnose(tmp_path, Left({0: lost_peer(1, complaint), 1: raised(2)})).text, ("rank 1 failed first",))


@pytest.mark.parametrize(("code", "name"), [(-11, "SIGSEGV"), (-9, "SIGKILL"), (-15, "SIGTERM"), (-99, "99")])
def test_signal_is_named_before_its_peers_complaints(tmp_path, code, name):
    headline = diagnose(tmp_path, Left({0: lost_peer(1)}, exits={1: code})).text.splitlines()[0]
    assert headline.startswith("toy on 2 cpu ranks: rank 1 failed first: signal ")
    assert name in headline


TRACE = 'Traceback (most recent call last):\n  File "/a/train.py", line 3, in step\n'
INNER = 'Traceback (most recent call last):\n  File "data.py", line 9, in load\nKeyError: 3\n'
CAUGHT = f"Caught KeyError in DataLoader worker process 0.\nOriginal {INNER}"
CUDA = "CUDA error\nCompile with TORCH_USE_CUDA_DSA"
FAILED_RUN = f"{TRACE}    run()\ntorch.AcceleratorError: {CUDA}\n"
SYNTAX = '  File "train.py", line 1\n    def main(:\n             ^\nSyntaxError: invalid syntax\n'
WATCHED = '  File "site-packages/pytest_aorta/worker/observing.py", line 352, in wrapped\n    return original()\n'
IN_TORCH = '  File "site-packages/torch/autograd/graph.py", line 9, in backward\n    run_backward()\n'
# Files of rank 0 -> the end of the first line, and the lines after it.
SHOWN = {
    "message of several lines is written once": (
        raised(1, CUDA, "AcceleratorError", FAILED_RUN) | log(f"loading\n{FAILED_RUN}"),
        "AcceleratorError: CUDA error",
        f"    Compile with TORCH_USE_CUDA_DSA\n{TRACE}    run()\n  | loading\n",
    ),
    "message that ends with a traceback of its type is shown once": (
        raised(1, CAUGHT, "KeyError", f"{TRACE}KeyError: {CAUGHT}\n"),
        "KeyError: Caught KeyError in DataLoader worker process 0.",
        f'    Original Traceback (most recent call last):\n  File "data.py", line 9, in load\n    KeyError: 3\n{TRACE}',
    ),
    "functions of torch that are watched are shown without who watches": (
        raised(1, text=f"{TRACE}    loss.backward()\n{WATCHED}{IN_TORCH}ValueError: boom\n"),
        "ValueError: boom",
        f"{TRACE}    loss.backward()\n{IN_TORCH}",
    ),
    "error of a watched function's watcher is shown where it was raised": (
        raised(1, text=f"{TRACE}    loss.backward()\n{WATCHED}ValueError: boom\n"),
        "ValueError: boom",
        f"{TRACE}    loss.backward()\n{WATCHED}",
    ),
    "notes of an error are kept": (
        raised(1, text=f"{TRACE}ValueError: boom\nwhile loading shard 7\n"),
        "ValueError: boom",
        f"{TRACE}while loading shard 7\n",
    ),
    "error without frames is its message alone": (
        raised(1, "no", "AssertionError", "AssertionError: no\n") | log("many\nwords\nAssertionError: no\n"),
        "AssertionError: no",
        "",
    ),
    "script that returned without a step is shown with its last lines": (
        RETURNED
        | raised(1, "no step", "RuntimeError", "RuntimeError: no step\n")
        | log("found no GPU, done\nRuntimeError: no step\n"),
        "RuntimeError: no step",
        "  | found no GPU, done\n",
    ),
    "line of a script that can not be compiled": (
        raised(1, "invalid syntax (train.py, line 1)", "SyntaxError", SYNTAX),
        "SyntaxError: invalid syntax (train.py, line 1)",
        SYNTAX.removesuffix("SyntaxError: invalid syntax\n"),
    ),
}


@each_of("files, headline, rest", SHOWN)
def test_error_is_shown_once_with_its_message_and_its_frames(tmp_path, files, headline, rest):
    first, *lines = diagnose(tmp_path, Left({0: files})).text.splitlines()
    assert first.endswith(headline)
    assert lines[:-1] == rest.splitlines()


# The kernel keeps the lowest byte of an exit code.
EXITS = [("3", "exit code 3"), ("-1", "exit code 255"), ("set DATA_DIR", "exit code 1: set DATA_DIR")]


@pytest.mark.parametrize(("code", "text"), EXITS)
def test_script_that_exits_is_reported_with_its_exit_code(tmp_path, code, text):
    found = diagnose(tmp_path, Left({1: raised(1, code, "SystemExit", f"{TRACE}SystemExit: {code}\n")}))
    assert (found.kind, found.rank) == ("exit code", 1)
    check_parts(found.text, (f"rank 1 failed first: {text}", TRACE, "  ranks/1/output.log is empty"))


WATCHDOG = "[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType={}, N=1"
GAVE_UP = "  then rank 0: gave up waiting for a peer (follows from rank 1)"
COLLECTIVE, ELSEWHERE = "hang in collective", "hang elsewhere"
# What was left -> kind and rank of the failure, and parts of its text.
HANGS = {
    **{
        f"not in the collective that a peer {name}": (
            Left({0: stuck(stacks, 5), 1: stuck(COMPUTING, 4)}, AT_LIMIT),
            (COLLECTIVE, 1),
            "rank 0 waits for rank 1",
            f"rank 1, step 4: {AT_COMPUTE}",
        )
        for name, stacks in (
            ("is in", WAITING),
            ("waits for", WAITING_FOR_WORK),
            ("reduces in backward", IN_BACKWARD),
            ("broadcasts buffers in", BROADCASTING),
        )
    },
    "all in collectives": (Left({0: stuck(WAITING, 5), 1: stuck(WAITING, 4)}, AT_LIMIT), (COLLECTIVE, 1), ""),
    **{
        f"ended before the others at {outcome.reason}": (
            Left({0: DONE | entered(4), **{rank: stuck(WAITING, 5) for rank in (1, 2, 3)}}, outcome),
            (COLLECTIVE, 0),
            f"{limit}; ranks 1-3 wait for rank 0, which ended without an error in step 4",
        )
        for outcome, limit in (
            (AT_LIMIT, "time limit of 60 s reached"),
            (STRAGGLED, "a rank was done for 60 s and others were not"),
        )
    },
    "did not start": (
        Left({0: STARTED | raised(1, "wait timeout after 800ms, keys: /default_pg/0//cpu//0/1", "DistStoreError")}),
        ("rendezvous", 1),
        f"rank 1 did not start, and rank 0 gave up waiting\n{GAVE_UP}\nplan",
    ),
    "killed without a trace": (
        Left({0: entered(4) | lost_peer(1, TIMED_OUT), 1: entered(4)}, exits={0: 1}, running=(1,)),
        (COLLECTIVE, 1),
        f"rank 0 gave up waiting for rank 1\n  rank 1, step 4: no stack, and output.log is empty\n{GAVE_UP}\nplan",
    ),
    "ran on": (
        Left(
            {0: stuck("", 4) | timed_out_at(7), 1: stuck(COMPUTING, 5), 2: stuck(WAITING, 4), 3: stuck(COMPUTING, 5)},
            exits={0: 1},
            running=(1, 2, 3),
        ),
        (COLLECTIVE, 1),
        "rank 0 gave up waiting for ranks 1, 3\n  ranks 1, 3, step 5: ",
        f"{GAVE_UP}\n  rank 0, step 4: step (train.py:7)\n  rank 2, step 4: {AT_WAIT}\nplan",
    ),
    "error of a rank that was stopped at the limit": (
        Left({0: stuck(WAITING, 4), 1: stuck(COMPUTING, 4) | raised(5, "terminated", "RuntimeError")}, AT_LIMIT),
        (COLLECTIVE, 1),
        "rank 0 waits for rank 1",
    ),
    "in different collectives": (
        Left({rank: stuck("", 4) | timed_out_at(line) for rank, line in enumerate((7, 8, 7))}),
        ("rank exception", 0),
        "",
        '  File "train.py", line 7, in step\n    reduce()\n  rank 1, step 4: step (train.py:8)\n'
        "  then ranks 1, 2: the same error\nplan",
    ),
    "straggler": (
        Left({0: DONE, 1: stuck(COMPUTING, 4)}, STRAGGLED),
        (ELSEWHERE, 1),
        "a rank was done for 60 s and others were not",
    ),
    "watchdog of NCCL": (
        Left({0: log(WATCHDOG.format("ALLREDUCE")), 1: log("nothing")}, exits={0: -6}),
        (COLLECTIVE, 1),
        "rank 0 timed out in ALLREDUCE number 5; rank 1 not in this collective",
    ),
    "watchdogs of NCCL in different collectives": (
        Left(
            {rank: log(WATCHDOG.format(kind)) for rank, kind in enumerate(("ALLREDUCE", "BROADCAST"))},
            exits={0: -6, 1: -6},
        ),
        (COLLECTIVE, 0),
        "rank 0 timed out in ALLREDUCE number 5 and rank 1 timed out in BROADCAST number 5",
    ),
    "without stacks and output": (
        Left({0: STARTED}, AT_LIMIT),
        (ELSEWHERE, 0),
        "",
        "\n  ranks 0, 1, step 0: no stack, and output.log is empty\n",
    ),
    "without stacks": (
        Left({0: {"pid": "7"} | log("\n".join(f"line {number}" for number in range(50)))}, AT_LIMIT),
        (ELSEWHERE, 0),
        "",
        "rank 0, step 0: no stack; the log ends with: line 48 | line 49",
    ),
    "frames of the harness are left out": (
        Left({0: stuck(IN_HARNESS, 2)}, AT_LIMIT),
        (ELSEWHERE, 1),
        "",
        "\n  rank 0, step 2: call (torch/nn/module.py:1) < step (home/me/train.py:1)\n",
    ),
    "users' own code is reached": (
        Left({0: stuck(frames(*LIBRARIES, "/home/me/train.py:step", "/home/me/train.py:main"), 2)}, AT_LIMIT),
        (ELSEWHERE, 1),
        "",
        "\n  rank 0, step 2: call (torch/nn/m0.py:1) < call (torch/nn/m1.py:1) < ... < step (home/me/train.py:1)\n",
    ),
    "ranks at one place share a line": (
        Left({rank: stuck(COMPUTING if rank == 3 else WAITING, 7) for rank in range(5)}, AT_LIMIT),
        (COLLECTIVE, 3),
        "ranks 0-2, 4 wait for rank 3\n  rank 3, step 7: tokenize ",
        "\n  ranks 0-2, 4, step 7: all_reduce ",
    ),
    "current thread is located": (
        Left({0: DONE, 1: stuck(OTHER_THREAD + COMPUTING, 7)}, AT_LIMIT),
        (ELSEWHERE, 1),
        f"time limit of 60 s reached; rank 1 in no collective\n  rank 1, step 7: {AT_COMPUTE}\n",
    ),
    "before the first step": (
        Left({rank: stuck(frames(":get_code"), 0) for rank in (0, 1)}, AT_LIMIT),
        (ELSEWHERE, 0),
        "ranks 0, 1 in no collective, before the first measured step: a hang, or a start that takes longer",
        "get_code (:1)",
    ),
    "imports torch.distributed": (
        Left(
            {
                0: stuck(IMPORTING, 0),
                1: stuck(frames("/v/torch/distributed/tensor/_api.py:_ToTorchTensor") + IMPORTING, 0),
            },
            AT_LIMIT,
        ),
        (ELSEWHERE, 0),
        "ranks 0, 1 in no collective",
    ),
}


@each_of("case", HANGS)
def test_hang_names_the_rank_that_others_wait_for_and_where_ranks_are(tmp_path, case):
    left, named, *parts = case
    found = diagnose(tmp_path, left)
    assert (found.kind, found.rank) == named
    check_parts(found.text, ("", *parts))


@pytest.mark.parametrize("reason", [EndReason.RANK_ERROR, EndReason.TIME_LIMIT])
def test_rank_that_the_guard_stopped_is_not_said_to_have_exited(tmp_path, reason):
    left = Left({0: entered(4) | lost_peer(1, TIMED_OUT), 1: entered(4) | {"pid": "8"}}, ended(reason, None))
    assert "rank 1 ended without a result" in diagnose(tmp_path, left).text
    text = diagnose(tmp_path, replace(left, outcome=replace(left.outcome, stopped=(5, 8)))).text
    check_parts(text, (f"{COLLECTIVE}: rank 0 gave up waiting for rank 1", "  rank 1, step 4: no stack"))


@pytest.mark.parametrize("has_result", [False, True])
@pytest.mark.parametrize(("steps", "reached"), [(5, " in step 5"), (0, "")], ids=str)
def test_rank_that_stays_after_its_script_returned_is_named_with_its_steps(tmp_path, has_result, steps, reached):
    ran = RETURNED | (DONE if has_result else NOTHING)
    leaving = frames("/torch/distributed/c10d.py:barrier", "worker/lifecycle.py:finish")
    staying = frames("worker/lifecycle.py:run_script")
    text = diagnose(tmp_path, Left({0: ran | stuck(leaving, steps), 1: ran | stuck(staying, steps)}, AT_LIMIT)).text
    check_parts(text, ("process left", f"; rank 1 did not leave after its script returned{reached}\n"))
    assert f"rank 1, step {steps}: run_script" in text.splitlines()[1]


@pytest.mark.parametrize(
    ("reason", "headline"),
    [
        (EndReason.TIME_LIMIT, "rendezvous: no rank started; time limit of 60 s reached"),
        (EndReason.OUTPUT_CAP, "output cap: logs exceed 64 MiB, rank 0 wrote most"),
        (EndReason.GUARD_LOST, "guard lost: the process that watches the ranks was killed"),
    ],
)
def test_reason_of_the_guard_is_the_headline(tmp_path, reason, headline):
    check_parts(diagnose(tmp_path, Left({}, ended(reason, None))).text, (headline,))


@pytest.mark.parametrize(
    ("ranks", "headline"),
    [
        ({}, "rendezvous: no rank started; {} ended with exit code 1"),
        ({0: {"pid": "7"}}, "rendezvous: {} ended with exit code 1 before any rank failed; ranks 0, 1 left no result"),
    ],
)
@pytest.mark.parametrize("launcher", [LauncherKind.TORCHRUN, LauncherKind.FORKSERVER])
def test_agent_that_failed_before_any_rank_is_named_with_its_log(tmp_path, ranks, headline, launcher):
    (tmp_path / "agent.log").write_text("rendezvous failed\n")
    text = diagnose(tmp_path, Left(ranks, replace(ended(status=1), launcher=launcher))).text
    check_parts(text, (headline.format(launcher), "  | rendezvous failed"))


def test_full_disk_of_the_run_folder_is_named(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    text = diagnose(tmp_path, Left({}, ended(status=1))).text
    check_parts(text, ("rendezvous: no rank started", f"{tmp_path} can't be written: No space left on device"))


@pytest.mark.parametrize("reason", [EndReason.EXIT, EndReason.TIME_LIMIT, EndReason.RANK_GONE, EndReason.GUARD_LOST])
@pytest.mark.parametrize("is_partly_there", [False, True])
def test_run_folder_that_the_script_deleted_is_named(tmp_path, reason, is_partly_there):
    shutil.rmtree(tmp_path)
    if is_partly_there:
        write_rank_file(tmp_path, 1, "result.json", "{}")
    found = launch_failure(make_plan(tmp_path), ended(reason))
    assert (found.kind, found.rank) == ("results deleted", None)
    assert f"the launch's folder {tmp_path} was deleted during the launch" in found.text
    assert found.text.endswith("(--aorta-results; aorta run: --results)")


def test_huge_log_is_read_from_its_end_only(tmp_path):
    path = write_rank_file(tmp_path, 0, "output.log", "")
    with path.open("wb") as file:
        file.truncate(200 << 20)
        file.seek(0, 2)
        file.write(b"\n\xff last words\n")
    assert "last words" in diagnose(tmp_path, Left({}, exits={0: 3})).text


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (EndReason.NODE_LOST, "node lost"),
        (EndReason.NODE_LAUNCHER, "node launcher"),
        (EndReason.NODE_MISMATCH, "node mismatch"),
    ],
)
def test_failure_of_a_node_is_reported_in_the_words_of_the_nodes(tmp_path, reason, kind):
    (tmp_path / "agent.log").write_text("== node 1 (b) ==\nno such partition\n")
    write_rank_file(tmp_path, 0, "error.json", raised(1, "connection closed by peer")["error.json"])
    plan = make_plan(tmp_path, world=World(4, "cpu", nodes=2))
    found = launch_failure(plan, LaunchOutcome(reason, None, (), (), 1.0, detail="node 1 (b) was lost"))
    assert (found.kind, found.rank) == (kind, None)
    check_parts(found.text, (f"on 4 cpu ranks of 2 nodes: {kind}: node 1 (b) was lost", "  | no such partition"))


@each_of("reason, rank", {"own": ("planted in step 5", 0), "peer's": ("Connection closed by peer [127.0.0.1]:3", 1)})
def test_error_that_a_script_handled_by_exiting_is_named(tmp_path, reason, rank):
    document = {"time_ns": 1, "type": "SystemExit", "message": "1", "traceback": "", "after": f"RuntimeError: {reason}"}
    found = diagnose(tmp_path, Left({0: {"error.json": json.dumps(document)}, 1: raised(2)}))
    assert found.rank == rank
    assert rank or found.headline.endswith("rank 0 failed first: exit code 1 after RuntimeError: planted in step 5")


def test_long_message_is_left_to_its_file(tmp_path):
    message = "\n".join(f"size mismatch for layers.{number}.weight" for number in range(40))
    shown = diagnose(tmp_path, Left({1: raised(1, message, text="")})).text
    assert "layers.12." in shown
    assert "layers.13." not in shown
    assert "... 27 more lines in ranks/1/error.json" in shown


def test_long_traceback_keeps_the_frames_of_the_user_and_the_innermost_ones(tmp_path):
    frame = '  File "{}.py", line 1, in f\n    call()\n    ^^^^^^\n'
    library = "".join(frame.format(f"/v/lib/python3.11/site-packages/torch/m{number}") for number in range(40))
    text = f"Traceback (most recent call last):\n{library}{frame.format('train')}{library}ValueError: boom\n"
    shown = diagnose(tmp_path, Left({1: raised(1, text=text)})).text
    assert re.findall(r"(\d+) lines left out, see ranks/1/error.json", shown) == ["234"]
    assert re.findall(r'(\w+)\.py"', shown) == ["train", "m38", "m39"]


def recorded(rank: int, *names: str, retired: int | None = None, **changes: object) -> Files:
    """Return the record of a rank that has entered collectives, all of which but the last have ended."""
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
    return in_flight(*entries)


@each_of("stacks", {"computing": COMPUTING, "waiting": WAITING, "in backward": IN_BACKWARD})
def test_rank_that_never_entered_the_collective_is_named_by_the_records(tmp_path, stacks):
    waiting = stuck(IN_BACKWARD, 5) | recorded(0, "broadcast", "all_reduce 64", "broadcast")
    absent = stuck(stacks, 5) | recorded(1, "broadcast", "all_reduce 64", retired=2)
    found = diagnose(tmp_path, Left({0: waiting, 1: absent}, AT_LIMIT))
    assert (found.kind, found.rank) == (COLLECTIVE, 1)
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


@each_of("whole, skipping", SKIPPED)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_left_its_own_order_of_collectives_is_named(tmp_path, rank, whole, skipping):
    ranks = {
        number: stuck(IN_BACKWARD, 5 + (number == rank))
        | recorded(number, *(skipping if number == rank else whole), retired=len(skipping) - 1)
        for number in range(2)
    }
    found = diagnose(tmp_path, Left(ranks, AT_LIMIT))
    assert (found.kind, found.rank) == (COLLECTIVE, rank)
    assert f"ranks entered different collectives: rank {rank} gloo:{skipping[-1].split()[0]}" in found.headline
    assert found.headline.count(f"(number {len(skipping)})") == 2


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (
            0,
            "; all have entered gloo:all_reduce number 2 in step 5: the limit is too short, the loop makes no further "
            "step, or the network has failed",
        ),
        (1, "; rank 0 waits for rank 1, which never entered gloo:all_reduce number 2"),
    ],
)
def test_ranks_that_are_all_in_one_collective_wait_for_none_of_them(tmp_path, behind, said):
    names = [["broadcast", "all_reduce"], ["broadcast", "all_reduce"][: 2 - behind]]
    ranks = {rank: stuck(IN_BACKWARD, 5) | recorded(rank, *names[rank], retired=1) for rank in range(2)}
    assert diagnose(tmp_path, Left(ranks, AT_LIMIT)).headline.endswith(said)


def test_different_collectives_are_shown_with_the_error_that_they_led_to(tmp_path):
    ranks = {0: stuck(IN_BACKWARD, 5) | recorded(0, "barrier"), 1: lost_peer(1) | recorded(1, "broadcast")}
    assert (
        "  ranks entered different collectives: rank 0 gloo:barrier (number 1) and rank 1 gloo:broadcast of [[1]]"
    ) in diagnose(tmp_path, Left(ranks)).text


@pytest.mark.parametrize(
    "changes", [{"is_p2p": True}, {"profiling_name": "nccl:coalesced"}, {"process_group": ["7", "pipeline"]}], ids=str
)
def test_sends_and_collectives_of_groups_that_a_rank_never_used_are_not_missed(tmp_path, changes):
    ranks = {
        0: stuck(WAITING, 5) | recorded(0, "all_reduce", **changes),
        1: stuck(COMPUTING, 5) | recorded(1, "broadcast", retired=1),
    }
    assert "never entered" not in diagnose(tmp_path, Left(ranks, AT_LIMIT)).text


def test_rank_that_waits_for_its_data_is_not_waiting_for_peers(tmp_path):
    ranks = {rank: stuck(WAITING_FOR_WORK, 5) | recorded(rank, "all_reduce", retired=1) for rank in range(2)}
    text = diagnose(tmp_path, Left(ranks, AT_LIMIT)).text
    assert "hang elsewhere: time limit of 60 s reached; ranks 0, 1 in no collective" in text


VANISHED = (
    "rank 1 ended without a result or an error, as by SIGKILL, by os._exit, or as a wrapper that starts the training "
    "in another process, which it has to replace itself by (exec)"
)
COMMAND_ENDED = {0: "the command train.py ended with exit code 0", 1: "the command train.py ended with exit code 1"}


@each_of(
    "ranks, outcome, said, rank",
    {
        "none": ({}, ended(status=1), f"no rank started; {COMMAND_ENDED[1]}", None),
        "absent": ({0: DONE}, ended(status=0), f"rank 1 never reported; {COMMAND_ENDED[0]}", 1),
        "absent at the limit": ({0: stuck("", 3)}, AT_LIMIT, "rank 1 never reported; time limit of 60 s reached", 1),
        "absent beside gone": (
            {0: DONE},
            ended(EndReason.RANK_GONE, None),
            "rank 1 never reported; the command train.py was still running",
            1,
        ),
        "killed": ({0: DONE, 1: STARTED}, ended(status=1), f"{VANISHED}; {COMMAND_ENDED[1]}", 1),
        "exit code": (
            {0: DONE, 1: DONE},
            ended(status=1),
            "exit code 1 of the command train.py; every rank left its result",
            None,
        ),
        "raised": ({0: DONE, 1: raised(5)}, ended(status=0), "rank 1 failed first: ValueError: boom", 1),
        "peer lost": ({0: lost_peer(5), 1: STARTED}, ended(status=1), f"{VANISHED}; {COMMAND_ENDED[1]}", 1),
        "gone": (
            {0: DONE, 1: STARTED},
            ended(EndReason.RANK_GONE, None),
            f"{VANISHED}; the command train.py was still run",
            1,
        ),
    },
)
def test_rank_of_a_command_that_did_not_end_well_is_named(tmp_path, ranks, outcome, said, rank):
    found = diagnose(tmp_path, Left(ranks, outcome, starts_ranks=True))
    assert said in found.headline
    assert found.rank == rank
