"""The values that options accept, and the conversion of text to them."""

from __future__ import annotations

import math
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable
from enum import StrEnum

from pytest_aorta.common.text import brief, did_you_mean
from pytest_aorta.plan.profiler import ProfilerSchedule

# Prefix of --aorta-ab if the A/B reference is another environment's interpreter.
PYTHON_PREFIX = "python:"
# Value of --aorta-device: GPUs if this run has any, else CPU ranks.
AUTO = "auto"


class LauncherKind(StrEnum):
    """A way to start ranks: a torchrun agent, or a fork of a process that has imported torch."""

    TORCHRUN = "torchrun"
    FORKSERVER = "forkserver"


class FailOn(StrEnum):
    """A verdict that fails the test on request; members are named as those of ``Outcome``."""

    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not-applicable"
    IMPROVED = "improved"
    MISSING = "missing"


# Value of --aorta-fail-on with which only regressions and lost metrics fail.
FAIL_ON_NOTHING = "none"


def not_allowed(given: str, allowed: str) -> ArgumentTypeError:
    """Return the error about a text that an option does not accept."""
    return ArgumentTypeError(f"got {brief(repr(given))}, allowed is {allowed}")


def integer_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse ``type`` for integers from ``least`` to ``most``, or without an upper limit."""

    def parse(text: str) -> int:
        # Python converts no more than 4,300 digits.
        is_number = text.isascii() and text.isdigit() and len(text) <= 18
        if not is_number or int(text) < least or (most is not None and int(text) > most):
            raise not_allowed(
                text, f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
            )
        return int(text)

    return parse


def parse_reason(text: str) -> str:
    """Return a reason, stripped.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    if not text.strip():
        raise not_allowed(text, "a reason, in words")
    return text.strip()


def parse_seconds(text: str) -> float:
    """Return a number of seconds, at most a week.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 7 * 86400:
        raise not_allowed(text, "a number of seconds above 0 and up to 604800 (a week)")
    return seconds


def parse_folder(text: str) -> str:
    """Return the name of a folder, which isn't empty.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    if not text.strip():
        raise not_allowed(text, "a folder")
    return text


def parse_command(text: str) -> tuple[str, ...]:
    """Return the words of a command that is quoted as for a shell.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise not_allowed(text, f"a command, quoted as for a shell ({error})") from None
    if not words:
        raise not_allowed(text, "a command, e.g. 'srun --nodes={nodes} --ntasks={nodes}'")
    return words


def file_with_suffix(suffix: str) -> Callable[[str], str]:
    """Return an argparse ``type`` for names of files that end in ``suffix``."""

    def parse(text: str) -> str:
        if not text.endswith(suffix) or text.endswith(f"/{suffix}"):
            raise not_allowed(text, f"a file whose name ends in {suffix}")
        return text

    return parse


def parse_schedule(text: str) -> ProfilerSchedule:
    """Return a schedule of torch's profiler.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    try:
        return ProfilerSchedule.parse(text)
    except ValueError as error:
        form = "words such as wait=1 warmup=1 active=3 repeat=2 shapes memory"
        raise not_allowed(text, form if text == "?" else f"{form} ({error})") from None


def parse_version(text: str) -> str:
    """Return a git ref, or ``python:`` and the path of an interpreter.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    # Git would read a ref that starts with a dash as one of its own options.
    if not text.strip() or text.startswith("-") or text == PYTHON_PREFIX:
        raise not_allowed(text, f"a branch, tag or commit, or {PYTHON_PREFIX}PATH of another environment's interpreter")
    return text


def parse_fail_on(text: str) -> frozenset[FailOn]:
    """Return the verdicts that a comma-separated list names.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    words = [word.strip() for word in text.split(",")]
    if words == [FAIL_ON_NOTHING]:
        return frozenset()
    if not set(words) <= set(FailOn):
        known = [*texts(FailOn), FAIL_ON_NOTHING]
        hint = did_you_mean(sorted(set(words) - set(known)), known)
        raise not_allowed(text, f"a comma-separated list of {', '.join(FailOn)}, or {FAIL_ON_NOTHING}{hint}")
    return frozenset(map(FailOn, words))


def parse_boolean(text: str) -> bool:
    """Return the truth value that an ini file spells as text.

    Raises:
        ArgumentTypeError: The text is not a truth value.
    """
    words = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
    if text.lower() not in words:
        raise not_allowed(text, "true or false")
    return words[text.lower()]


def texts(kinds: type[StrEnum]) -> tuple[str, ...]:
    """Return the values as plain text, since argparse's errors contain the repr of each choice."""
    return tuple(kind.value for kind in kinds)
