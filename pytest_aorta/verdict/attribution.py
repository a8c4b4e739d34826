"""The class of a change's cause: the method, the environment, the machine or the code. Pure.

A cause is named where a fact that seldom changes has changed with the values, or where other tests or the speed check
of the machine tell. Where nothing tells, no cause is named.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pytest_aorta.common.text import counted
from pytest_aorta.plan.device_kind import ByDevice
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.provenance import version_text
from pytest_aorta.result.system import OWN_VERSION
from pytest_aorta.verdict.environment import machine_changes
from pytest_aorta.verdict.verdicts import Verdict

# The case of the speed check in a history, and its metrics -> what they time.
SPEED_CASE = "aorta doctor --check"
SPEED_METRICS = {"time_compute_ms": "GEMM", "time_copy_ms": "copy", "time_all_reduce_ms": "all-reduce"}
# The least change of a median of the speed check that counts, if all launches show it.
_SPEED_CHANGE = ByDevice(0.05, cpu=0.25)
# Launches of speed checks that stand for one side, those nearest in time.
_NEAREST = 6
# So many tests that all moved at once tell of the machine.
LEAST_TESTS = 3


class Cause(StrEnum):
    """The class of a change's cause."""

    METHOD = "method"
    """The way of measuring or of judging."""
    ENVIRONMENT = "environment"
    """Versions and settings outside of the code."""
    MACHINE = "machine"
    """The speed of the machine."""
    CODE = "code"
    """The version of the code."""


@dataclass(frozen=True)
class Sides:
    """The launches before and after a change, and what is known of the machine and of other tests.

    Attributes:
        before, after: A launch of each side.
        judged: How the way of judging differs; empty if it does not.
        is_exact: Whether the metric depends on the code and the environment alone.
        in_turn: Whether both sides were launched in turn.
        are_next: Whether the sides are neighbors in a history. What seldom changes is then likelier than the code, of
            which every version has another one.
        checks: Launches of the machine's speed check.
        moved, stayed: How many other tests changed at the same time, and how many did not.
        other_machine: Whether all launches before are of one machine, and all launches after of another one.
    """

    before: LaunchFacts
    after: LaunchFacts
    judged: Sequence[str] = ()
    is_exact: bool = False
    in_turn: bool = False
    are_next: bool = False
    checks: Launches = ()
    moved: int = 0
    stayed: int = 0
    other_machine: bool = False

    def cause(self) -> tuple[Cause, str] | None:
        """Return the cause with what tells it, or None if nothing does."""
        sides = self.before, self.after
        codes = [(one.provenance.commit, one.provenance.dirty) for one in sides]
        is_other = codes[0] != codes[1] and all(commit for commit, _ in codes)
        method = [*self.judged, *_changes("measured steps", *(one.num_steps for one in sides))]
        method += _changes("launcher", *(one.launcher for one in sides))
        harness = _changes("pytest-aorta", *(one.description.system.get(OWN_VERSION) for one in sides))
        environment = machine_changes(self.after, self.before, is_exact=self.is_exact)
        if self.in_turn:
            environment += filter(None, [self.before.provenance.side.partition(": ")[2]])
        if is_other and (harness or environment) and not (method or self.are_next):
            return None
        machine, steady = self._machine()
        versions = " -> ".join(version_text(*code) for code in codes)
        found = {
            Cause.METHOD: ", ".join(method + harness),
            Cause.ENVIRONMENT: ", ".join(environment),
            Cause.MACHINE: machine,
            Cause.CODE: f"{versions}; {steady}" if is_other and steady else "",
        }
        return next(((cause, why) for cause, why in found.items() if why), None)

    def line(self, test: str, command: Callable[..., str]) -> str:
        """Return the cause, what tells it, and the command that settles it unless an A/B has; empty if nothing tells.

        ``command`` adds options to the command that repeats ``test``.
        """
        if (found := self.cause()) is None:
            return ""
        cause, why = found
        return f"{cause}: {why}" + ("" if self.in_turn else f"; to settle it: {self._remedy(cause, test, command)}")

    def _remedy(self, cause: Cause, test: str, command: Callable[..., str]) -> str:
        before, after = ((side.provenance.commit or "HEAD")[:12] for side in (self.before, self.after))
        there, here = (side.environment.get("torch") for side in (self.before, self.after))
        match cause:
            case Cause.MACHINE:
                return "aorta doctor --check"
            # Changes that are in no commit are in none that a bisection tries.
            case Cause.CODE if before != after and not self.after.provenance.dirty:
                return shlex.join(["aorta", "bisect", before, after, "--", test])
            case Cause.ENVIRONMENT if there != here:
                return command(f"--aorta-ab=with:torch=={there}")
        return command(f"--aorta-ab={before}")

    def _machine(self) -> tuple[str, str]:
        """Return what tells that the machine's speed changed, and what tells that it did not; either may be empty."""
        if self.is_exact:
            return "", "the metric does not depend on the machine's speed"
        if self.in_turn:
            return "", "both were launched in turn"
        if (hot := self.after.description.throttled) and not self.before.description.throttled:
            return hot, ""
        speed = _speed_change(self.checks, self.before, self.after)
        if speed is not None:
            return speed, "" if speed else "the speed check of the machine did not move"
        if self.other_machine:
            return "another machine, or the same one after a boot", ""
        tests = counted(1 + self.moved + self.stayed, "test")
        if self.stayed:
            return "", f"{1 + self.moved} of {tests} moved"
        return (f"all {tests} moved at once" if 1 + self.moved >= LEAST_TESTS else ""), ""


def _changes(name: str, there: object, here: object) -> list[str]:
    return [f"{name} {there} -> {here}"] if there and here and there != here else []


def judged_otherwise(before: Sequence[Verdict], after: Sequence[Verdict]) -> list[str]:
    """Return how the way of judging differs between verdicts: tolerances, and revisions of the baseline."""
    there, tolerances, revisions = {row.metric: row for row in before}, list[str](), list[str]()
    for old, row in [(there[row.metric], row) for row in after if row.metric in there]:
        tolerances += _changes(f"tolerance of {row.metric}", str(old.tolerance), str(row.tolerance))
        revisions += _changes("baseline revision", old.reference.revision, row.reference.revision)
    return [*dict.fromkeys(tolerances + revisions)]


def _speed_change(checks: Launches, before: LaunchFacts, after: LaunchFacts) -> str | None:
    """Return what of the speed check moved between two launches; empty if nothing did, and None if it is not known."""
    first_s, last_s = before.provenance.moment_s, after.provenance.moment_s
    middle_s = (first_s + last_s) / 2
    near = (
        sorted(
            (one for one in checks if (one.provenance.moment_s > middle_s) is later),
            key=lambda one: abs(one.provenance.moment_s - moment_s),
        )[:_NEAREST]
        for moment_s, later in ((first_s, False), (last_s, True))
    )
    there, here = near
    return "; ".join(speed_changes(there, here)) if there and here else None


def speed_changes(there: Launches, here: Launches) -> Iterator[str]:
    """Yield a text on each time of the speed check that changed between two groups of its launches."""
    for metric, name in SPEED_METRICS.items():
        before, after = ([one.metrics[metric] for one in side if metric in one.metrics] for side in (there, here))
        if not before or not after or not (max(before) < min(after) or max(after) < min(before)):
            continue
        change = median(after) / median(before) - 1
        if abs(change) > _SPEED_CHANGE[here[0].device]:
            yield f"{name} {median(before):.3g} -> {median(after):.3g} ms ({change:+.0%}) in the speed check"
