"""Why a launch failed, and which rank failed first: from the evidence in its run folder to one paragraph."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.files import UnreadableFile, read_json
from pytest_aorta.launch import LaunchOutcome
from pytest_aorta.plan import LaunchPlan

_MAX_EVIDENCE_BYTES = 1 << 20
_LOG_TAIL_LINES = 8
# What a rank says when another one has gone: it is a victim, however early it complains.
_PEER_ERROR = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError|recvValue failed|peer (has )?(closed|gone)|socket (closed|timeout)|EPIPE|ECONNRESET"
    r"|timed out waiting|watchdog",
    re.IGNORECASE,
)
_STOPPED_BY_AGENT = (-signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed by itself; ``kind`` is rank exception, out of memory, exit code or signal."""

    rank: int
    kind: str
    message: str
    traceback: str = ""
    is_peer_error: bool = False
    time_ns: int = 0


def launch_failure(plan: LaunchPlan, outcome: LaunchOutcome) -> str | None:
    """The failure's text, None where every rank ended well and left a result.

    The first line gives the class and the first failing rank; then its traceback or last words, and the folder
    with everything.
    """
    unfinished = [rank for rank in range(plan.world.size) if not (_folder(plan, rank) / "result.json").exists()]
    failures = sorted(_exceptions(plan) + _exits(plan), key=_first_cause)
    if outcome.reason == "exit" and outcome.agent_status == 0 and not unfinished and not outcome.survivors:
        return None
    lines = [_headline(plan, outcome, failures, unfinished)]
    if failures and outcome.reason in ("exit", "rank_error"):
        lines += _last_lines(failures[0].traceback) or _log_tail(_folder(plan, failures[0].rank) / "output.log")
        lines += [f"  then rank {other.rank}: {other.message}" for other in failures[1:4]]
    elif outcome.reason in ("exit", "guard_lost"):
        lines += _log_tail(plan.run_dir / "agent.log")
    else:
        for rank in unfinished[:4]:
            lines += _where(plan, rank)
    if outcome.survivors:
        lines.append(f"processes {list(outcome.survivors)} could not be ended; their devices are not usable")
    return "\n".join([*lines, f"plan, logs and stacks: {plan.run_dir}"])


def _headline(plan: LaunchPlan, outcome: LaunchOutcome, failures: list[RankFailure], unfinished: list[int]) -> str:
    name = f"{plan.name} on {plan.world.size} {plan.world.device} ranks"
    waiting = f"without a result: {_ranks(unfinished)}"
    reasons = {
        "time_limit": f"time limit of {plan.timeout_s:g} s reached; {waiting}",
        "straggler": f"a rank was done for {plan.limits.straggler_s:g} s and others were not; {waiting}",
        "output_cap": f"output over {plan.limits.output_cap_bytes >> 20} MiB; {waiting}",
        "parent_gone": "interrupted",
        "guard_lost": "the guard process was killed",
    }
    if outcome.reason in reasons:
        return f"{name}: {reasons[outcome.reason]}"
    if failures:
        first = failures[0]
        return f"{name}: {first.kind}: rank {first.rank} failed first: {first.message}"
    if outcome.agent_status == 0 and not unfinished:
        return f"{name}: processes were left behind"
    if outcome.agent_status == 0:
        return f"{name}: result missing: {_ranks(unfinished)} ended well and left no result.json"
    return f"{name}: torchrun ended with {_exit_text(outcome.agent_status or 0)} before any rank failed; {waiting}"


def _exceptions(plan: LaunchPlan) -> list[RankFailure]:
    failures = []
    for rank in range(plan.world.size):
        document = _evidence(_folder(plan, rank) / "error.json")
        if document is None:
            continue
        message = f"{document['type']}: {document['message']}"
        kind = "out of memory" if "OutOfMemory" in document["type"] else "rank exception"
        peer = bool(_PEER_ERROR.search(document["message"]))
        failures.append(RankFailure(rank, kind, message, document["traceback"], peer, document["time_ns"]))
    return failures


def _exits(plan: LaunchPlan) -> list[RankFailure]:
    document = _evidence(plan.run_dir / "agent.json") or {"failures": []}
    failures = []
    for entry in document["failures"]:
        rank, code = entry["rank"], entry["exit_code"]
        if not (_folder(plan, rank) / "error.json").exists():
            kind = "signal" if code < 0 else "exit code"
            failures.append(RankFailure(rank, kind, _exit_text(code), is_peer_error=code in _STOPPED_BY_AGENT))
    return failures


def _first_cause(failure: RankFailure) -> tuple[bool, bool, int]:
    # A signal outranks the peers' complaints about it, even one that the agent could have sent.
    return failure.is_peer_error, failure.kind != "signal", failure.time_ns


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _where(plan: LaunchPlan, rank: int) -> list[str]:
    """The innermost frames of a rank that was still running, as faulthandler wrote them."""
    stacks = _last_lines(_text(_folder(plan, rank) / "stacks.txt"), limit=10_000)
    own = next((number for number, line in enumerate(stacks) if "Current thread" in line), 0)
    frames = [line.strip() for line in stacks[own:] if line.strip().startswith("File ")][:3]
    if frames:
        return [f"  rank {rank} is at {' < '.join(frames)}"]
    return [f"  rank {rank} left no stack; its log ends:", *_log_tail(_folder(plan, rank) / "output.log")]


def _log_tail(path: Path) -> list[str]:
    return [f"  | {line}" for line in _last_lines(_text(path), _LOG_TAIL_LINES)]


def _last_lines(text: str, limit: int = 12) -> list[str]:
    return [line[:300] for line in text.strip().splitlines()[-limit:]]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_EVIDENCE_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _evidence(path: Path) -> dict[str, Any] | None:
    try:
        document = read_json(path, max_bytes=_MAX_EVIDENCE_BYTES)
    except UnreadableFile:
        return None
    return document if isinstance(document, dict) else None


def _folder(plan: LaunchPlan, rank: int) -> Path:
    return plan.run_dir / "ranks" / str(rank)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" if ranks else "no rank"
