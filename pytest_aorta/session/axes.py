"""Axes of a search: the changes between its good side and its bad one, and the launches with some of them."""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.text import counted, some_of
from pytest_aorta.plan.environments import Mixture, releases_of, repository_of, version_changes
from pytest_aorta.plan.reference import Reference, References, clone_of, commit_of, first_parents, git
from pytest_aorta.plan.side import SideSpec, Span

# The numbers of the changes that are applied to the good side.
Point: TypeAlias = frozenset[int]
GOOD: Point = frozenset()
_MAX_SHOWN = 8


class Over(StrEnum):
    """The kind of changes between two sides; each value is the plural of what it names."""

    COMMITS = "commits"
    PACKAGES = "packages"
    VARIABLES = "variables"


class Axis:
    """The changes between two sides.

    Attributes:
        over: What changes, in the plural.
        changes: What is found, of each change.
        is_ordered: Whether only the first changes up to any number can be applied; else every set of them.
    """

    over: str
    changes: Sequence[str]
    is_ordered = False

    def __init__(self, side: SideSpec, references: References) -> None:
        self._side, self.references = side, references
        # Return a point as a version to launch; raise SpecError if it can't be checked out or built.
        self.reference: Callable[[Point], Reference] = cache(self._open)

    @property
    def bad(self) -> Point:
        """The point with all changes."""
        return frozenset(range(len(self.changes)))

    def _open(self, point: Point) -> Reference:
        return self.references.side(replace(self._side, text=self.short(point), **self._changed(point)))

    def _changed(self, _point: Point) -> dict[str, Any]:
        """Return the fields in which the side of a point differs from the good side."""
        return {}

    def short(self, point: Point) -> str:
        """Return a name of a point that is not looked up."""
        if point in (GOOD, self.bad):
            return "GOOD" if point == GOOD else "BAD"
        return f"GOOD with {self.name(point)}"

    def name(self, point: Point) -> str:
        """Return the changes of a point."""
        return some_of([self.changes[number] for number in sorted(point)], _MAX_SHOWN)

    def closed(self, point: Point) -> Point:
        """Return a point with the changes without which its own can't be installed."""
        return point

    def advice(self, _point: Point) -> str:
        """Return what to search next; empty if nothing."""
        return ""


class Commits(Axis):
    """The commits after the good one up to the bad one, on the line of first parents."""

    over, is_ordered = Over.COMMITS, True

    def __init__(self, sides: Sequence[SideSpec], references: References) -> None:
        super().__init__(sides[0], references)
        self.changes = first_parents(references.rootdir, *(side.commit for side in sides))

    def _commit(self, point: Point) -> str:
        return self.changes[len(point) - 1] if point else self._side.commit

    def _changed(self, point: Point) -> dict[str, Any]:
        return {"commit": self._commit(point)}

    def short(self, point: Point) -> str:
        """Return the short hash."""
        return self._commit(point)[:12]

    def name(self, point: Point) -> str:
        """Return the short hash and the subject of the last commit."""
        shown = ["log", "-1", "--no-show-signature", "--format=%h %s", self._commit(point)]
        return git(self.references.rootdir, *shown)

    def advice(self, point: Point) -> str:
        """Return the command that searches the branch that the last commit merged; empty if it merged none."""
        base, *tips = git(self.references.rootdir, "rev-list", "--parents", "-n1", self._commit(point)).split()[1:]
        branch = f"$(git merge-base {base[:12]} {tips[0][:12]}) {tips[0][:12]}" if tips else ""
        return f"this is a merge; to search its branch: aorta bisect {branch} ..." if tips else ""


class Packages(Axis):
    """The packages that differ between two environments, whose files are linked from either."""

    over = Over.PACKAGES

    def __init__(self, sides: Sequence[SideSpec], references: References) -> None:
        super().__init__(sides[0], references)
        self._worktree = references.worktree(sides[0])
        self._good, self._bad = ends = [references.environment(side, self._worktree) for side in sides]
        versions = [end.version.rpartition(".")[0] for end in ends]
        if versions[0] != versions[1]:
            raise SpecError(f"GOOD has Python {versions[0]}, BAD {versions[1]}, whose packages can't be mixed")
        found = version_changes(*ends)
        self._names = [name for name in found if name != "python"]
        self.changes = [f"{name} {found[name]}" for name in self._names]
        self._mixture = Mixture(self._good, self._bad, self._names, references.rootdir, references.say)
        self._needs = self._all_needs()
        for number, others in sorted(self._needs.items()):
            references.say(f"{self.changes[number]}: only with {self.name(frozenset(others))}, by its requirements")

    def _all_needs(self) -> dict[int, set[int]]:
        """Return the changes without which a change leaves a requirement unmet that both sides meet."""
        needs = defaultdict[int, set[int]](set)
        for side, other in ((self._bad, self._good), (self._good, self._bad)):
            for name in (name for name in self._names if name in side.packages):
                for requirement in map(Requirement, side.packages[name].requires or ()):
                    needed, allowed = canonicalize_name(requirement.name), requirement.specifier
                    is_for_all = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
                    if needed not in self._names or not is_for_all:
                        continue
                    known = [environment.versions.get(needed) for environment in (side, other)]
                    met = [version is not None and allowed.contains(version, prereleases=True) for version in known]
                    if met == [True, False]:
                        pair = self._names.index(name), self._names.index(needed)
                        first, second = pair if side is self._bad else reversed(pair)
                        needs[first].add(second)
        return needs

    def closed(self, point: Point) -> Point:
        """Return a point with the changes that its own need."""
        more = point.union(*(self._needs.get(number, ()) for number in point))
        return point if more == point else self.closed(more)

    def _open(self, point: Point) -> Reference:
        moved = frozenset(self._names[number] for number in point)
        environment = self._good if point == GOOD else self._bad
        if point not in (GOOD, self.bad):
            environment = self._mixture.environment(moved)
        return self.references.reference(replace(self._side, text=self.short(point)), self._worktree, environment)


class Variables(Axis):
    """The environment variables that differ between two sides."""

    over = Over.VARIABLES

    def __init__(self, sides: Sequence[SideSpec], references: References) -> None:
        super().__init__(sides[0], references)
        self._values = good, bad = [side.variables for side in sides]
        self._names = sorted(name for name in good.keys() | bad.keys() if good.get(name) != bad.get(name))
        shown = [[side.get(name, os.environ.get(name, "unset")) for name in self._names] for side in (good, bad)]
        self.changes = [f"{name} {there} -> {here}" for name, there, here in zip(self._names, *shown, strict=True)]

    def _changed(self, point: Point) -> dict[str, Any]:
        good, bad = self._values
        moved = {self._names[number] for number in point}
        values = {name: value for name, value in good.items() if name not in moved}
        values |= {name: value for name, value in bad.items() if name in moved}
        return {"variables": values}


class Releases(Axis):
    """The releases of a package, or the commits of its repository, after the good one up to the bad one."""

    over, is_ordered = "releases", True

    def __init__(self, side: SideSpec, references: References, span: Span) -> None:
        super().__init__(side, references)
        with raised_as(SpecError, f"--over={span.text}: ", SpecError):
            self._points = self._releases(span) if span.of_releases else self._commits(span)
        self.changes = self._points[1:]

    def _releases(self, span: Span) -> list[str]:
        ends = first, last = [Version(end.partition("+")[0]) for end in span.ends]
        pre = any(end.is_prerelease for end in ends)
        known = releases_of(span.package, self.references.rootdir, pre=pre)
        versions = {one: version for one in known if first <= (version := Version(Version(one).public)) <= last}
        if first >= last or not {*ends} <= {*versions.values()}:
            raise SpecError(f"got {first} and {last}, allowed is an older and a newer one of {', '.join(known)}")
        return [f"{span.package}=={one}" for one in versions]

    def _commits(self, span: Span) -> list[str]:
        url = span.repository or repository_of(span.package, self.references.environment(self._side))
        clone = clone_of(url, self.references.say)
        first, last = (commit_of(clone, end) for end in span.ends)
        return [f"{span.package} @ git+{url}@{one}" for one in (first, *first_parents(clone, first, last))]

    def _changed(self, point: Point) -> dict[str, Any]:
        return {"requirements": (*self._side.requirements, self._points[len(point)])}

    def short(self, point: Point) -> str:
        """Return the requirement."""
        return self._points[len(point)]

    name = short


_AXES = {axis.over: axis for axis in (Commits, Packages, Variables)}


def make_axis(over: Over | Span, sides: tuple[SideSpec, SideSpec], references: References) -> Axis:
    """Return the changes of a search.

    Raises:
        SpecError: A side can't be checked out or built, or nothing differs.
    """
    if isinstance(over, Span):
        return Releases(sides[0], references, over)
    axis = _AXES[over](sides, references)
    if not axis.changes:
        raise SpecError(f"GOOD and BAD have the same {over}")
    if not axis.is_ordered:
        num_changes = counted(len(axis.changes), over.removesuffix("s"))
        references.say(f"GOOD and BAD differ in {num_changes}: {axis.name(axis.bad)}")
    return axis
