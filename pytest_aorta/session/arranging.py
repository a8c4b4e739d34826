"""Launches of a script with the same samples in other arrangements, as its arguments allow."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_aorta.common.errors import SpecError
from pytest_aorta.verdict.arrangements import Arrangement


def arranged_args(
    args: Sequence[str], arrangement: Arrangement, batch_arg: str | None, accumulate_arg: str | None
) -> list[str]:
    """Return the arguments of a script with the batch and the accumulation of an arrangement.

    Raises:
        SpecError: An argument has no number to multiply.
    """
    words = [*args]
    if batch_arg and arrangement.batch > 1:
        words = _multiplied(words, batch_arg, arrangement.batch, None)
    if accumulate_arg and arrangement.accumulated > 1:
        words = _multiplied(words, accumulate_arg, arrangement.accumulated, 1)
    return words


def _multiplied(words: list[str], name: str, factor: int, default: int | None) -> list[str]:
    """Return the words with the number of an argument, ``NAME N`` or ``NAME=N``, multiplied."""
    for place, word in enumerate(words):
        key, equals, text = word.partition("=")
        if key != name:
            continue
        at = place if equals else place + 1
        text = text if equals else words[at] if at < len(words) else ""
        if not text.isdecimal():
            raise SpecError(f"{name}: got {text!r} in the script's arguments, allowed is an integer")
        new = str(int(text) * factor)
        return [*words[:at], f"{name}={new}" if equals else new, *words[at + 1 :]]
    if default is None:
        raise SpecError(f"{name}: the script's arguments {words} lack it; give it there with the batch of one rank")
    return [*words, name, str(default * factor)]


def possible(ranks: int, batch_arg: str | None, accumulate_arg: str | None) -> list[Arrangement]:
    """Return the arrangements of the samples of several ranks: that of the arguments first, the plainest last.

    Raises:
        SpecError: There are none.
    """
    if not (batch_arg or accumulate_arg):
        raise SpecError(
            "compare_arrangements: name the script's argument for the batch of a rank (batch_arg, --batch-arg), for "
            "the number of accumulated batches (accumulate_arg, --accumulate-arg), or both"
        )
    if ranks == 1:
        raise SpecError("compare_arrangements: the world has 1 rank; needed are 2 or more, as by world(size=2)")
    found = [Arrangement(ranks)]
    found += [Arrangement(1, accumulated=ranks)] if accumulate_arg else []
    return found + ([Arrangement(1, batch=ranks)] if batch_arg else [])
