"""The options of a run. Each option is one field of :class:`Options`."""

from __future__ import annotations

import math
import os
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.text import brief, did_you_mean
from pytest_aorta.plan.side import parse_side

# Replaces the suffix of the file of --aorta-markdown: the same findings as data.
FINDINGS_SUFFIX, CODE_QUALITY_SUFFIX = ".findings.json", ".codequality.json"
TORCH = "torch"


def _not_allowed(given: object, allowed: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"got {brief(repr(given))}, allowed is {allowed}")


def integer_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse ``type`` for integers from ``least`` to ``most``, or without an upper limit."""

    def parse(text: str) -> int:
        # Python converts no more than 4,300 digits.
        is_number = text.isascii() and text.isdigit() and len(text) <= 18
        if not is_number or int(text) < least or (most is not None and int(text) > most):
            upto = f" of {least} or more" if most is None else f" from {least} to {most}"
            raise _not_allowed(text, f"an integer{upto}")
        return int(text)

    return parse


# Value of --aorta-fail-on with which only regressions and lost metrics fail.
FAIL_ON_NOTHING = "none"


class LauncherKind(StrEnum):
    """A way to start ranks: a torchrun agent, a fork of a process that has imported torch, or agents of nodes."""

    TORCHRUN = "torchrun"
    FORKSERVER = "forkserver"
    NODES = "nodes"


class WithoutGpus(StrEnum):
    """The ways to treat a test that lacks GPUs."""

    SKIP = "skip"
    FAIL = "fail"
    SIMULATE = "simulate"


class FailOn(StrEnum):
    """A verdict that fails the test on request."""

    INCONCLUSIVE = "inconclusive"
    MARKED_INCONCLUSIVE = "marked-inconclusive"
    """Inconclusive, of a metric that a marker names."""
    NOT_APPLICABLE = "not-applicable"
    IMPROVED = "improved"
    MISSING = "missing"


class Recording(NamedTuple):
    """How baselines are recorded.

    Attributes:
        replaces: The launches replace the baseline instead of adding to it.
        reason: Why launches are recorded although they are noisy; None: noisy launches are refused.
    """

    replaces: bool = False
    reason: str | None = None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 7 * 86400:
        raise _not_allowed(text, "a number of seconds above 0 and up to 604800 (a week)")
    return seconds


def _folder(text: str) -> Path:
    if not text.strip():
        raise _not_allowed(text, "a folder")
    return Path(text)


def _folders(given: str | Sequence[str]) -> tuple[Path, ...]:
    return tuple(map(_folder, [given] if isinstance(given, str) else given))


def file_ending_in(*suffixes: str) -> Callable[[str], Path]:
    """Return an argparse ``type`` for files whose names end in one of the suffixes."""

    def parse(text: str) -> Path:
        if Path(text).suffix not in suffixes:
            raise _not_allowed(text, f"a file whose name ends in {' or '.join(suffixes)}")
        return Path(text)

    return parse


def shell_words(text: str) -> list[str]:
    """Return the words of a text, as an argparse ``type``."""
    with raised_as(ArgumentTypeError, f"got {text!r}, allowed are words, quoted as for a shell (", ValueError, ")"):
        return shlex.split(text)


def _side(text: str) -> str:
    parse_side(text)
    return text


def _fail_on(given: str | Sequence[str]) -> frozenset[FailOn]:
    words = [word.strip() for word in (given if isinstance(given, str) else ",".join(given)).split(",")]
    if words == [FAIL_ON_NOTHING]:
        return frozenset()
    if not set(words) <= set(FailOn):
        known = [*map(str, FailOn), FAIL_ON_NOTHING]
        hint = did_you_mean(sorted(set(words) - set(known)), known)
        raise _not_allowed(given, f"a comma-separated list of {', '.join(FailOn)}, or {FAIL_ON_NOTHING}{hint}")
    return frozenset(map(FailOn, words))


def _record(text: str) -> Recording:
    found = re.fullmatch(r"(replace)|(?:(replace),)?noisy:\s*(\S.*)", text, re.DOTALL)
    if found is None:
        raise _not_allowed(text, "replace, noisy:REASON, or replace,noisy:REASON")
    return Recording(bool(found[1] or found[2]), found[3])


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option.

    Attributes:
        name: Name of the field, ``--aorta-<name>`` on the command line and ``aorta_<name>`` in the ini file.
        help: Meaning, without the default.
        default: Value if neither the command line nor the ini file gives one.
        type: Converts text, as argparse's ``type``, or the list that an ini key of type ``args`` gives; ``bool`` for a
            flag without a value.
        ini: pytest's type of the ini key; None: the option describes one run, and has no ini key.
        choices: Allowed values, as argparse's ``choices``.
        metavar: Name of the value in the help.
        shown: The default in words, if the value does not explain itself.
        own_flag: Name on the command line if it is not ``--aorta-<name>``.
        ini_only: The option describes the infrastructure, and has an ini key but no flag.
        writes: The option changes only what a run writes, so a command that reproduces a failure leaves it out.
    """

    name: str
    help: str
    default: Any = None
    type: Callable[[Any], Any] = str
    ini: str | None = "string"
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    shown: str | None = None
    own_flag: str | None = None
    ini_only: bool = False
    writes: bool = False

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return self.own_flag or "--aorta-" + self.name.replace("_", "-")

    @property
    def key(self) -> str:
        """The name in the ini file, and among the values that argparse returns."""
        return f"aorta_{self.name}"

    @property
    def is_switch(self) -> bool:
        """True for a flag without a value."""
        return self.type is bool

    @property
    def shown_default(self) -> str:
        """The default in words."""
        return "off" if self.is_switch else self.shown or str(self.default).lower()

    def argparse_keywords(self) -> dict[str, Any]:
        """Return the keywords of ``add_argument``, without the default: pytest looks into the ini file first."""
        if self.is_switch:
            return {"dest": self.key, "action": "store_true", "help": self.help}
        shown: dict[str, Any] = {"choices": self.choices} if self.choices else {"metavar": self.metavar}
        text = f"{self.help} (default: {self.shown_default})".replace("%", "%%")
        return {"dest": self.key, "type": self.type, "help": text, **shown}

    def word(self, value: Any) -> str:
        """Return the command line's word for ``value``, which argparse has returned."""
        if self.is_switch:
            return self.flag
        text = ",".join(sorted(value)) or FAIL_ON_NOTHING if isinstance(value, frozenset) else str(value)
        return f"{self.flag}={text}"

    def read(self, given: Any) -> Any:
        """Return the value of what the ini file gives: a text, or a value of the key's type.

        Raises:
            SpecError: The value is not allowed.
        """
        with raised_as(SpecError, f"ini key {self.key}: ", ArgumentTypeError):
            value = self.type(given if self.ini in ("args", "bool") else str(given))
            if self.choices and value not in self.choices:
                raise _not_allowed(given, f"one of {', '.join(self.choices)}")
        return value


def _option(help: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Options:
    """The settings of one run.

    Attributes:
        rootdir: pytest's root folder, from which relative folders start.
        started_in: The folder in which pytest was started; None if unknown.
        command: Words of the command line of the run, which results and baselines store; empty if unknown.
        repeated: Words that repeat the options of the run in the command that reproduces a failure.
    """

    gpus: int | None = _option(
        "GPUs this run is for, of which some may be missing; 0: CPU ranks only",
        type=integer_from(0),
        ini="int",
        metavar="N",
        shown="all visible GPUs",
    )
    without_gpus: WithoutGpus = _option(
        "what becomes of tests that need more GPUs than are visible: skip; fail, also of tests that would run on CPU "
        "ranks; simulate, as one rank of a simulated world, of which only costs are compared",
        WithoutGpus.SKIP,
        choices=tuple(each.value for each in WithoutGpus),
    )
    update_baselines: bool = _option(
        "write this run's values as the new baselines, and print what changed",
        False,
        type=bool,
        ini=None,
        own_flag="--update-baselines",
        writes=True,
    )
    record: Recording = _option(
        "with --update-baselines: replace, the launches replace the baseline; noisy:REASON, noisy launches are "
        "recorded too; or both, replace,noisy:REASON",
        Recording(),
        type=_record,
        ini=None,
        metavar="HOW",
        shown="add launches that are not noisy",
        writes=True,
    )
    baselines: Path = _option("folder of the stored baselines", Path("baselines"), type=_folder, metavar="DIR")
    results: Path | None = _option(
        "folder that keeps the plan, logs and result of each launch",
        type=_folder,
        metavar="DIR",
        shown="a temporary folder",
        writes=True,
    )
    timeout: float = _option(
        "time limit of each launch, in seconds", 300.0, type=_seconds, ini="float", metavar="SECONDS", shown="300"
    )
    fail_on: frozenset[FailOn] = _option(
        "verdicts that fail the test besides regressions: a comma-separated list of "
        f"{', '.join(FailOn)}, or {FAIL_ON_NOTHING}",
        frozenset({FailOn.MISSING}),
        type=_fail_on,
        ini="args",
        metavar="LIST",
        shown=FailOn.MISSING,
    )
    launcher: LauncherKind = _option(
        "how ranks start: by torchrun, or by a fork server with torch imported",
        LauncherKind.TORCHRUN,
        choices=(LauncherKind.TORCHRUN.value, LauncherKind.FORKSERVER.value),
    )
    launches: int = _option(
        "most launches per test that --update-baselines records, 1 to 50; it ends earlier, once the tolerances are "
        "enforced or can't be",
        10,
        type=integer_from(1, 50),
        ini="int",
        metavar="N",
        writes=True,
    )
    max_launches: int = _option(
        "launches per test, pairs in an A/B, before an open verdict is inconclusive, 2 to 12; fewer than 3 never fail "
        "a test for a metric with noise",
        6,
        type=integer_from(2, 12),
        ini="int",
        metavar="N",
    )
    no_locate: bool = _option(
        "after a difference in numerics do not launch again to find the step, parameter, module and operator",
        False,
        type=bool,
        ini="bool",
    )
    ab: str | None = _option(
        "A/B reference to launch: a git ref, python:PATH of an interpreter, lock:FILE of requirements, "
        "with:REQUIREMENT, env:NAME=VALUE, or several of them, joined by spaces",
        type=_side,
        metavar="SIDE",
    )
    profiler: str | None = _option("keep traces of this profiler with the results of each launch", choices=(TORCH,))
    report: Path | None = _option(
        "write an HTML report of the run here; needs pytest-aorta[report]",
        type=file_ending_in(".html"),
        metavar="FILE.html",
        writes=True,
    )
    markdown: Path | None = _option(
        "write the findings of the run here, for a comment on a pull request",
        type=file_ending_in(".md"),
        metavar="FILE.md",
        writes=True,
    )
    history: Path | None = _option(
        "folder that each run adds its comparisons to, for `aorta history`",
        type=_folder,
        metavar="DIR",
        writes=True,
    )
    nnodes: int = _option(
        "nodes of this run; pytest runs on node 0", 1, type=integer_from(1, 4096), ini="int", metavar="N"
    )
    workloads: tuple[Path, ...] = _option(
        "folders of your own workloads",
        (Path("workloads"),),
        type=_folders,
        ini="args",
        metavar="DIR",
        shown="workloads",
        ini_only=True,
    )
    node_launcher: tuple[str, ...] = _option(
        "command that starts one node agent per node, e.g. srun --nodes={nodes} --ntasks={nodes}",
        (),
        type=tuple,
        ini="args",
        shown="none: one node",
        ini_only=True,
    )
    rootdir: Path = Path()
    started_in: Path | None = None
    command: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()

    def argument_of(self, nodeid: str) -> str:
        """Return the argument that names a test to a pytest that is started in the folder of this run."""
        file, colons, test = nodeid.partition("::")
        # The node id of a test outside of the root folder begins with another path.
        if self.started_in is None or not (path := self.rootdir / file).is_file():
            return nodeid
        return f"{os.path.relpath(path, self.started_in)}{colons}{test}"


OPTIONS = tuple(
    Option(name=part.name, default=part.default, **part.metadata) for part in fields(Options) if part.metadata
)


def make_options(values: Mapping[str, Any], rootdir: Path, **others: Any) -> Options:
    """Return the options from values by name, the default of those that are not given.

    Folders are relative to ``rootdir``; ``others`` are the fields of :class:`Options` that are not options.

    Raises:
        SpecError: Two options contradict each other, a file is in the place of a folder or the reverse, or the folder
            of the baselines to record can't be written.
    """
    found = {option.name: values.get(option.name, option.default) for option in OPTIONS}
    for option in OPTIONS:
        if isinstance(path := found[option.name], Path):
            found[option.name] = rootdir / path
            with suppress(OSError):  # a path that can't be read is reported where it is used
                _check_place(f"{option.flag}={path}", rootdir / path, is_file=option.name in ("report", "markdown"))
    for path in found["workloads"]:
        if path not in Options.workloads and not (rootdir / path).is_dir():
            raise SpecError(f"aorta_workloads, --workloads: there is no folder {rootdir / path}")
    found["workloads"] = tuple(rootdir / path for path in found["workloads"])
    found["launcher"] = LauncherKind(found["launcher"])
    found["without_gpus"] = WithoutGpus(found["without_gpus"])
    options = Options(**found, rootdir=rootdir, **others)
    _refuse_contradictions(options)
    return options


def _check_place(given: str, path: Path, *, is_file: bool) -> None:
    if is_file and path.is_dir():
        raise SpecError(f"{given}: {path} is a folder, allowed is a file")
    nearest = _nearest(path.parent if is_file else path)
    if not nearest.is_dir():
        raise SpecError(f"{given}: {nearest} is a file, allowed is a folder")


def _nearest(folder: Path) -> Path:
    """Return the folder, or the closest of its parents that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _refuse_contradictions(options: Options) -> None:
    if options.update_baselines and options.profiler:
        raise SpecError(
            f"--update-baselines and --aorta-profiler={options.profiler} contradict each other: "
            f"a launch under a profiler can't be a baseline; drop one of them"
        )
    if options.update_baselines and not os.access(nearest := _nearest(options.baselines), os.W_OK):
        raise SpecError(
            f"--aorta-baselines={options.baselines}: {nearest} can't be written, and --update-baselines writes "
            f"there; make it writable, or name another folder"
        )
    if options.nnodes > 1 and not options.node_launcher:
        raise SpecError(
            f"--aorta-nnodes={options.nnodes}: set the ini key aorta_node_launcher, a command that starts a node agent "
            f"on each node, such as 'srun --nodes={{nodes}} --ntasks={{nodes}}'"
        )
    if options.nnodes > 1 and options.results is None:
        raise SpecError(f"--aorta-nnodes={options.nnodes}: give --aorta-results, a folder that all nodes share")
