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

from pytest_aorta.common.text import counted
from pytest_aorta.result.first_step import AFTER, BATCH_NORM, BEFORE, GRADIENT, RANDOM, SAMPLES, Array, FirstStep
from pytest_aorta.result.series import some_of
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


@dataclass(frozen=True)
class Arrangement:
    """One way to give the same samples to a model.

    Attributes:
        ranks: Number of ranks.
        accumulated: Number of micro-batches of a rank.
        batch: Times by which a micro-batch is larger than that of the script's arguments.
    """

    ranks: int = 1
    accumulated: int = 1
    batch: int = 1

    def __str__(self) -> str:
        """Return the arrangement in words."""
        parts = [counted(self.ranks, "rank")]
        parts += [f"{self.accumulated} times as many batches accumulated"] * (self.accumulated > 1)
        parts += [f"a batch {self.batch} times as large"] * (self.batch > 1)
        return ", ".join(parts)


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


def compare_arrangements(
    case: str, here: FirstStep, there: FirstStep, arranged: Arrangement, other: Arrangement
) -> tuple[Verdict, ...]:
    """Return the verdicts on samples, weights before, gradients, and the update of the weights.

    Each is judged only if those before it are equal. The value of a verdict is how many samples or tensors differ.
    """
    tolerance, reference = Tolerance(None, origin=Origin.COMPARE), VerdictReference(ReferenceKind.AB)
    rows = list[Verdict]()
    for metric, judged in _judged(here, there, arranged, other):
        outcome = Outcome.REGRESSION if judged.num_other else Outcome.PASS
        state = Decided(outcome) if judged.is_known else Missing(MissingPart.CANDIDATE_VALUE)
        value = float(judged.num_other)
        rows.append(Verdict(case, metric, state, value, 0.0, None, tolerance, reference, judged.text))
        if judged.num_other or not judged.is_known:
            break
    return tuple(rows)


def _judged(
    here: FirstStep, there: FirstStep, arranged: Arrangement, other: Arrangement
) -> Iterator[tuple[str, _Judged]]:
    yield "samples", _samples(here, there)
    bound = max(here.eps, there.eps, _LEAST_EPS) ** _POWER
    before = factors(here.tensors[BEFORE], there.tensors[BEFORE], bound)
    others = [name for name, one in before.items() if not one.is_small]
    others += here.tensors[BEFORE].keys() ^ there.tensors[BEFORE].keys()
    where, others = ("", others) if others else (" between ranks", here.apart[BEFORE])
    seeds = f"before the first step, {some_of(others)} differ{where}: set the same seed, whatever rank and arrangement"
    yield "weights_before", _Judged(len(others), seeds if others else "equal")
    yield "gradients", _gradients(here, there, arranged, other, bound)
    one, two = (
        {name: after - side.tensors[BEFORE][name] for name, after in side.tensors[AFTER].items()}
        for side in (here, there)
    )
    # Optimizers such as Adam enlarge the rounding of small gradients.
    loose = math.sqrt(bound)
    changed = factors(one, two, loose)
    differ = sum(not one.is_small for one in changed.values())
    text = f"gradients are equal, and the optimizer's step is not: {described(changed, loose)}"
    yield "update", _Judged(differ, text if differ else "equal but for rounding")


def _samples(here: FirstStep, there: FirstStep) -> _Judged:
    pairs = [(Counter(here.samples[kind]), Counter(there.samples[kind])) for kind in SAMPLES]
    known = [(one, two) for one, two in pairs if one and two]
    if not known:
        text = "no sample is known: none came from a torch.utils.data.DataLoader, or as the first argument of a module"
        return _Judged(0, text, is_known=False)
    # A loader may be ahead of the step, and a module's argument may have another order of dimensions.
    one, two = next((pair for pair in known if pair[0] == pair[1]), known[0])
    if one == two:
        return _Judged(0, f"the same {counted(one.total(), 'sample')} in another arrangement")
    total = max(one.total(), two.total())
    number = max((one - two).total(), (two - one).total())
    twice = max(side.total() - len(side) for side in (one, two))
    repeated = f"; {twice} are given twice, as by ranks that load the same" if twice else ""
    return _Judged(number, f"other samples: {number} of {total}{repeated}; gradients are not judged")


def _gradients(here: FirstStep, there: FirstStep, arranged: Arrangement, other: Arrangement, bound: float) -> _Judged:
    one, two = here.tensors[GRADIENT], there.tensors[GRADIENT]
    if lost := sorted(one.keys() ^ two.keys()):
        return _Judged(len(lost), f"only one arrangement has gradients of {some_of(lost)}")
    if not one:
        return _Judged(0, "no parameter had a gradient in the first step", is_known=False)
    found = factors(one, two, bound)
    wrong = [name for name, factor in found.items() if not factor.is_small]
    if not wrong:
        equal = sum(np.array_equal(value, two[name]) for name, value in one.items())
        return _Judged(0, f"{counted(len(found), 'gradient')}, {equal} with equal bits, the others but for rounding")
    traits = here.traits | there.traits
    unreduced = [name for name in here.apart[GRADIENT] if name in wrong]
    if unreduced:
        cause = f"gradients of {some_of(unreduced)} differ between ranks, so they are not reduced"
    elif RANDOM in traits:
        cause = "the forward pass draws random numbers, which depend on the arrangement: set dropout to 0 here"
    elif BATCH_NORM in traits:
        cause = (
            "BatchNorm takes the statistics of one rank's micro-batch: use SyncBatchNorm, and compare by the argument "
            "of the batch alone"
        )
    else:
        cause = _cause(found, bound, arranged, other)
    ratio = here.loss / there.loss if there.loss else math.nan
    loss = f"loss x {ratio:.3f}" if math.isfinite(ratio) else ""
    return _Judged(len(wrong), "; ".join(filter(None, [described(found, bound), loss, cause])))


def _cause(found: Mapping[str, Factor], bound: float, arranged: Arrangement, other: Arrangement) -> str:
    """Return the cause that the factors name; empty if they name none."""
    wrong = [one for one in found.values() if not one.is_small]
    values = [one.value for one in wrong if one.rest <= bound]
    by_rank, by_batch = arranged.ranks / other.ranks, arranged.accumulated / other.accumulated
    is_all = all(not one.is_small for one in found.values() if one.rest or one.value != 1)
    if len(values) < len(wrong):
        if by_rank != 1:
            return "tokens or samples are weighted by rank, or what a rank computes is lost"
        return "tokens or samples are weighted by micro-batch, or one is lost"
    rows = (
        (by_rank, "number of ranks", "summed over ranks, where a mean belongs" if is_all else "reduced twice"),
        (1 / by_rank, "1 / number of ranks", "the mean over ranks is taken twice"),
        (by_batch, "number of micro-batches", "the loss is not divided by this number"),
        (1 / by_batch, "1 / number of micro-batches", "the mean over micro-batches is taken twice"),
    )
    for factor, what, cause in rows:
        if factor != 1 and all(abs(value / factor - 1) <= bound for value in values):
            return f"{what}: {cause}"
    return ""


def factors(here: Mapping[str, Array], there: Mapping[str, Array], bound: float) -> dict[str, Factor]:
    """Return the factor of each tensor that both sides have.

    A tensor whose exact value is 0, such as the gradient of a bias before a normalization, has rounding of the size of
    other tensors, so that its difference is measured by theirs.
    """
    names = [name for name in here if name in there]
    spreads = [np.linalg.norm(there[name]) / math.sqrt(max(there[name].size, 1)) for name in names]
    usual = float(np.median(spreads)) if names else 0.0
    return {name: _factor(here[name], there[name], bound, usual) for name in names}


def _factor(one: Array, two: Array, bound: float, usual: float) -> Factor:
    whole = float(np.linalg.norm(one))
    is_small = float(np.linalg.norm(one - two)) <= bound * max(whole, usual * math.sqrt(one.size))
    squared = float(two @ two)
    value = float(one @ two) / squared if squared else 0.0
    rest = float(np.linalg.norm(one - value * two)) / whole if whole else 0.0
    return Factor(value, rest, is_small)


def described(found: Mapping[str, Factor], bound: float) -> str:
    """Return which tensors differ by which factor, or by none, those of most tensors first."""
    groups: dict[str, list[str]] = {}
    for name, one in found.items():
        if not one.is_small:
            groups.setdefault(f"x {one.value:.3f}" if one.rest <= bound else "", []).append(name)
    texts = []
    for factor, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        which = f"all {len(names)}" if len(names) == len(found) else f"{len(names)} of {len(found)} ({some_of(names)})"
        rest = max(found[name].rest for name in names)
        texts.append(f"{which} {factor or f'by no constant factor, rest {rest:.2g}'}")
    return "; ".join(texts)
