"""Comparison of the first step of two launches that train on the same samples, arranged in other ranks and batches.

The gradients of the same samples are equal but for rounding. Where they are not, a constant factor between them names
the fault, as does the lack of one.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pytest_aorta.common.text import counted, some_of
from pytest_aorta.result.first_step import (
    AFTER,
    BATCH_NORM,
    BEFORE,
    BUFFER,
    GIVEN,
    GRADIENT,
    INTEGERS,
    RANDOM,
    SAME_EPOCHS,
    SAMPLES,
    Array,
    FirstStep,
    folded,
)
from pytest_aorta.verdict.metrics import Origin, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import (
    Decided,
    Missing,
    MissingPart,
    ReferenceKind,
    Verdict,
    VerdictReference,
)

# The power of the machine epsilon that rounding stays below: 7e-5 in float32, 0.05 in bfloat16. One ulp on all weights
# of a Llama of 4 layers moved gradients by 1.9e-6 and 0.013.
_POWER = 0.6
_LEAST_EPS = 2.0**-23
# Causes of other gradients of all parameters.
_ALIKE = "all ranks draw the same random numbers, as for dropout: seed each rank otherwise when the model is made"
_RANDOM = "not judged: the forward pass draws random numbers, which depend on the arrangement: set dropout to 0 here"
_STATISTICS = (
    "BatchNorm takes the statistics of one rank's micro-batch: use SyncBatchNorm, and compare by the argument of the "
    "batch alone"
)
# The part of the largest weight of a rank in a gradient below which what the rank has added is lost.
_LOST = 0.01


@dataclass(frozen=True)
class Arrangement:
    """One way to give the same samples to a model.

    Attributes:
        ranks: Number of ranks.
        accumulated: Number of micro-batches of a rank, in those of the plainest arrangement.
        batch: Times by which a micro-batch is larger than that of the test's arguments.
        other: The arguments or config keys that differ beside these.
    """

    ranks: int = 1
    accumulated: int = 1
    batch: int = 1
    other: str = ""

    def __str__(self) -> str:
        """Return the arrangement in words."""
        parts = [counted(self.ranks, "rank")]
        parts += [f"{self.accumulated} times as many batches accumulated"] * (self.accumulated > 1)
        parts += [f"a batch {self.batch} times as large"] * (self.batch > 1)
        return ", ".join([*parts, *filter(None, [self.other])])


@dataclass(frozen=True)
class Side:
    """A launch of an arrangement: its first step, and the loss and the gradient norm that it reports, if it does."""

    arranged: Arrangement
    step: FirstStep
    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True)
class Factor:
    """The factor f between two tensors that leaves least of ``|here - f there|``, with the rest divided by ``|here|``.

    ``is_small`` is whether the difference is within rounding of the launch's other tensors.
    """

    value: float
    rest: float
    is_small: bool = False


class _Judged(NamedTuple):
    """How many samples or tensors differ, and a sentence on them."""

    num_other: int
    text: str
    is_known: bool = True


def compare_arrangements(case: str, here: Side, there: Side, eps: float) -> tuple[Verdict, ...]:
    """Return the verdicts on what two arrangements compute, in the order in which one follows from another.

    ``eps`` is the largest machine epsilon of all arrangements: one rank may round without a collective that shows it.
    A quantity is judged if those before it are equal. The value of a verdict is how many samples or tensors differ.
    """
    tolerance, reference = Tolerance(None, origin=Origin.COMPARE), VerdictReference(ReferenceKind.AB)
    rows = list[Verdict]()
    for metric, judged in _judged(here, there, max(eps, _LEAST_EPS) ** _POWER):
        outcome = Outcome.REGRESSION if judged.num_other else Outcome.PASS
        state = Decided(outcome) if judged.is_known else Missing(MissingPart.CANDIDATE_VALUE)
        value = float(judged.num_other)
        rows.append(Verdict(case, metric, state, value, 0.0, None, tolerance, reference, judged.text))
        if judged.num_other or not judged.is_known:
            break
    return tuple(rows)


def _judged(one: Side, other: Side, bound: float) -> Iterator[tuple[str, _Judged]]:
    here, there = one.step, other.step
    yield "samples", _samples(here, there)
    yield "weights_before", _weights(here, there, bound)
    yield "gradients", _gradients(one, other, bound)
    yield "grad_norm", _norms([one, other], bound)
    if one.loss is not None and other.loss is not None:
        yield "loss", _loss(one.loss, other.loss, bound)
    names = [name for name, rate in here.rates.items() if rate != there.rates[name]]
    rates = ", ".join(dict.fromkeys(f"{here.rates[name]:g} against {there.rates[name]:g}" for name in names))
    text = f"learning rate {rates} for the same samples, of {some_of(names)}" if names else "equal"
    yield "learning_rate", _Judged(len(names), text)
    yield "buffers", _buffers(here, there, bound)
    # Optimizers such as Adam enlarge the rounding of small gradients.
    loose = math.sqrt(bound)
    found = factors(_updates(here), _updates(there), loose)
    yield (
        "update",
        _described(found, loose, "gradients and learning rates are equal, and the optimizer's step is not: "),
    )
    text = f"optimizers made {here.num_steps} against {there.num_steps} steps"
    yield "optimizer_steps", _Judged(int(here.num_steps != there.num_steps), text)


def _samples(here: FirstStep, there: FirstStep) -> _Judged:
    if SAME_EPOCHS in here.traits | there.traits:
        return _Judged(1, "a DistributedSampler shuffled to the same order in two epochs: call set_epoch before each")
    sides = [(kind, Counter(here.samples[kind]), Counter(there.samples[kind])) for kind in SAMPLES]
    known = [(kind, one, two) for kind, one, two in sides if one and two]
    if not known:
        text = "no sample is known: none came from a torch.utils.data.DataLoader, or as the first argument of a module"
        return _Judged(0, text, is_known=False)
    # A loader may be ahead of the step, a module's argument may have another order of dimensions, and ranks that share
    # samples have parts of them.
    for kind, one, two in known:
        if (once := _once(one)) == _once(two):
            of, shared = ("integer", " of samples that ranks share") if kind == INTEGERS else ("sample", "")
            return _Judged(0, f"the same {counted(once.total(), of)}{shared} in another arrangement")
    _, one, two = known[0]
    number = max((one - two).total(), (two - one).total())
    twice = max(side.total() - len(side) for side in (one, two))
    repeated = f"; {twice} are given twice, as by ranks that load the same" if twice else ""
    total = max(one.total(), two.total())
    return _Judged(number, f"other samples: {number} of {total}{repeated}; gradients are not judged")


def _once(samples: Counter[str]) -> Counter[str]:
    """Return samples as if each was on one rank, where each is on as many ranks, as in tensor parallelism."""
    times = math.gcd(*samples.values())
    return Counter({sample: number // times for sample, number in samples.items()})


def _weights(here: FirstStep, there: FirstStep, bound: float) -> _Judged:
    one, two = here.tensors[BEFORE], there.tensors[BEFORE]
    sizes = ({(name, tensor.size) for name, tensor in side.items()} for side in (one, two))
    if names := sorted({name for name, _ in set.symmetric_difference(*sizes)}):
        text = f"{some_of(names)} have other names or shapes: parts of tensors have to be DTensors, as FSDP2's"
        return _Judged(len(names), text)
    others = [name for name, factor in factors(one, two, bound).items() if not factor.is_small]
    where, others = ("", others) if others else (" between ranks", here.apart[BEFORE])
    seeds = f"before the first step, {some_of(others)} differ{where}: set the same seed, whatever rank and arrangement"
    return _Judged(len(others), seeds if others else "equal")


def _gradients(here: Side, there: Side, bound: float) -> _Judged:
    one, two = here.step.tensors[GRADIENT], there.step.tensors[GRADIENT]
    if lost := sorted(one.keys() ^ two.keys()):
        return _Judged(len(lost), f"only one arrangement has gradients of {some_of(lost)}")
    if not any(gradient.any() for gradient in [*one.values(), *two.values()]):
        return _Judged(0, "no parameter had a gradient other than 0 in the first step", is_known=False)
    found = factors(one, two, bound)
    wrong = [name for name, factor in found.items() if not factor.is_small]
    if not wrong:
        equal = sum(np.array_equal(value, two[name]) for name, value in one.items())
        return _Judged(0, f"{counted(len(one), 'gradient')}, {equal} with equal bits, the others but for rounding")
    traits, given = here.step.traits | there.step.traits, here.step.samples[GIVEN]
    unreduced = [name for name in here.step.apart[GRADIENT] if name in wrong]
    # The first cause that holds.
    causes = {
        f"gradients of {some_of(unreduced)} differ between ranks, so they are not reduced": bool(unreduced),
        _ALIKE: RANDOM in traits and here.step.draws_alike and len({*given}) == len(given),
        _RANDOM: RANDOM in traits,
        _STATISTICS: BATCH_NORM in traits,
    }
    cause = next((text for text, holds in causes.items() if holds), "") or _cause(found, bound, here, there)
    if cause == _RANDOM:
        return _Judged(0, cause, is_known=False)
    ratio = here.step.loss / there.step.loss if there.step.loss else math.nan
    loss = f"loss x {ratio:.3f}" if math.isfinite(ratio) else ""
    return _Judged(len(wrong), "; ".join(filter(None, [f"gradients: {described(found, bound)}", loss, cause])))


def _cause(found: Mapping[str, Factor], bound: float, here: Side, there: Side) -> str:
    """Return the cause that the factors name; empty if they name none."""
    wrong = {name: one for name, one in found.items() if not one.is_small}
    values = [one.value for one in wrong.values() if one.rest <= bound]
    by_rank = here.arranged.ranks / there.arranged.ranks
    by_batch = here.arranged.accumulated / there.arranged.accumulated
    if len(values) < len(wrong):
        if by_rank == 1:
            return "tokens or samples are weighted by micro-batch, or one is lost"
        return _by_rank([name for name, one in wrong.items() if one.rest > bound], len(found), bound, here.step)
    summed = "summed over ranks, where a mean belongs" if len(wrong) == len(found) else "reduced twice"
    rows = (
        (by_rank, "number of ranks", summed),
        (1 / by_rank, "1 / number of ranks", "the mean over ranks is taken twice"),
        (by_batch, "number of micro-batches", "the loss is not divided by this number"),
        (1 / by_batch, "1 / number of micro-batches", "the mean over micro-batches is taken twice"),
    )
    for factor, what, cause in rows:
        if factor != 1 and all(abs(value / factor - 1) <= bound for value in values):
            return f"{what}: {cause}"
    return ""


def _by_rank(names: list[str], total: int, bound: float, step: FirstStep) -> str:
    """Return which rank's samples do not reach some gradients; else what may be wrong with them."""
    lost: dict[str, list[str]] = {}
    others = []
    for name in names:
        own, gradient = step.own.get(name, {}), folded(step.tensors[GRADIENT][name])
        parts = np.stack([*own.values(), gradient], 1)
        weights, *_ = np.linalg.lstsq(parts[:, :-1], gradient)
        is_known = np.linalg.norm(parts[:, :-1] @ weights - gradient) <= bound * np.linalg.norm(gradient)
        absent = [rank for rank, weight in zip(own, weights, strict=True) if weight <= _LOST * weights.max()]
        for rank in absent if is_known else ():
            how = "what it computes is lost" if own[rank].any() else "it computes no gradient of them"
            lost.setdefault(f"rank {rank}'s samples do not reach {{}}: {how}", []).append(name)
        others += [name] if not (is_known and absent) else []
    texts = [
        text.format("any gradient" if len(found) == total else some_of(sorted(found))) for text, found in lost.items()
    ]
    # A rank that loses a part of what it computes has other gradients before that part.
    if not texts or len(names) == total > len(names) - len(others):
        unknown = [name for name in others if name not in step.own]
        texts.append("tokens or samples are weighted by rank, or left out")
        texts += [f"what ranks add to {some_of(unknown)} is not known, as in compiled modules"] if unknown else []
    return "; ".join(texts)


def _norms(sides: list[Side], bound: float) -> _Judged:
    """Judge the norms that gradients are clipped by, and that are reported, by the gradients themselves."""
    for side in sides:
        gradients = side.step.tensors[GRADIENT]
        alike: dict[tuple[float, ...], list[str]] = {}
        for name, norms in side.step.norms.items():
            alike.setdefault(tuple(sorted(set(norms))), []).append(name)
        given = [(norm, names) for norms, names in alike.items() for norm in norms]
        given += [(side.grad_norm, [*gradients])] if side.grad_norm is not None else []
        for norm, names in given:
            right = math.sqrt(sum(float(gradients[name] @ gradients[name]) for name in names))
            if abs(norm - right) > bound * right:
                of = (
                    "other ranks' parts are left out" if norm < right else "parts that ranks share count more than once"
                )
                text = f"{side.arranged}: the norm of gradients is {right:.6g}, and {norm:.6g} is used: {of}"
                return _Judged(1, text)
    return _Judged(0, "equal to the norm of the gradients, where a norm is used")


def _loss(here: float, there: float, bound: float) -> _Judged:
    if abs(here - there) <= bound * abs(there):
        return _Judged(0, "equal as reported")
    ratio = f": x {here / there:.3f}" if there else ""
    return _Judged(1, f"gradients are equal, and the loss is reported as {here:.6g} against {there:.6g}{ratio}")


def _buffers(here: FirstStep, there: FirstStep, bound: float) -> _Judged:
    if apart := here.apart[BUFFER]:
        return _Judged(len(apart), f"buffers {some_of(apart)} differ between ranks")
    return _described(factors(here.tensors[BUFFER], there.tensors[BUFFER], bound), bound, "buffers: ")


def _updates(step: FirstStep) -> dict[str, Array]:
    return {name: after - step.tensors[BEFORE][name] for name, after in step.tensors[AFTER].items()}


def factors(here: Mapping[str, Array], there: Mapping[str, Array], bound: float) -> dict[str, Factor]:
    """Return the factor of each tensor that both sides have, without those that are 0 but for rounding.

    A tensor whose exact value is 0, such as the gradient of a bias before a normalization, has rounding of the size of
    other tensors, so that its difference is measured by theirs.
    """
    names = [name for name in here if name in there and here[name].size == there[name].size]
    usual = float(np.median([_spread(there[name]) for name in names])) if names else 0.0
    some = [name for name in names if max(_spread(here[name]), _spread(there[name])) > bound * usual]
    return {name: _factor(here[name], there[name], bound, usual) for name in some}


def _spread(tensor: Array) -> float:
    return float(np.linalg.norm(tensor)) / math.sqrt(max(tensor.size, 1))


def _factor(one: Array, two: Array, bound: float, usual: float) -> Factor:
    whole = float(np.linalg.norm(one))
    is_small = float(np.linalg.norm(one - two)) <= bound * max(whole, usual * math.sqrt(one.size))
    squared = float(two @ two)
    value = float(one @ two) / squared if squared else 0.0
    rest = float(np.linalg.norm(one - value * two)) / whole if whole else 0.0
    return Factor(value, rest, is_small)


def _described(found: Mapping[str, Factor], bound: float, what: str) -> _Judged:
    differ = sum(not one.is_small for one in found.values())
    return _Judged(differ, f"{what}{described(found, bound)}" if differ else "equal but for rounding")


def described(found: Mapping[str, Factor], bound: float) -> str:
    """Return which tensors differ by which factor, or by none, those of most tensors first."""
    groups: dict[str, list[str]] = {}
    digits = min(3, math.ceil(-math.log10(bound)))
    for name, one in found.items():
        if not one.is_small:
            groups.setdefault(f"x {one.value:.{digits}f}" if one.rest <= bound else "", []).append(name)
    texts = []
    for factor, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        which = f"all {len(names)}" if len(names) == len(found) else f"{len(names)} of {len(found)} ({some_of(names)})"
        rest = max(found[name].rest for name in names)
        texts.append(f"{which} {factor or f'by no constant factor, rest {rest:.2g}'}")
    return "; ".join(texts)
