"""Comparison of the first step of two launches that train on the same samples, arranged in other ranks and batches.

The gradients of the same samples are equal but for rounding. Where they are not, a constant factor between them names
the fault, as does the lack of one.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pytest_aorta.common.text import counted
from pytest_aorta.result.first_step import AFTER, BEFORE, GRADIENT, Array, FirstStep
from pytest_aorta.result.series import some_of
from pytest_aorta.verdict.metrics import Origin, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import (
    Decided,
    Missing,
    MissingPart,
    ReferenceKind,
    State,
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


def compare_arrangements(
    case: str, here: FirstStep, there: FirstStep, arranged: Arrangement, other: Arrangement
) -> tuple[Verdict, ...]:
    """Return the verdicts on samples, weights before, gradients, and the update of the weights.

    Each is judged only if those before it are equal.
    """

    def verdict(metric: str, detail: str, state: State) -> Verdict:
        value, baseline = str(arranged), str(other)
        tolerance, reference = Tolerance(None, origin=Origin.COMPARE), VerdictReference(ReferenceKind.AB)
        return Verdict(case, metric, state, value, baseline, None, tolerance, reference, detail)

    rows = list[Verdict]()
    for metric, (problem, text) in _judged(here, there, arranged, other):
        outcome = Decided(Outcome.REGRESSION if problem else Outcome.PASS)
        absent = problem and metric == "samples" and not (here.samples and there.samples)
        rows.append(verdict(metric, text, Missing(MissingPart.CANDIDATE_VALUE) if absent else outcome))
        if problem:
            break
    return tuple(rows)


def _judged(
    here: FirstStep, there: FirstStep, arranged: Arrangement, other: Arrangement
) -> Iterator[tuple[str, tuple[bool, str]]]:
    yield "samples", _samples(here, there)
    bound = max(here.eps, there.eps, _LEAST_EPS) ** _POWER
    before = factors(here.tensors[BEFORE], there.tensors[BEFORE], bound)
    others = [name for name, one in before.items() if not one.is_small]
    others += here.tensors[BEFORE].keys() ^ there.tensors[BEFORE].keys()
    yield (
        "weights before",
        (bool(others), f"before the first step, {some_of(others)} differ: set the same seed in each arrangement")
        if others
        else (False, "equal"),
    )
    yield "gradients", _gradients(here, there, arranged, other, bound)
    changes = [
        {name: after - side.tensors[BEFORE][name] for name, after in side.tensors[AFTER].items()}
        for side in (here, there)
    ]
    # Optimizers such as Adam enlarge the rounding of small gradients.
    changed = factors(*changes, math.sqrt(bound))
    text = described(changed, math.sqrt(bound))
    yield "update", (bool(text), f"gradients are equal, and the optimizer's step is not: {text}" if text else "equal")


def _samples(here: FirstStep, there: FirstStep) -> tuple[bool, str]:
    one, two = Counter(here.samples), Counter(there.samples)
    if not one or not two:
        return True, "no backward pass had samples of a torch.utils.data.DataLoader or of a module's forward()"
    if one == two:
        return False, f"the same {counted(one.total(), 'sample')}"
    number, known = (one - two).total() or (two - one).total(), max(one.total(), two.total())
    twice = [count for side in (one, two) for count in [sum(number - 1 for number in side.values())] if count]
    repeated = f"; {twice[0]} are given twice, as by ranks that load the same" if twice else ""
    return True, f"other samples: {number} of {known}{repeated}; gradients are not judged"


def _gradients(
    here: FirstStep, there: FirstStep, arranged: Arrangement, other: Arrangement, bound: float
) -> tuple[bool, str]:
    lost = sorted(here.tensors[GRADIENT].keys() ^ there.tensors[GRADIENT].keys())
    if lost:
        return True, f"only one arrangement has gradients of {some_of(lost)}"
    found = factors(here.tensors[GRADIENT], there.tensors[GRADIENT], bound)
    if not found:
        return True, "no parameter has a gradient in the first step"
    if all(one.is_small for one in found.values()):
        equal = sum(
            np.array_equal(value, there.tensors[GRADIENT][name]) for name, value in here.tensors[GRADIENT].items()
        )
        return False, f"{counted(len(found), 'gradient')}: {equal} with equal bits, the others within rounding"
    causes = [described(found, bound)]
    unreduced = [name for name in (*here.apart, *there.apart) if not found[name].is_small]
    if unreduced:
        causes.append(f"gradients of {some_of(unreduced)} differ between ranks: they are not reduced")
    elif cause := _cause(found, bound, arranged, other):
        causes.append(cause)
    ratio = here.loss / there.loss if there.loss else math.nan
    if math.isfinite(ratio):
        causes.append(f"loss × {ratio:.3f}")
    return True, ": ".join([causes[0], ", ".join(causes[1:])] if causes[1:] else causes)


def _cause(
    found: Mapping[str, Factor], bound: float, arranged: Arrangement, other: Arrangement
) -> str:
    """Return the cause that the factors name; empty if they name none."""
    wrong = [one for one in found.values() if not one.is_small]
    values = [one.value for one in wrong if one.rest <= bound]
    by_rank, by_batch = arranged.ranks / other.ranks, arranged.accumulated / other.accumulated
    is_all = all(not one.is_small for one in found.values() if one.rest or one.value != 1)
    if len(values) < len(wrong):
        if by_rank != 1:
            return "ranks count by another weight than their samples, or what a rank computes is lost"
        return "micro-batches count by another weight than their samples, as by a mean over each one's own tokens"
    rows = (
        (by_rank, "number of ranks", "a sum over ranks where a mean belongs" if is_all else "reduced twice"),
        (1 / by_rank, "1 / number of ranks", "averaged over ranks twice"),
        (by_batch, "number of micro-batches", "the loss is not divided by the number of accumulated batches"),
        (1 / by_batch, "1 / number of micro-batches", "only one micro-batch counts, or the mean is taken twice"),
    )
    for factor, what, cause in rows:
        if factor != 1 and all(abs(value / factor - 1) <= bound for value in values):
            return f"{what}, {cause}"
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
    """Return which tensors differ by which factor, or by none; empty if all are equal but for rounding."""
    groups: dict[str, list[str]] = {}
    for name, one in found.items():
        if one.is_small:
            text = "× 1.000"
        elif one.rest <= bound:
            text = f"× {one.value:.3f}"
        else:
            text = "by no constant factor"
        groups.setdefault(text, []).append(name)
    wrong = {text: names for text, names in groups.items() if text != "× 1.000"}
    if not wrong:
        return ""
    texts = []
    for text, names in sorted(wrong.items(), key=lambda item: -len(item[1])):
        rest = max(found[name].rest for name in names)
        which = f"all {len(names)}" if len(names) == len(found) else f"{len(names)} of {len(found)} ({some_of(names)})"
        texts.append(f"{which} {text}" + (f", rest {rest:.2f}" if rest > bound else ""))
    return "; ".join(texts)
