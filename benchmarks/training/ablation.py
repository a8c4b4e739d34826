"""Pairs of launches with and without a lever, in rounds that fit into a time budget, and the tables of the results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.training.programs import Measured, Program
from pytest_aorta.common.errors import AortaError
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import decide_pairs

_METRIC = METRICS["step_time_p50"]
# The relative change of the step time from which a table calls it a change.
_TOLERANCE = 0.005


Launch = Callable[[Program], Measured]


@dataclass(frozen=True)
class Lever:
    """A change of a program.

    Attributes:
        min_gpus: the fewest GPUs on which the lever can have an effect.
    """

    name: str
    reference: Program
    program: Program
    min_gpus: int = 1


def triples(levers: Sequence[Lever]) -> list[tuple[Lever, ...]]:
    """Group adjacent levers with the same reference in twos; one launch of the reference between them serves both."""
    grouped = []
    for _, same in groupby(levers, lambda lever: lever.reference.name):
        run = list(same)
        grouped += [tuple(run[first : first + 2]) for first in range(0, len(run), 2)]
    return grouped


@dataclass
class Launches:
    """The launches of one program: measurements and wall times in seconds."""

    program: str
    measured: list[Measured] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return the row of the table of programs: medians over launches."""
        first, last = (_middle(self.measured, name) for name in ("first_loss", "last_loss"))
        return [
            self.program,
            str(len(self.measured)),
            f"{_middle(self.measured, 'step_p50_ms'):.1f} ms",
            f"{_middle(self.measured, 'tokens_per_s'):,.0f}",
            _gib(_middle(self.measured, "allocated_gib")),
            _gib(_middle(self.measured, "reserved_gib")),
            " to ".join(f"{loss:.3f}" for loss in (first, last) if loss is not None),
        ]


@dataclass
class Effect:
    """The pairs of one lever, reference first."""

    lever: str
    reference: str
    pairs: list[tuple[Measured, Measured]] = field(default_factory=list)
    error: str = ""

    def change(self, device: str) -> tuple[float, float, float]:
        """Return the relative change of the step time, and its 95% interval."""
        pairs = [(math.log(with_lever.step_p50_ms), math.log(plain.step_p50_ms)) for plain, with_lever in self.pairs]
        within = default_variance(_METRIC, device).within
        decision = decide_pairs(pairs, within, _TOLERANCE, max_pairs=len(pairs), worse=_METRIC.worse)
        return math.expm1(decision.effect), math.expm1(decision.low), math.expm1(decision.high)

    def cells(self, device: str) -> list[str]:
        """Return the row of the table of levers."""
        if not self.pairs:
            return [self.lever, self.reference, "0", f"failed: {self.error.splitlines()[0][:200]}", *[""] * 4]
        change, low, high = self.change(device)
        plain, with_lever = zip(*self.pairs, strict=True)
        memory = [
            f"{_gib(_middle(plain, name))} to {_gib(_middle(with_lever, name))}"
            for name in ("allocated_gib", "reserved_gib")
        ]
        return [
            self.lever,
            self.reference,
            str(len(self.pairs)),
            f"{change:+.1%} [{low:+.1%}, {high:+.1%}]",
            "faster" if high < 0 else "slower" if low > 0 else "no difference shown",
            *memory,
            "; ".join(f"{_middle(side, 'last_loss'):.3f}" for side in (plain, with_lever)),
        ]


@dataclass
class Ablation:
    """All launches so far, and the effects of levers; files are rewritten after each launch.

    Attributes:
        budget_s: seconds within which all launches are expected to end; the first launches are always made.
        folder: where llama.md and llama.json are written.
        device: ``cuda`` or ``cpu``, which decides the prior of launches' variance.
        left_out: levers that were not measured -> why.
    """

    budget_s: float
    folder: Path | None
    device: str
    clock: Callable[[], float] = time.monotonic
    facts: dict[str, Any] = field(default_factory=dict)
    launches: dict[str, Launches] = field(default_factory=dict)
    effects: dict[str, Effect] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start the clock of the budget."""
        self._began_s = self.clock()

    def run_round(self, levers: Sequence[Lever], launch: Launch, *, reverse: bool) -> list[str]:
        """Launch one or two levers with their reference between them; return why launches failed.

        A lever that has failed before is not launched again. Nothing is launched if the budget would be exceeded.
        """
        open_levers = [lever for lever in levers if not self._effect(lever).error]
        programs = _in_order(open_levers, reverse=reverse)
        if not programs or not self._fits(programs):
            return []
        done = {program.name: self._measure(program, launch) for program in programs}
        reference = done[open_levers[0].reference.name]
        errors = []
        for lever in open_levers:
            effect, own = self._effect(lever), done[lever.program.name]
            if isinstance(reference, Measured) and isinstance(own, Measured):
                effect.pairs.append((reference, own))
            else:
                effect.error = own if isinstance(own, str) else f"the reference failed: {reference}"
                errors.append(f"{lever.name}: {effect.error}")
        self.write()
        return errors

    def is_measured(self, lever: Lever) -> bool:
        """Return whether the lever has a pair of launches."""
        return bool(self._effect(lever).pairs)

    def text(self) -> str:
        """Return facts, levers and programs as Markdown."""
        effects = [effect for effect in self.effects.values() if effect.pairs or effect.error]
        heads = ["lever", "added to", "pairs", "step [95%]", "", "allocated", "reserved", "last losses"]
        sides = ["program", "launches", "step p50", "tokens/s a GPU", "allocated", "reserved", "loss"]
        parts = [
            "\n".join(f"- {key}: {value}" for key, value in self.facts.items()),
            _table(heads, [effect.cells(self.device) for effect in effects]),
            _table(sides, [launches.cells() for launches in self.launches.values() if launches.measured]),
            "\n".join(f"- left out: {name}, {reason}" for name, reason in self.left_out.items()),
            "\n".join(f"- not measured: {name}, for which the budget had no time" for name in self._unmeasured()),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _unmeasured(self) -> list[str]:
        return [effect.lever for effect in self.effects.values() if not effect.pairs and not effect.error]

    def write(self) -> None:
        """Rewrite both files, since the run may end at any time."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "llama.md").write_text(self.text(), encoding="utf-8")
        document = {
            "facts": self.facts,
            "levers": [asdict(effect) | {"change": self._change(effect)} for effect in self.effects.values()],
            "programs": [asdict(launches) for launches in self.launches.values()],
            "left_out": self.left_out,
        }
        (self.folder / "llama.json").write_text(json.dumps(document, indent=1), encoding="utf-8")

    def _change(self, effect: Effect) -> tuple[float, float, float] | None:
        return effect.change(self.device) if effect.pairs else None

    def _effect(self, lever: Lever) -> Effect:
        return self.effects.setdefault(lever.name, Effect(lever.name, lever.reference.name))

    def _fits(self, programs: Sequence[Program]) -> bool:
        """Return whether launches are expected to end within the budget; a new program counts as the longest.

        The last launch of each program counts, because the first one of a run starts the fork server.
        """
        known = {name: launches.wall_s[-1] for name, launches in self.launches.items() if launches.wall_s}
        longest = max(known.values(), default=0.0)
        expected_s = sum(known.get(program.name, longest) for program in programs)
        return self.clock() - self._began_s + expected_s <= self.budget_s

    def _measure(self, program: Program, launch: Launch) -> Measured | str:
        """Return the measurements of a launch, or why it failed."""
        launches = self.launches.setdefault(program.name, Launches(program.name))
        began_s = self.clock()
        try:
            one = launch(program)
        except AortaError as error:
            return str(error)
        finally:
            launches.wall_s.append(self.clock() - began_s)
        launches.measured.append(one)
        self.write()
        return one


def _in_order(levers: Sequence[Lever], *, reverse: bool) -> list[Program]:
    """Return the programs to launch: a reference between two levers, or beside a single one."""
    if not levers:
        return []
    programs = [levers[0].program, levers[0].reference, *(lever.program for lever in levers[1:])]
    return programs[::-1] if reverse else programs


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        for row in (heads, ["---"] * len(heads), *rows):
            yield f"| {' | '.join(row)} |"

    return "\n".join(lines()) if rows else ""


def _middle(launches: Sequence[Measured], name: str) -> float | None:
    """Return the median of a measurement over launches, or None if a launch lacks it."""
    values = [getattr(one, name) for one in launches]
    return None if None in values else median(values)


def _gib(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} GiB"
