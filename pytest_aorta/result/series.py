"""The optimizers of an unedited script: what each rank recorded of them, and the facts of all ranks."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Self, TypeVar

from pytest_aorta.common.model import (
    Count,
    Finite,
    Milliseconds,
    Model,
    NotNegative,
    Positive,
    Step,
    TensorHash,
    Text,
    WeightHash,
)
from pytest_aorta.common.text import counted, distinct, ranks_text, some_of

# Values of one quantity of one optimizer, over all ranks, that a baseline keeps: evenly spaced steps, and the last one.
_MOST_VALUES = 2048
# Hex digits that are kept of a rank's hash of all parameters, and of the hash of one parameter on all ranks. They only
# name what differs: the complete hashes are compared.
_OF_RANK, _OF_PARAMETER = 8, 4
# In place of the digits, where a rank has hashed no weights in a step. A rank without gradients does differ.
_NO_HASH = "f" * _OF_RANK
_MOST_PARAMETERS = 2000
_MOST_LISTED = 8
# The value of a setting that is not in use.
OFF = "off"
# The setting that has the state of torch's random numbers.
RANDOM = "random numbers"
# What is hashed of a model.
HASHED = PARAMETERS, BUFFERS, STATE, AVERAGES = "weights", "buffers", "state", "averages"
# What changes in each step, such as a scheduled learning rate, is noted in so many first steps and in some later ones.
NOTED_STEPS = 32
# The settings of the batch's shapes, and whether gradients are added to those of the step before.
BATCH, GRADIENTS = "batch", "gradients"
# In place of a hash where a launch that went on from another one has loaded nothing.
NOT_LOADED = "0" * 32
_V = TypeVar("_V")


class Setting(Model, frozen=True, omit_defaults=True):
    """A setting that an optimizer's steps train with, such as a hyperparameter or the shape of the batch.

    Attributes:
        name: what it is; a hyperparameter's name is that of torch.
        group: the first parameter of the group that it is of; empty if the optimizer has one group.
        values: step -> the value from this step on.
    """

    name: Text
    group: str = ""
    values: dict[Step, str | Finite] = {}

    def at(self, step: int) -> str:
        """Return the value in a step as text: that of the last change until then."""
        changed = [known for known in self.values if int(known) <= step]
        value = self.values[max(changed, key=int)] if changed else OFF
        return f"{value:.6g}" if isinstance(value, float) else value


class LocalWeights(Model, frozen=True, omit_defaults=True):
    """Hashes of one rank's own parts of parameters, which may be replicas, shards or different tensors.

    Attributes:
        names: the parameters, sorted.
        shapes: the shape of this rank's part of each parameter.
        tensors: step -> one hash per name, for some steps.
        hashes: step -> hash of all parts after the step; 0: before the first one.
        problem: why a tensor has no hash; empty if all have.
    """

    names: list[str] = []
    shapes: list[list[Count]] = []
    tensors: dict[Step, list[TensorHash]] = {}
    hashes: dict[Step, WeightHash] = {}
    problem: str = ""

    def followed_by(self, later: LocalWeights, done: int, first: int) -> LocalWeights:
        """Return the hashes of ``done`` steps, then those of a launch that went on, from its step ``first`` on."""
        hashes = {**self.hashes, **({str(done): NOT_LOADED} if self.hashes and not first else {})}
        tensors = self.tensors if self.names == later.names else {}
        if not first:
            tensors = {step: row for step, row in tensors.items() if int(step) < done}
        return later.replace(
            tensors=joined_steps(tensors, _from(first, later.tensors), done),
            hashes=joined_steps(hashes, _from(first, later.hashes), done),
            problem=self.problem or later.problem,
        )


def _from(first: int, values: Mapping[str, _V]) -> dict[str, _V]:
    return {step: value for step, value in values.items() if int(step) >= first}


def joined_steps(before: Mapping[str, _V], after: Mapping[str, _V], done: int) -> dict[str, _V]:
    """Return values by step of two launches; the first step of the second one follows ``done`` steps."""
    return {**before, **{str(done + int(step)): value for step, value in after.items()}}


class HashedParts(Model, frozen=True, omit_defaults=True):
    """The begins of the hashes of what all ranks hold of some tensors of one optimizer's model.

    Attributes:
        weights: step -> for each rank, the begin of the hash of what it holds of all tensors.
        parameters: step -> the begins of the tensors' hashes over all ranks, joined.
        names: the tensors; of a baseline, its first launch alone has them.
    """

    weights: dict[Step, list[str]] = {}
    parameters: dict[Step, str] = {}
    names: list[str] = []

    def with_more(self, every: HashedParts) -> Self:
        """Return these hashes with those of more steps of a launch that computed the same."""
        # Where tensors come or go, launches that hash other steps may name those of other steps.
        more = every.parameters if every.names == self.names else {}
        return self.replace(weights=every.weights | self.weights, parameters=more | self.parameters)


class Series(Model, frozen=True, omit_defaults=True):
    """Record of one optimizer of an unedited script on one rank; steps are counted from its first one.

    That of a workload has the settings and samples of its measured steps alone.

    Attributes:
        optimizer: the class of the optimizer.
        model: the class of the module that it trains, such as ``DDP(Net)``; empty if unknown.
        num_steps: number of steps, with those that were not timed.
        is_main: whether the result's step times are those of this optimizer.
        collectives: calls of collectives in a timed step, mean over the steps; None if unknown.
        step_times_ms: the duration of each timed step.
        loss: step -> sum of the tensors whose ``backward()`` was called.
        grad_norm: step -> what ``clip_grad_norm_`` returned.
        weights: the hashes of the parameters.
        buffers: the hashes of the persistent buffers, such as the statistics of BatchNorm, of the modules that have the
            parameters.
        state, averages: the hashes of the optimizer's state, and of modules that no optimizer trains, such as averaged
            models; only of a run that is restarted, or compared with one.
        gradients: step -> hash of what this rank added to gradients, before they were reduced; only where every step is
            hashed.
        turns: for each step, its place in the order of the steps of several optimizers, from 1; empty of one alone.
        settings: what its steps train with, such as hyperparameters and the shape of the batch.
        samples: step -> hash of each sample of this rank's batch, for some steps.
        saved: the steps after which the script has called ``torch.save``, of many the first ones.
    """

    optimizer: Text
    num_steps: Positive
    model: str = ""
    is_main: bool = False
    collectives: NotNegative | None = None
    step_times_ms: list[Milliseconds] = []
    loss: dict[Step, Finite] = {}
    grad_norm: dict[Step, NotNegative] = {}
    weights: LocalWeights = LocalWeights()
    buffers: LocalWeights = LocalWeights()
    state: LocalWeights = LocalWeights()
    averages: LocalWeights = LocalWeights()
    gradients: dict[Step, WeightHash] = {}
    turns: list[Positive] = []
    settings: list[Setting] = []
    samples: dict[Step, list[Text]] = {}
    saved: list[Count] = []

    @property
    def name(self) -> str:
        """Return the optimizer with its model, such as ``AdamW of DDP(Net)``."""
        return f"{self.optimizer} of {self.model}" if self.model else self.optimizer

    @property
    def settings_by_step(self) -> dict[str, str]:
        """Return the hash of each step's settings; random numbers are none, as they have no effect until drawn."""
        settings = [one for one in self.settings if one.name != RANDOM]
        rows = {
            str(step): [(one.name, one.group, value) for one in settings if (value := one.at(step)) != OFF]
            for step in range(1, self.num_steps + 1)
        }
        return {step: digest(sorted(row)) for step, row in rows.items()}

    def followed_by(self, later: Series) -> Series:
        """Return the record of these steps, then those of a launch that went on from them.

        What that launch has loaded is what there is after the last of these steps.
        """
        done = self.num_steps
        settings = {(one.name, one.group): one.values for one in self.settings}
        for one in later.settings:
            # The first step of a process finds no gradients that it could add to.
            values = _from(1 + (one.name == GRADIENTS), one.values)
            settings[one.name, one.group] = joined_steps(settings.get((one.name, one.group), {}), values, done)
        by_step = {
            name: joined_steps(getattr(self, name), getattr(later, name), done)
            for name in ("loss", "grad_norm", "gradients", "samples")
        }
        # Buffers are first hashed when the forward pass of a step has changed them.
        hashed = {
            kind: getattr(self, kind).followed_by(getattr(later, kind), done, int(kind == BUFFERS)) for kind in HASHED
        }
        kept = [Setting(*key, values) for key, values in settings.items()]
        return later.replace(num_steps=done + later.num_steps, settings=kept, turns=[], **by_step, **hashed)


class SeriesFacts(HashedParts, frozen=True, omit_defaults=True, kw_only=True):
    """The facts of one optimizer of an unedited script, with the hashes of its parameters; steps are counted from 1.

    Of a baseline, its first launch alone has names, batches, samples and most settings.

    Attributes:
        name: the optimizer with its model.
        num_steps: number of steps, with those that were not timed; the largest over ranks.
        rank_steps: number of steps of each rank; empty if all have as many.
        is_main: whether the step times of the launch are those of this optimizer.
        collectives: calls of collectives in a timed step, the largest over ranks; None if unknown.
        p50_ms: the median of the timed steps' maxima over ranks; None without timed steps.
        loss: ``loss[rank]``: step -> loss, of at most 2,048 values.
        grad_norm: ``grad_norm[rank]``: step -> norm of the gradients, of at most 2,048 values.
        gradients: step -> for each rank, the begin of the hash of its gradients before they were reduced.
        buffers: the hashes of the model's persistent buffers.
        state, averages: the hashes of the optimizer's state and of averaged models; not kept in baselines.
        turns: for each step, its place in the order of all optimizers' steps, from 1; not kept in baselines.
        settings: ``settings[rank]``: what its steps train with; a single entry if it is the same on all ranks.
        batches: step -> for each rank, the begin of the hash of the samples of its batch, in their order.
        samples: step -> the begin of the hash of the samples of all ranks, in any order.
    """

    name: Text
    num_steps: Positive
    is_main: bool = False
    collectives: NotNegative | None = None
    p50_ms: Milliseconds | None = None
    loss: list[dict[Step, Finite]] = []
    grad_norm: list[dict[Step, NotNegative]] = []
    gradients: dict[Step, list[str]] = {}
    buffers: HashedParts = HashedParts()
    state: HashedParts = HashedParts()
    averages: HashedParts = HashedParts()
    turns: list[Positive] = []
    rank_steps: list[Positive] = []
    settings: list[list[Setting]] = []
    batches: dict[Step, list[str]] = {}
    samples: dict[Step, str] = {}

    @property
    def steps(self) -> str:
        """Return the number of steps as text, rank by rank if ranks differ."""
        if not self.rank_steps:
            return counted(self.num_steps, "step")
        return f"{' and '.join(map(str, self.rank_steps))} steps by rank"

    def settings_of(self, rank: int) -> list[Setting]:
        """Return the settings of a rank."""
        return self.settings[min(rank, len(self.settings) - 1)]

    def turn(self, step: int) -> int:
        """Return the place of a step in the order of all optimizers' steps; of step 0, that before the first step."""
        if not 0 < len(self.turns) >= step:
            return step
        return self.turns[step - 1] if step else self.turns[0] - 1

    def beside(self, other: SeriesFacts) -> SeriesFacts:
        """Return these facts with hashes that the ``other`` side took at the same time.

        The hash of a last step has what followed it, such as an evaluation, which that of a longer run has not.
        """
        ends = {self.num_steps} ^ {other.num_steps}
        weights, buffers = (
            {step: hashes for step, hashes in side.weights.items() if int(step) not in ends}
            for side in (self, self.buffers)
        )
        return self.replace(weights=weights, buffers=self.buffers.replace(weights=buffers))

    def __str__(self) -> str:
        """Return the name with the number of steps and of collectives."""
        calls = self.collectives and f"{self.collectives:.3g} collective{'s' * (self.collectives != 1)} a step"
        known = "" if calls is None else f", {calls or 'no collective'}"
        return f"{self.name} ({self.steps}{known})"

    def condensed(self, *, has_names: bool) -> SeriesFacts:
        """Return what a baseline keeps of these facts."""
        kept = self.replace(turns=[], state=HashedParts(), averages=HashedParts())
        if has_names:
            return kept
        # Whether launches of the same code have the same random numbers has to be known.
        random = [[one for one in rank if one.name == RANDOM] for rank in self.settings]
        return kept.replace(names=[], buffers=self.buffers.replace(names=[]), settings=random, batches={}, samples={})

    def with_every_step(self, hashed: SeriesFacts) -> SeriesFacts:
        """Return these facts with the hashes of a launch that computed the same, and hashed every step."""
        return self.with_more(hashed).replace(
            gradients=hashed.gradients, buffers=self.buffers.with_more(hashed.buffers)
        )


def joined_hashes(ranks: Sequence[Sequence[Series]], kind: str = PARAMETERS) -> dict[str, str]:
    """Return step -> hash of what all ranks hold of all optimizers' parameters, or buffers by ``kind``."""
    rows: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for rank, series in enumerate(ranks):
        for number, one in enumerate(series):
            for step, value in getattr(one, kind).hashes.items():
                rows[step].append((number, rank, value))
    return {step: digest(rows[step]) for step in sorted(rows, key=int)}


def digest(value: object) -> str:
    """Return 32 hex digits of a value that is equal wherever its text is."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def series_facts(ranks: Sequence[Sequence[Series]]) -> list[SeriesFacts]:
    """Return the facts of each optimizer, in the order of their first steps; ranks may have different ones."""
    count = max(map(len, ranks), default=0)
    facts = [_facts([series[number] for series in ranks if number < len(series)]) for number in range(count)]
    names = distinct((one.name for one in facts), " #{}")
    return [one.replace(name=name) for one, name in zip(facts, names, strict=True)]


def _facts(ranks: Sequence[Series]) -> SeriesFacts:
    times = [list(map(max, *(rank.step_times_ms for rank in ranks)))] if len(ranks) > 1 else [ranks[0].step_times_ms]
    calls = [rank.collectives for rank in ranks if rank.collectives is not None]
    settings = [rank.settings for rank in ranks]
    hashed = _hashed_parts(ranks, PARAMETERS)
    hashed |= {kind: HashedParts(**_hashed_parts(ranks, kind)) for kind in HASHED if kind != PARAMETERS}
    return SeriesFacts(
        name=" | ".join(dict.fromkeys(rank.name for rank in ranks)),
        num_steps=max(counts := [rank.num_steps for rank in ranks]),
        rank_steps=counts if len({*counts}) > 1 else [],
        is_main=ranks[0].is_main,
        collectives=max(calls, default=None),
        p50_ms=float(f"{median(times[0]):.6g}") if times[0] else None,
        loss=_thinned([rank.loss for rank in ranks]),
        grad_norm=_thinned([rank.grad_norm for rank in ranks]),
        gradients=_begins_by_rank([rank.gradients for rank in ranks]),
        turns=ranks[0].turns,
        settings=settings if any(one != settings[0] for one in settings) else settings[:1],
        batches=_begins_by_rank([{step: digest(batch) for step, batch in rank.samples.items()} for rank in ranks]),
        samples=_samples(ranks),
        **hashed,
    )


def _samples(ranks: Sequence[Series]) -> dict[str, str]:
    """Return step -> hash of the samples of all ranks, of steps in which each rank's samples are known."""
    steps = sorted(set.intersection(*({*rank.samples} for rank in ranks)), key=int)
    batches = {step: sorted(sample for rank in ranks for sample in rank.samples[step]) for step in steps}
    return {step: digest(batch)[:_OF_RANK] for step, batch in batches.items()}


def _hashed_parts(ranks: Sequence[Series], kind: str) -> dict[str, Any]:
    """Return the fields of :class:`HashedParts` of a kind of tensors."""
    held: list[LocalWeights] = [getattr(rank, kind) for rank in ranks]
    steps = set.intersection(*({*parts.tensors} for parts in held))
    names = sorted({name for parts in held for name in parts.names})[:_MOST_PARAMETERS]
    return {
        "weights": _begins_by_rank([parts.hashes for parts in held], _NO_HASH),
        "parameters": {step: "".join(_begins(held, names, step)) for step in sorted(steps, key=int)},
        "names": names,
    }


def _begins_by_rank(ranks: Sequence[Mapping[str, str]], absent: str = "0" * _OF_RANK) -> dict[str, list[str]]:
    steps = sorted({step for rank in ranks for step in rank}, key=int)
    return {step: [rank.get(step, absent)[:_OF_RANK] for rank in ranks] for step in steps}


def _begins(held: Sequence[LocalWeights], names: Sequence[str], step: str) -> list[str]:
    rows = [dict(zip(weights.names, weights.tensors[step], strict=True)) for weights in held]
    return [digest([row.get(name) for row in rows])[:_OF_PARAMETER] for name in names]


def _thinned(ranks: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the values of evenly spaced steps and of the last one; empty if no rank has any."""
    longest = max(map(len, ranks))
    stride = max(1, -(-longest * len(ranks) // _MOST_VALUES))
    kept = [
        {step: value for number, (step, value) in enumerate(values.items(), 1) if number % stride in (0, 1 % stride)}
        | dict([*values.items()][-1:])
        for values in ranks
    ]
    return kept if longest else []


class OptimizersFacts(NamedTuple):
    """The facts of all optimizers of a launch, in the order of their first steps, and what a reader is told of them.

    Attributes:
        series: The optimizers.
        buffer_hashes: Step -> hash of the persistent buffers that each rank has.
        are_apart: Whether several ranks step optimizers, and no step has a collective.
        text: A line if there are several optimizers, or if one has no loss or no collective in its steps; else empty.
        replicas: The replicas of parameters that became different.
    """

    series: list[SeriesFacts]
    buffer_hashes: dict[str, str]
    are_apart: bool
    text: str
    replicas: list[Parted]


def optimizers_facts(ranks: Sequence[Sequence[Series]], *, has_messages: bool, is_simulated: bool) -> OptimizersFacts:
    """Return the facts of the optimizers of all ranks.

    With ``has_messages``, a step whose costs were counted has some, which gloo's recorder does not know. A simulated
    world has no losses.
    """
    facts = series_facts(ranks)
    alone = [one.name for one in facts if len(ranks) > 1 and one.collectives == 0]
    are_apart = 0 < len(alone) == len(facts) and not (has_messages or is_simulated)
    found = []
    if len(facts) > 1 or (alone and not has_messages):
        found.append(f"{counted(len(facts), 'optimizer')}: {some_of([str(one) for one in facts], _MOST_LISTED)}")
        found += [f"there is no collective in the steps of {some_of(alone, _MOST_LISTED)}"] if alone else []
    if are_apart:
        found.append(
            "so each rank trains alone: start a process group and wrap the model (DistributedDataParallel, "
            "fully_shard); transformers' Trainer needs --use_cpu on CPU ranks"
        )
    # The steps of a workload are not those of an optimizer alone, and their losses are the result's.
    is_observed = any(one.is_main for one in facts)
    if is_observed and not (is_simulated or any(any(one.loss) for one in facts)):
        found.append("no loss is recorded, since the script calls no backward() of one; torch.autograd.grad has none")
    return OptimizersFacts(facts, joined_hashes(ranks, BUFFERS), are_apart, "; ".join(found), diverged(ranks))


class Parted(Model, frozen=True):
    """Replicas of parameters of one optimizer that became different in the same step.

    Attributes:
        series: the optimizer with its model.
        parameter: the first of the parameters.
        count: number of the parameters.
        rank: the first rank that differs from rank 0.
        step: the first hashed step after which they differ.
        before: the hashed step before.
        again: the last hashed step, if the parameters are equal after it; else None.
    """

    series: Text
    parameter: str
    count: Positive
    rank: Positive
    step: Count
    before: Count
    again: Count | None = None

    def __str__(self) -> str:
        """Return which replicas differ, and when."""
        more = f" and {counted(self.count - 1, 'other')}" if self.count > 1 else ""
        again = "" if self.again is None else f", and again {_when(self.again)}"
        return (
            f"replicas differ: {self.parameter}{more} of {self.series} on rank {self.rank} and on rank 0 "
            f"{_when(self.step)}; they are equal {_when(self.before)}{again}"
        )


def diverged(ranks: Sequence[Sequence[Series]]) -> list[Parted]:
    """Return which replicas of parameters became different, in the order of optimizers and steps.

    Parameters are replicas if their hashes are equal on all ranks in the first hashed step.
    """
    count = min(map(len, ranks)) if len(ranks) > 1 else 0
    series = ((ranks[0][number].name, [series[number].weights for series in ranks]) for number in range(count))
    return [parted for name, held in series for parted in _diverged(name, held)]


def _diverged(name: str, held: Sequence[LocalWeights]) -> Iterator[Parted]:
    steps = sorted(set.intersection(*({*weights.tensors} for weights in held)), key=int)
    by_step = {
        step: [dict(zip(weights.names, weights.tensors[step], strict=True)) for weights in held] for step in steps
    }

    def other_ranks(parameter: str, step: str) -> list[int]:
        values = [row.get(parameter) for row in by_step[step]]
        return [rank for rank, value in enumerate(values) if value != values[0]]

    replicas = [parameter for parameter in held[0].names if steps and not other_ranks(parameter, steps[0])]
    for before, step in itertools.pairwise(steps):
        if different := [parameter for parameter in replicas if other_ranks(parameter, step)]:
            replicas = [parameter for parameter in replicas if parameter not in different]
            is_passing = not any(other_ranks(parameter, steps[-1]) for parameter in different)
            again = int(steps[-1]) if is_passing else None
            rank = other_ranks(different[0], step)[0]
            yield Parted(name, different[0], len(different), rank, int(step), int(before), again)


def first_other_weights(launch: Sequence[SeriesFacts], other: Sequence[SeriesFacts], kind: str = PARAMETERS) -> str:
    """Return the optimizer, step, ranks and names for which weights, or buffers, differ first; or empty."""
    found = []
    for one, two in zip(launch, other, strict=False):
        own = one.beside(two)
        here, there = (own, two) if kind == PARAMETERS else (own.buffers, two.buffers)
        steps = sorted(int(step) for step in here.weights.keys() & there.weights.keys())
        for before, step in zip([None, *steps], steps, strict=False):
            if who := other_ranks(here.weights, there.weights, str(step)):
                equal = "" if before is None else f", and are equal {_when(before, kind)}"
                named = other_tensors(here, there, str(step))
                is_next = before == step - 1 and kind == PARAMETERS
                added = other_ranks(one.gradients, two.gradients, str(step)) if is_next else ""
                reduced = f"; before they are reduced, gradients of step {step} differ on {added}" if added else ""
                text = f"the {kind} of {one.name} first differ {_when(step, kind)} on {who}{equal}{named}{reduced}"
                # What differs before an optimizer's first step was changed by a step of another one, if there was any.
                found.append((one.turn(step), not step, text))
                break
    text = min(found, default=(0, False, ""))[2]
    return f"{text}; those of {counted(len(found) - 1, 'other optimizer')} differ too" if len(found) > 1 else text


def other_ranks(here: Mapping[str, list[str]], there: Mapping[str, list[str]], step: str) -> str:
    """Return the ranks whose hashes of a step differ; empty if none do. A hash that a side lacks is not compared."""
    of_ranks = [side.get(step, []) for side in (here, there)]
    pairs = enumerate(zip(*of_ranks, strict=False))
    ranks = [rank for rank, (one, two) in pairs if one != two and _NO_HASH not in (one, two)]
    return ranks_text(ranks, len(of_ranks[0])) if ranks else ""


def hashes_by_name(here: HashedParts, there: HashedParts, step: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the begins of the hashes of both sides by tensor; empty if a side has none in this step, or no names."""
    begins = [_split(side.parameters.get(step, "")) for side in (here, there)]
    if not all(begins) or (not there.names and len(begins[0]) != len(begins[1])):
        return {}, {}
    one, two = zip(here.names, begins[0], strict=False), zip(there.names or here.names, begins[1], strict=False)
    return dict(one), dict(two)


def other_tensors(here: HashedParts, there: HashedParts, step: str) -> str:
    """Return the tensors that differ in a step, and those that only one side has; a baseline may lack the names.

    A launch has hashes of tensors for its first hashed steps and the last one, and for one set of tensors.
    """
    one, two = hashes_by_name(here, there, step)
    names = came_or_went([*one], [*two])
    names += [name for name in one if name in two and one[name] != two[name]]
    return f": {some_of(names)}" if names else ""


def came_or_went(here: Collection[str], there: Collection[str]) -> list[str]:
    """Return which names only one side has; none if a side has as many as are kept, or none at all."""
    if not (0 < len(here) < _MOST_PARAMETERS and 0 < len(there) < _MOST_PARAMETERS):
        return []
    new, gone = ([name for name in one if name not in two] for one, two in ((here, there), (there, here)))
    return [*(f"{name} is new" for name in new), *(f"{name} is gone" for name in gone)]


def _when(step: int, kind: str = PARAMETERS) -> str:
    # A forward pass has changed buffers by then.
    return f"after step {step}" if step else f"before the first {'update' if kind == BUFFERS else 'step'}"


def _split(text: str) -> list[str]:
    return [text[begin : begin + _OF_PARAMETER] for begin in range(0, len(text), _OF_PARAMETER)]
