"""Comparison of steps as they are scheduled on the nominal machine, rank by rank. Pure.

A schedule depends on the step's graph of streams alone, so one launch decides. Each rank is compared with the worst
value that the same rank has in any launch of the other side, and the rank that changed for the worst decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.trace.kineto_places import alike_layers
from pytest_aorta.result.trace.profiled_steps import Cost
from pytest_aorta.result.trace.schedule import Issued, Schedule
from pytest_aorta.verdict.by_rank import Costs, code_of
from pytest_aorta.verdict.noise import RESET
from pytest_aorta.verdict.rows import Row
from pytest_aorta.verdict.statistics.decision import Outcome, Scale
from pytest_aorta.verdict.verdicts import MissingPart, Verdict

_MOST_NAMED = 3
_NO_COMPUTE = "no compute"


def judge_schedules(row: Row, value: Callable[[Schedule], float]) -> Verdict:
    """Return the verdict on a value of schedules: a regression if it is worse on any rank than allowed."""
    worse, scale, there = row.metric.worse, row.metric.scale, [*map(_by_rank, row.others)]
    excesses: list[tuple[float, int, float, float]] = []
    for rank, schedule in (item for launch in row.launches for item in _by_rank(launch).items()):
        if known := [value(other[rank]) for other in there if rank in other]:
            before, after = max(known, key=lambda one: worse * one), value(schedule)
            allowed = (row.tolerance.value or 0.0) * (1.0 if scale is Scale.POINTS else before)
            change = worse * (after - before)
            excesses.append((max(0.0, change - allowed) or min(0.0, change + allowed), rank, before, after))
    if not excesses:
        return row.missing(MissingPart.BASELINE_VALUE, f"the {row.reference} has graphs of other ranks alone; {RESET}")
    excess, rank, before, after = max(excesses)
    outcome = Outcome.REGRESSION if excess > 0 else Outcome.IMPROVED if excess < 0 else Outcome.PASS
    details = []
    if outcome is Outcome.REGRESSION:
        counts, lost = _cause(row.launches, row.others, rank)
        # Where no collective lost what hides it, the step has fewer hidden ones, or other work.
        works = (Costs(row.launches, row.others, cost).text_of(rank) for cost in (Cost.COLLECTIVES, Cost.OPERATORS))
        details = [_sentence(counts, lost) if lost else next(filter(None, works), counts)]
        details += filter(None, [row.other_versions()])
    delta = after - before if scale is Scale.POINTS else after / before - 1 if before else None
    return row.decided(outcome, float(after), float(before), "; ".join(details), delta)


def _by_rank(facts: LaunchFacts) -> dict[int, Schedule]:
    return {rank: group.schedule for group in facts.schedules for rank in group.ranks}


def is_unchanged(launches: Launches, others: Launches) -> bool:
    """Return whether all launches have schedules, and the same ones; what explains them is not looked at."""
    first, *further = (
        {rank: schedule.values for rank, schedule in _by_rank(facts).items()} for facts in (*launches, *others)
    )
    return bool(first) and all(other == first for other in further)


def cause_of_schedule(launches: Launches, others: Launches) -> str:
    """Return which collectives of the first rank that differs lost what could hide them; empty if no rank differs."""
    return _sentence(*_cause(launches, others))


def _sentence(counts: str, lost: Sequence[str]) -> str:
    return f"{counts}: {'; '.join(lost)}" if lost else counts


def _cause(launches: Launches, others: Launches, rank: int | None = None) -> tuple[str, list[str]]:
    """Return the counts of exposed collectives of a rank, or of the first that differs, and what each kind lost.

    Of a baseline, the first launch alone says how each collective was issued.
    """
    after, before = _by_rank(launches[-1]), _by_rank(others[0])
    both = [(after[one], before[one]) for one in after if one in before and rank in (None, one)]
    here, there = next((pair for pair in both if pair[0].values != pair[1].values), (None, None))
    if here is None or there is None:
        return "", []
    changed = _beside(here.issued, there.issued) if there.issued else []
    lost = (
        [(one, was) for one, was in changed if one.serialized and not (was and was.serialized)]
        or [(one, was) for one, was in changed if one.exposed_us > (was.exposed_us if was else 0.0)]
        or [(one, was) for one, was in changed if one.late_us > (was.late_us if was else 0.0)]
        or [(one, was) for one, was in changed if was is None]
    )
    groups: dict[tuple[str, str, str], list[_Change]] = defaultdict(list)
    for change in (_Change.of(one, was) for one, was in lost):
        groups[change.issued.name, alike_layers(change.issued.of), change.what].append(change)
    texts = [_text(changes) for changes in sorted(groups.values(), key=len, reverse=True)[:_MOST_NAMED]]
    counts = f"{here.serialized} of {here.collectives} collectives have nothing to hide under, "
    counts += str(there.serialized) + (f" of {there.collectives}" if here.collectives != there.collectives else "")
    return f"{counts} before", texts


def _beside(issued: Sequence[Issued], before: Sequence[Issued]) -> list[tuple[Issued, Issued | None]]:
    """Return each collective beside the one that it was, of the same kind and module; None beside a new one.

    Where their number changed, those of the same code belong together.
    """
    found: dict[int, Issued | None] = {}
    for kind in {(one.name, one.of) for one in issued}:
        now, was = ([one for one in side if (one.name, one.of) == kind] for side in (issued, before))
        new_codes, codes = ([code_of(one.place) if len(now) != len(was) else "" for one in side] for side in (now, was))
        for _, i, j, k, m in SequenceMatcher(a=codes, b=new_codes, autojunk=False).get_opcodes():
            found |= {id(one): other for one, other in zip_longest(now[k:m], was[i:j]) if one is not None}
    return [(one, found[id(one)]) for one in issued]


class _Change(NamedTuple):
    """A collective, what is other than it was, and both values of it."""

    issued: Issued
    what: str
    now: str = ""
    was: str = ""

    @classmethod
    def of(cls, now: Issued, was: Issued | None) -> _Change:
        """Return the first change of a collective that explains the others."""
        if was is None:
            return cls(now, "is new")
        if now.stream != was.stream:
            return cls(now, "is issued on", f"the {now.stream} stream", f"{was.stream} stream")
        if now.waits_for != was.waits_for:
            return cls(now, "waits for", now.waits_for or _NO_COMPUTE, was.waits_for or _NO_COMPUTE)
        if now.awaited_by != was.awaited_by:
            return cls(now, "is awaited by", now.awaited_by or _NO_COMPUTE, was.awaited_by or _NO_COMPUTE)
        if now.late_us > was.late_us:
            return cls(now, f"waits for rank {now.sender} for", f"{now.late_us:.3g} us", f"{was.late_us:.3g} us")
        return cls(now, "is exposed for", f"{now.exposed_us:.3g} us", f"{was.exposed_us:.3g} us")


def _text(changes: Sequence[_Change]) -> str:
    """Return what changed for collectives of one kind, in the names of the first unless all changed alike."""
    issued, what, now, was = changes[0]
    is_same = all(change[1:] == changes[0][1:] for change in changes)
    module = alike_layers(issued.of) if is_same and len(changes) > 1 else issued.of
    text = f"{issued.name} of {module} {what}" if module else f"{issued.name} {what}"
    text += (f" {now}" if now else "") + (f" (was: {was})" if was else "")
    text += f" at {issued.place}" if issued.place else ""
    return text if is_same else f"{text}, and {len(changes) - 1} more"
