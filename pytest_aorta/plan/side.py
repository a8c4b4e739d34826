"""Sides and spans: what an A/B reference, or the ends of a search, are to be, as the user spells them."""

import re
import shlex
from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.utils import canonicalize_name

from pytest_aorta.common.files import raised_as
from pytest_aorta.common.text import brief

_ALLOWED = (
    "words of a side, quoted as for a shell: a branch, tag or commit, python:PATH of an interpreter, lock:FILE of "
    "requirements, any number of with:REQUIREMENT, and of env:NAME=VALUE"
)


@dataclass(frozen=True)
class SideSpec:
    """The words of a side; what they leave out is that of the code under test.

    Attributes:
        text: The words as they were given.
        commit: A git ref; empty: the working tree.
        python: Path of an interpreter; empty: that of pytest.
        lock: Path of a file with requirements, from which the environment is built; empty: it has the packages of the
            interpreter.
        requirements: Requirements that are installed in the environment last.
        variables: Environment variables of the ranks.
    """

    text: str
    commit: str = ""
    python: str = ""
    lock: str = ""
    requirements: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_environment(self) -> bool:
        """True if the side's packages are not those of pytest's own interpreter."""
        return bool(self.python or self.lock or self.requirements)

    @property
    def is_commit(self) -> bool:
        """True if the side's packages and variables are those of the code under test."""
        return not (self.has_environment or self.variables)


def parse_side(text: str) -> SideSpec:
    """Return the side that a text spells.

    Raises:
        ArgumentTypeError: The text is not allowed.
    """
    wrong = f"got {brief(repr(text))}, allowed is {_ALLOWED}"
    with raised_as(ArgumentTypeError, f"{wrong} (", ValueError, ")"):
        words = shlex.split(text)
    given = defaultdict[str, list[str]](list)
    for word in words:
        kind, colon, value = word.partition(":")
        is_ref = not colon or kind not in ("python", "lock", "with", "env")
        given["commit" if is_ref else kind].append(word if is_ref else value)
    # Git, uv and pip would read a word that starts with a dash as one of their options.
    are_wrong = [not value.strip() or value.startswith("-") for values in given.values() for value in values]
    are_wrong += [len(given[kind]) > 1 for kind in ("commit", "python", "lock")]
    are_wrong += [not re.match(r"\w+=", pair) for pair in given["env"]]
    if not words or any(are_wrong):
        raise ArgumentTypeError(wrong)
    commit, python, lock = ("".join(given[kind]) for kind in ("commit", "python", "lock"))
    variables = dict(pair.split("=", 1) for pair in given["env"])
    return SideSpec(text, commit, python, lock, tuple(given["with"]), variables)


_SPAN = re.compile(
    r"(?P<package>\w[\w.-]*)@(git\+(?P<repository>\w\S*)@)?(?P<first>[^-@\s]\S*?)\.\.(?P<last>[^-.@\s]\S*)"
)
_RELEASE = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*(\+[\w.]+)?")


@dataclass(frozen=True)
class Span:
    """The versions of one package from a good one to a bad one.

    Attributes:
        text: The span as it was given.
        package: Normalized name of the package.
        ends: The good version and the bad one: releases, or else tags, branches or commits of the repository.
        repository: Address of the package's repository; empty: the one that its metadata name.
    """

    text: str
    package: str
    ends: tuple[str, str]
    repository: str

    @property
    def of_releases(self) -> bool:
        """Return whether the ends are releases: a tag such as ``v1.2`` is none."""
        return not self.repository and all(map(_RELEASE.fullmatch, self.ends))


def parse_span(text: str) -> Span | None:
    """Return the span that a text spells; None if it spells none."""
    if (found := _SPAN.fullmatch(text)) is None:
        return None
    ends = found["first"], found["last"]
    return Span(text, canonicalize_name(found["package"]), ends, found["repository"] or "")
