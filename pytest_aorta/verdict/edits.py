"""Sentences on what was edited, from what the steps of a script train with, what they do, and their first loss. Pure.

A sentence is evidence, never a guess: it names values of both sides that differ.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

from pytest_aorta.common.text import counted, ranks_text, some_of
from pytest_aorta.result.facts import Launches
from pytest_aorta.result.series import (
    BATCH,
    BUFFERS,
    GRADIENTS,
    OFF,
    RANDOM,
    HashedParts,
    SeriesFacts,
    Setting,
    came_or_went,
    first_other_weights,
    hashes_by_name,
    other_ranks,
)
from pytest_aorta.result.trace.profiled_steps import Cost
from pytest_aorta.verdict.by_rank import Costs

# Name of a setting -> what it is called. Others are hyperparameters of the optimizer, which have the names of torch.
_NAMES = {
    "lr": "the learning rate",
    "weight_decay": "weight decay",
    BATCH: "the batch",
    "backward passes": "the number of backward passes a step",
    "mode": "the mode of the model",
    "clipped to": "the norm that gradients are clipped to",
    "trained elements": "the number of trained parameters",
}
# A setting with its new value -> the sentence, where the values alone would not tell.
_SENTENCES = {
    ("gradients", "added"): "gradients of the step before are no longer cleared (zero_grad)",
    ("gradients", "cleared"): "gradients of the step before are cleared, and were added to (zero_grad)",
}
# The same where the weights of all steps are equal: so what gradients are added to is zero.
_ZEROED = {
    "added": "gradients of the step before are set to zero, and were set to None (zero_grad)",
    "cleared": "gradients of the step before are set to None, and were set to zero (zero_grad)",
}
# Cost -> what a part of it that changed means.
_COSTS = {
    Cost.COLLECTIVES: "{name}: {before} -> {after} calls a step",
    Cost.FLOPS: "{name} computes {before:,} -> {after:,} FLOPs a step",
    Cost.HOST_COPIES: "the host reads a value {before} -> {after} times a step (.item(), print, float)",
}
# Settings of modules, which are looked at before the first step, after steps 1, 2, 4, 8 and so on, and between as time
# allows. So two launches of the same code agree on them only after these steps.
_LOOKED_AT = {"tied parameters", "dropout", "trained elements"}
# Settings that scripts change from step to step. Another one that changes so is computed by the optimizer: Prodigy's d.
_CHANGED = {*_NAMES, *_LOOKED_AT, "momentum", "betas", "autocast", GRADIENTS, RANDOM}
# What shows in the first step and what shows only in the second one are of one edit.
_FIRST_STEPS = 2
# The least difference from 1 of a ratio that several ranks share.
_LEAST_SCALE = 0.01
# The first step that differs, and the sentence.
_Found: TypeAlias = Iterator[tuple[int, str]]


class _Change(NamedTuple):
    step: int
    name: str
    before: str
    after: str
    group: str = ""


def edits(launches: Launches, others: Launches) -> list[str]:
    """Return sentences on the first step that differs, of the kind of evidence that explains the others.

    Other samples may follow from another batch, other collectives from other samples, and another loss from all of
    these: so what a step trains with comes first, then its samples, then what it does, then its numbers.
    """
    if not others:
        return []
    here = launches[-1]
    there = max(others, key=lambda one: sum(len(rank) for series in one.series for rank in series.settings))
    pairs, names = _pairs(here.series, there.series)
    pairs = [(one.beside(other), other) for one, other in pairs]
    # Those that are never given a value vary.
    if any(first_other_weights(one.series, there.series, BUFFERS) for one in others):
        pairs = [(one.replace(buffers=HashedParts()), other) for one, other in pairs]
    settings = partial(_settings, do_losses_repeat=_do_repeat(others, lambda series: series.loss))
    # Launches of the same code may have other random numbers, as without a seed.
    is_seeded = _do_repeat(others, lambda one: [[own for own in rank if own.name == RANDOM] for rank in one.settings])
    random = _of_series(pairs, _random) if is_seeded else []
    found = (
        [*names, *_of_series(pairs, _classes, _names, settings)]
        or _of_series(pairs, _samples)
        # What a step computes may be drawn.
        or ((costs := [*_costs(launches, others)]) and [*random, *costs])
        or [
            *(random or _of_series(pairs, _initial)),
            *([*_numbers(pairs)] or _of_series(pairs, _buffers)),
            *_of_series(pairs, _zeroed, _length),
        ]
    )
    first = max(min((step for step, _ in found), default=0), _FIRST_STEPS)
    return list(dict.fromkeys(text for step, text in found if step <= first))


def _pairs(
    here: Sequence[SeriesFacts], there: Sequence[SeriesFacts]
) -> tuple[list[tuple[SeriesFacts, SeriesFacts]], list[tuple[int, str]]]:
    """Return each optimizer of both sides, by name and then in order, with a sentence on those that one side lacks."""
    sides = [{one.name: one for one in side} for side in (here, there)]
    pairs = [(one, sides[1][name]) for name, one in sides[0].items() if name in sides[1]]
    alone = [[one for name, one in side.items() if name not in other] for side, other in (sides, sides[::-1])]
    if len(here) == len(there) or not pairs:
        return [*pairs, *zip(*alone, strict=False)], []
    return pairs, [(0, f"optimizers came or went: {some_of(came_or_went(*sides))}")]


def _of_series(
    pairs: Sequence[tuple[SeriesFacts, SeriesFacts]], *kinds: Callable[[SeriesFacts, SeriesFacts], _Found]
) -> list[tuple[int, str]]:
    """Return the sentences, each with its optimizer unless it is of all."""
    found = [(*one, here.name) for here, there in pairs for kind in kinds for one in kind(here, there)]
    of = Counter(text for _, text, _ in found)
    return [(step, text if of[text] == len(pairs) else f"{name}: {text}") for step, text, name in found]


def _do_repeat(launches: Launches, value: Callable[[SeriesFacts], object]) -> bool:
    """Return whether a value of all series is the same in each of some launches."""
    first, *others = ([value(one) for one in launch.series] for launch in launches)
    return all(one == first for one in others)


def _classes(here: SeriesFacts, there: SeriesFacts) -> _Found:
    """Yield a sentence on another class of optimizer or model."""
    sides = (side.name.partition(" of ") for side in (there, here))
    for what, before, after in zip(("the optimizer", "", "the model"), *sides, strict=True):
        if what and before != after:
            yield 0, f"{what} changed: {before or 'unknown'} -> {after or 'unknown'}"


def _names(here: SeriesFacts, there: SeriesFacts) -> _Found:
    """Yield a sentence on parameters, and on buffers, that only one side has."""
    for kind, one, other in (("parameters", here, there), ("buffers", here.buffers, there.buffers)):
        # Of a model that has come to train more, launches that hash other steps may name the tensors of other steps.
        if one.parameters.keys() & other.parameters.keys() and (names := came_or_went(one.names, other.names)):
            yield 0, f"{kind} came or went: {some_of(names)}"


def _settings(here: SeriesFacts, there: SeriesFacts, *, do_losses_repeat: bool) -> _Found:
    """Yield a sentence on each setting; one for all parameters for which it changed alike.

    A setting that changes after the loss is no cause of that.
    """
    ranks = zip(here.loss, there.loss, strict=False) if do_losses_repeat else ()
    other = [int(step) for one, two in ranks for step in one if one[step] != two.get(step)]
    # A side that ends early has no settings of further steps.
    end = min(here.num_steps, there.num_steps)
    gone = {*here.names} ^ {*there.names} if here.names and there.names else set()
    groups: dict[_Change, dict[str, list[int]]] = {}
    # A schedule may count backward passes, and change other hyperparameters with the learning rate.
    first = "backward passes", "lr"
    changes = _changes(here, there)
    for change in sorted(changes, key=lambda one: (one.step, *(one.name != name for name in first), one)):
        last = end if change.name in _LOOKED_AT else min([end, *other])
        is_edit = change.name != RANDOM and not _is_zeroed(change, here, there)
        if is_edit and change.group not in gone and change.step <= last:
            groups.setdefault(change._replace(group=""), {})[change.group] = changes[change]
    every = {setting.group for settings in here.settings for setting in settings if setting.group}
    # Where groups or ranks have values of their own, as a rate by layer, one sentence is for all.
    for _, alike in groupby(groups.items(), lambda one: one[0][:2]):
        (change, of), *others = alike
        who = {*chain(*of.values())}
        what = name_of(change.name) + _of([*of], every)
        text = _SENTENCES.get((change.name, change.after), f"{what} changed: {change.before} -> {change.after}")
        is_exact = change.step == 1 or change.name not in _LOOKED_AT
        text += _on(who, max(len(here.settings), len(there.settings)))
        rest = [where for _, one in others for where in (one if any(one) else one[""])]
        place = f"in {counted(len(rest), 'other group')}" if any(of) else f"on {counted(len(rest), 'other rank')}"
        text += f", and otherwise {place}," * bool(rest)
        yield change.step, f"{text} {f'from step {change.step}' if is_exact else f'at step {change.step} or before'}"


def _zeroed(here: SeriesFacts, there: SeriesFacts) -> _Found:
    """Yield a sentence on gradients that are cleared otherwise, which explains no number."""
    for change in _changes(here, there):
        if _is_zeroed(change, here, there):
            yield change.step, _ZEROED[change.after] + f" from step {change.step}"


def _is_zeroed(change: _Change, here: SeriesFacts, there: SeriesFacts) -> bool:
    """Return whether gradients are added to or cleared by a change, and the weights of all steps are equal."""
    if change.name != GRADIENTS or change.after not in _ZEROED:
        return False
    hashed = here.weights.keys() & there.weights.keys()
    return str(change.step) in hashed and all(here.weights[one] == there.weights[one] for one in hashed)


def _on(ranks: Collection[int], count: int) -> str:
    """Return on which of ``count`` ranks something is; empty if on all."""
    return f" on {ranks_text(ranks)}" if len(ranks) < count else ""


def name_of(setting: str) -> str:
    """Return what a setting is called."""
    return _NAMES.get(setting, setting)


def _of(groups: Sequence[str], every: Iterable[str]) -> str:
    # A group without parameters has no name.
    named = [*filter(None, groups)]
    return "" if {*named} in (set(), {*every}) else f" of {some_of(named)}"


def _changes(here: SeriesFacts, there: SeriesFacts) -> dict[_Change, list[int]]:
    """Return the first change of each setting, with the ranks that have it; a single entry is that of all ranks."""
    ranks: dict[_Change, list[int]] = {}
    count = max(len(here.settings), len(there.settings)) if here.settings and there.settings else 0
    for rank in range(count):
        for change in _of_rank(here.settings_of(rank), there.settings_of(rank)):
            ranks.setdefault(change, []).append(rank)
    return ranks


def _of_rank(here: Iterable[Setting], there: Iterable[Setting]) -> Iterator[_Change]:
    """Yield the first change of each setting, of groups that both sides have."""
    sides = _by_group(here, there), _by_group(there, here)
    groups = [{"", *(group for _, group in side)} for side in sides]
    for name, group in sides[0].keys() | sides[1].keys():
        now, before = (side.get((name, group), Setting(name)) for side in sides)
        step = next((step for step in _steps(now, before) if now.at(step) != before.at(step)), None)
        is_computed = name not in _CHANGED and max(len(now.values), len(before.values)) > 1
        if step is not None and not is_computed and all(group in known for known in groups):
            yield _Change(step, name, before.at(step), now.at(step), group)


def _by_group(side: Iterable[Setting], other: Iterable[Setting]) -> dict[tuple[str, str], Setting]:
    """Return the settings by name and group; a group alone, which has no name, stands for all of the other side."""
    joined = [] if any(one.group for one in side) else [one for one in other if one.group]
    names, groups = {one.name for one in joined}, {one.group for one in joined}
    return {(one.name, group): one for one in side for group in (groups if one.name in names else [one.group])}


def _steps(now: Setting, before: Setting) -> list[int]:
    """Return the steps in which both values are known, of those in which one may have changed."""
    steps = sorted(map(int, now.values.keys() | before.values.keys()))
    if now.name not in _LOOKED_AT:
        return steps
    steps = [1, *(1 + (1 << power) for power in range(steps[-1].bit_length() + 1))]
    # Modules that a script has wrapped again are no longer known, and seem to drop and share nothing.
    return [step for step in steps if step == 1 or OFF not in (now.at(step), before.at(step))]


def _samples(here: SeriesFacts, there: SeriesFacts) -> _Found:
    steps = sorted(map(int, here.batches.keys() & there.batches.keys()))
    for step in steps:
        if who := other_ranks(here.batches, there.batches, str(step)):
            is_first = step == 1 or step - 1 in steps
            when = f"from step {step} on" if is_first else f"at step {step} or before"
            are_same = here.samples.get(str(step)) == there.samples.get(str(step))
            what = "the same samples in another order" if are_same else "other samples"
            # Only from the first step on, each sample may be transformed in another way.
            places = "and sampler.set_epoch" if are_same or step > 1 else "the sampler, and transforms"
            yield step, f"data: {what} {when}, on {who}; look at the seed, shuffle, {places}"
            return


def _costs(launches: Launches, others: Launches) -> _Found:
    """Yield sentences on FLOPs, and on each collective, and read of a value, of the first rank that differs."""
    for cost, text in _COSTS.items():
        costs = Costs(launches, others, cost)
        if (change := costs.first()) is None:
            continue
        every = costs.changes(launches[-1])
        parts, before, after = change.parts, change.before, change.after
        ratios = {f"{after.get(name, 0) / before[name]:.5g}" for name in parts if before.get(name)}
        are_all = cost is Cost.FLOPS and len(ratios) == 1 and len(parts) == len(launches[-1].costs[0].costs.flops)
        calls = Costs(launches, others, Cost.OPERATORS).first() if cost is Cost.FLOPS else None
        changed = calls.parts if calls else {}
        if are_all and not changed.keys() & parts.keys():
            factor, who = ratios.pop(), _on([one.rank for one in every if one.parts == parts], len(every))
            yield 1, f"each operator computes {factor} times as much{who}; look at the batch and the length of samples"
            continue
        # Of operators, the one that changed most is named: the others follow.
        for name in [*parts][:1] if cost is Cost.FLOPS else sorted(parts):
            was, now = before.get(name, 0), after.get(name, 0)
            who = _on([one.rank for one in every if name in one.parts], len(every))
            place = costs.place(change, name)
            parted = launches[-1].description.replicas if cost is Cost.COLLECTIVES and now < was else ()
            follows = "".join(f"; replicas differ after step {one.step}" for one in parted[:1])
            if cost is Cost.FLOPS and name in launches[-1].costs[0].costs.operators.keys() - changed.keys():
                follows = " in as many calls; look at shapes, such as the length of samples"
            yield 1, text.format(name=name, before=was, after=now) + who + f" in {place}" * bool(place) + follows


def _initial(here: SeriesFacts, there: SeriesFacts) -> _Found:
    """Yield a sentence on weights before the first step."""
    if who := other_ranks(here.weights, there.weights, "0"):
        of = _of_names(here, there, "0")
        yield 0, f"the initial weights{of} differ on {who}; look at the initialization, and at what is loaded"


def _buffers(here: SeriesFacts, there: SeriesFacts) -> _Found:
    """Yield a sentence on buffers before the first update, which a forward pass may have changed."""
    if who := _other_buffers(here, there, "0"):
        of = _of_names(here.buffers, there.buffers, "0", may_be_all=True)
        yield 0, f"buffers{of} differ on {who} before the first update; look at the data, and at what updates them"


def _of_names(here: HashedParts, there: HashedParts, step: str, *, may_be_all: bool = False) -> str:
    """Return which tensors differ in a step, also if all do where they ``may_be_all``, as buffers of a copy alone."""
    one, two = hashes_by_name(here, there, step)
    names = [name for name in one if one[name] != two.get(name)]
    return f" of {some_of(names)}" if names and (may_be_all or len(names) < len(one)) else ""


def _numbers(pairs: Sequence[tuple[SeriesFacts, SeriesFacts]]) -> _Found:
    """Yield a sentence on the first number that differs, where weights are equal before its step."""
    found = []
    for here, there in pairs:
        steps = here.weights.keys() | {step for curve in (*here.loss, *here.grad_norm) for step in curve}
        for step in sorted(map(int, steps - {"0"})):
            if text := _number(here, there, str(step)):
                before = [side.weights.get(str(step - 1)) for side in (here, there)]
                has_buffers = step > 1 and _other_buffers(here, there, str(step - 1))
                is_first = before[0] and before[0] == before[1] and not has_buffers
                found.append((here.turn(step), step, text if is_first else ""))
                break
    # A step of another optimizer that differs first explains the others.
    first = min(found, default=(0,))[0]
    yield from ((step, text) for turn, step, text in found if text and turn == first)


def _number(here: SeriesFacts, there: SeriesFacts, step: str) -> str:
    """Return a sentence on the first of loss, norm and weights that differs in a step; empty if none does."""
    has_samples = bool(here.batches.get(step))
    # Between steps, a script may change the weights too.
    weights = "weights" if step == "1" else f"weights after step {int(step) - 1}"
    equal = f"with equal {'samples and ' * has_samples}{weights}; look at "
    for what, sides in (("loss", (here.loss, there.loss)), ("gradient norm", (here.grad_norm, there.grad_norm))):
        pairs = [(one.get(step), other.get(step)) for one, other in zip(*sides, strict=False)]
        ranks = [rank for rank, (one, other) in enumerate(pairs) if None not in (one, other) and one != other]
        ratios = {float(f"{one / other:.5g}") for one, other in pairs if one is not None and other}
        if ranks and len(ratios) == 1 and _is_scale(ratio := ratios.pop(), {pairs[rank] for rank in ranks}):
            return f"the {what} of step {step} is {ratio:.5g} times as large {equal}how it is scaled or averaged"
        if ranks and what == "loss":
            who = _on(ranks, len(pairs))
            drawn = "" if step == "1" else "what draws random numbers or changes weights or copies of them before it, "
            places = f"{'augmentation' if has_samples else 'the data'}, {drawn}the forward pass and the loss function"
            return f"the loss of step {step} differs{who} {equal}{places}"
    if not (who := other_ranks(here.weights, there.weights, step)):
        of = _of_names(here.buffers, there.buffers, step, may_be_all=True)
        who = _other_buffers(here, there, step)
        return who and f"buffers{of} differ on {who} after step {step} with equal weights; look at what updates them"
    before, _ = hashes_by_name(here, there, str(int(step) - 1))
    both = hashes_by_name(here, there, step)
    still, new = (
        some_of([name for name, was in before.items() if one.get(name) == was != other.get(name)])
        for one, other in (both, both[::-1])
    )
    if still:
        return (
            f"the update of step {step} no longer changes {still} on {who}; look at what is frozen, or has no gradient"
        )
    if new:
        return f"the update of step {step} now changes {new} on {who}; look at what is frozen, or has no gradient"
    own, theirs = (side.gradients.get(step) for side in (here, there))
    if own and theirs and own != theirs:
        return (
            f"the update of step {step} differs on {who} with equal {weights}, from other gradients before they are "
            "reduced; look at backward, and what the forward pass drops or detaches"
        )
    equal = weights + ", and gradients before they are reduced" * bool(own and theirs)
    backward = "" if own and theirs else "backward, "
    places = f"{backward}how gradients are reduced and clipped, and the optimizer"
    return f"the update of step {step} differs on {who} with equal {equal}; look at {places}"


def _other_buffers(here: SeriesFacts, there: SeriesFacts, step: str) -> str:
    return other_ranks(here.buffers.weights, there.buffers.weights, step)


def _is_scale(factor: float, pairs: Collection[object]) -> bool:
    """Return whether several values have the same ratio, or it is a whole number, as of ranks or micro-batches.

    Ratios close to 1 are the same by chance.
    """
    is_whole = factor != 0 and any(f"{one:.4g}".isdigit() for one in (factor, 1 / factor))
    return abs(factor - 1) > _LEAST_SCALE and (len(pairs) > 1 or is_whole)


def _length(here: SeriesFacts, there: SeriesFacts) -> _Found:
    if here.steps != there.steps:
        yield min(here.num_steps, there.num_steps) + 1, f"{here.steps} were made, and {there.steps} before"


def _random(here: SeriesFacts, there: SeriesFacts) -> _Found:
    for step in sorted({change.step for change in _changes(here, there) if change.name == RANDOM}):
        when = "after the first loss" if step else "when the optimizer was made"
        drawn = ", and at what draws numbers" if step else ""
        yield 1, f"{RANDOM}: torch's generator had another state {when}; look at the seed{drawn}"
