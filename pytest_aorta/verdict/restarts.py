"""Sentences on what a restart lost: what first differs between a run straight on and one that was restarted. Pure.

What a step begins with comes before what it computes: weights and state as loaded, samples, settings, random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from pytest_aorta.common.text import counted, ranks_text
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.series import (
    AVERAGES,
    BATCH,
    BUFFERS,
    NOT_LOADED,
    NOTED_STEPS,
    PARAMETERS,
    RANDOM,
    STATE,
    SeriesFacts,
    other_ranks,
    other_tensors,
)
from pytest_aorta.verdict.bitwise import Difference
from pytest_aorta.verdict.edits import name_of

# In a script's arguments, the step that a part of a restarted run ends with.
STEPS = "{steps}"
AT_END = f"a script that saves only at its end needs {STEPS} in its arguments, and steps=N"
# In a sentence, that a restart has begun anew, and that it made more or fewer steps.
BEGAN_ANEW, NUM_STEPS = "nothing was loaded", "number of steps: "
# What is loaded -> its name in a sentence, and what to look at.
_LOADED = {
    PARAMETERS: ("weights", "whether each rank saves and loads the model's state, and from the last checkpoint"),
    STATE: ("optimizer state", "whether each rank saves and loads it"),
    AVERAGES: ("averaged model", "whether it is saved and loaded"),
}
_SAMPLES = "the sampler's epoch and position, and the state of the loader's generator"
_BUFFERS = "whether each rank saves and loads its buffers, such as the statistics of BatchNorm"
_RANDOM = "whether each rank saves and loads its own random state"
_LENGTH = "the number of the step that is saved, and the samples that are skipped"
# The begin of a setting's name -> what to look at.
_SETTINGS = {
    "lr": "; look at whether the learning-rate scheduler is saved and loaded, and stepped once a step",
    "the ": "; look at whether the gradient scaler is saved and loaded",
}
# The first step that differs, and the sentence.
_Found: TypeAlias = Iterator[tuple[int, str]]


def lost(
    here: LaunchFacts, there: LaunchFacts, stops: Sequence[int], first: Difference | None, steps: Sequence[int]
) -> list[str]:
    """Return sentences on the first step in which a restarted run ``here`` differs from one straight on.

    Args:
        here: The steps of all parts of the restarted run.
        there: The run straight on.
        stops: The steps after which training was restarted.
        first: The first difference of what both computed; None if there is none.
        steps: The number of steps of both runs.
    """
    more = f"{counted(abs(steps[0] - steps[1]), 'step')} {'more' if steps[0] > steps[1] else 'fewer'}"
    said = f"{NUM_STEPS}{steps[0]} when restarted, {more} than straight on; look at {_LENGTH}"
    counts = [said] if steps[0] != steps[1] else []
    if first is None:
        return counts
    # What a restart has loaded counts as what there is after the step before.
    last = first.step + (first.step in stops)
    kinds: tuple[Callable[[SeriesFacts, SeriesFacts, int], _Found], ...] = (_begun, _random)
    if first.metric.startswith(BUFFERS[:-1]):
        kinds = (_buffers,)
    pairs = list(zip(here.series, there.series, strict=False))
    # A generator that nothing seeds differs from the first step on, and explains nothing after the restart.
    found = (
        [one for pair in pairs for one in kind(*pair, last) if kind is _begun or one[0] > stops[0]] for kind in kinds
    )
    causes = next(filter(None, found), [(first.step, f"{first.metric}: differs first after step {first.step}")])
    begin = min(step for step, _ in causes)
    number = sum(stop < begin for stop in stops)
    if not number:
        return [f"step {begin}, before the restart, differs between launches of the same code; look at the seeds"]
    which = f"restart {number} of {len(stops)}: " if len(stops) > 1 else ""
    found_first = [which + text for text in dict.fromkeys(text for step, text in causes if step == begin)]
    # After another checkpoint was loaded, the number of steps follows; else other samples follow from it.
    is_other = any(step == begin for pair in pairs for step, _ in _loaded(*pair, last))
    return found_first + counts if is_other else counts + found_first


def _loaded(here: SeriesFacts, there: SeriesFacts, last: int) -> _Found:
    """Yield what was loaded that differs, by the first step that begins with it, up to step ``last``."""
    for kind, (name, look) in _LOADED.items():
        one, other = (side if kind == PARAMETERS else getattr(side, kind) for side in (here, there))
        for step, who in _first(one.weights, other.weights, last - 1):
            is_loaded = any(value not in NOT_LOADED for value in one.weights[str(step)])
            others = f"others on {who}{other_tensors(one, other, str(step))}{_like(one.weights, other.weights, step)}"
            yield step + 1, f"{name}: step {step + 1} begins with {others if is_loaded else 'none'}; look at {look}"


def _begun(here: SeriesFacts, there: SeriesFacts, last: int) -> _Found:
    """Yield what steps begin with, each where it first differs, up to step ``last``."""
    yield from _loaded(here, there, last)
    for step, who in _first(here.batches, there.batches, last):
        are_same = here.samples.get(str(step)) == there.samples.get(str(step))
        what = "the same samples in another order" if are_same else "other samples"
        like = _like(here.batches, there.batches, step)
        yield step, f"order of data: {what} in step {step} on {who}{like}; look at {_SAMPLES}"
    for _, name, group, step, values, before in _settings(here, there, last):
        # The shape of the batch follows from its samples.
        if name != RANDOM and not (name == BATCH and other_ranks(here.batches, there.batches, str(step))):
            of = f" of {group}" if group else ""
            look = next((text for begin, text in _SETTINGS.items() if name.startswith(begin)), "")
            at = f"in step {step}{_like(values, before, step)}, and was {before[str(step)]}"
            yield step, f"{name_of(name)}{of} is {values[str(step)]} {at}{look}"


def _buffers(here: SeriesFacts, there: SeriesFacts, last: int) -> _Found:
    """Yield which buffers differ after a step that computed the same with other ones."""
    one, other = here.buffers, there.buffers
    for step, who in _first(one.weights, other.weights, last):
        names = other_tensors(one, other, str(step))
        yield step, f"buffers: step {step} ends with others on {who}{names}; look at {_BUFFERS}"


def _random(here: SeriesFacts, there: SeriesFacts, last: int) -> _Found:
    """Yield which generators of random numbers have another state, on which ranks."""
    ranks: dict[tuple[int, str], list[int]] = {}
    for rank, name, group, step, *_ in _settings(here, there, last):
        if name == RANDOM:
            ranks.setdefault((step, group or "torch"), []).append(rank)
    for (step, name), own in ranks.items():
        yield step, f"random state: {name}'s generator differs in step {step} on {ranks_text(own)}; look at {_RANDOM}"


def _settings(
    here: SeriesFacts, there: SeriesFacts, last: int
) -> Iterator[tuple[int, str, str, int, dict[str, str], dict[str, str]]]:
    """Yield the rank, name and group of each setting that differs, with the first step and both sides' values."""
    # Of a workload, later steps have no settings.
    last = last if there.weights else min(last, NOTED_STEPS)
    for rank in range(max(len(here.settings), len(there.settings))):
        ours, theirs = ({(one.name, one.group): one for one in side.settings_of(rank)} for side in (here, there))
        for key in [key for key in ours if key in theirs]:
            values, others = (
                {str(step): side[key].at(step) for step in range(1, there.num_steps + 1)} for side in (ours, theirs)
            )
            if step := next((step for step in range(1, last + 1) if values[str(step)] != others[str(step)]), 0):
                yield rank, *key, step, values, others


def _first(here: Mapping[str, list[str]], there: Mapping[str, list[str]], last: int) -> list[tuple[int, str]]:
    """Return the first step until ``last`` whose hashes differ, with the ranks; empty if there is none."""
    found = ((step, other_ranks(here, there, str(step))) for step in range(1, last + 1))
    return [one for one in found if one[1]][:1]


def _like(values: Mapping[str, object], others: Mapping[str, object], step: int) -> str:
    """Return in which other step, the closest before if any, the run straight on has the value of a step.

    Weights from before step 1 are those of step 1 too if its learning rate is 0, as at the begin of a warmup.
    """
    steps = [int(at) for at, other in others.items() if other == values[str(step)]]
    closest = sorted(steps, key=lambda at: (at > 0, at > step, abs(at - step)))[:1]
    return "".join(
        f", as in step {at} of the run straight on" if at else f", as before step 1: {BEGAN_ANEW}; {AT_END}"
        for at in closest
    )
