"""Command line options and their ini twins, read once into frozen :class:`Options`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.errors import SpecError

# Before the interpreter of another environment, where --aorta-ab names one.
PYTHON_PREFIX = "python:"


@dataclass(frozen=True)
class Options:
    """What the user asked of this run.

    Attributes:
        gpus: devices this run may use; 0 means CPU ranks only, None what is visible.
        device: ``auto``, ``cuda`` or ``cpu``.
        require_gpus: a test that lacks GPUs is an error, not a skip.
        update_baselines: replace baselines with this run's values.
        baselines_dir, results_dir: folders; results_dir None means pytest's temporary folder.
        timeout_s: default time limit of a launch.
        missing_baseline: ``fail``, ``record`` or ``ignore``.
        strict: verdicts that decide nothing (not applicable, inconclusive) fail the test.
        share_host: timed tests do not ask for the host alone.
        lease_timeout_s: how long a test waits for devices that others hold.
        workload_dirs: folders that hold the user's own workloads.
        launcher: ``torchrun`` or ``forkserver``, for tests whose marker says nothing.
        launches: of each test, that --update-baselines records.
        new_epoch: --update-baselines replaces the centre of a baseline instead of adding launches to it.
        force_baseline: why a noisy set of launches is to be taken all the same.
        max_launches: of a test, before a verdict is inconclusive.
        max_pairs: of launches in an A/B, before a verdict is inconclusive.
        fail_improved: a value that is better than its baseline fails the test.
        durations: the summary tells how long each launch took, and its parts.
        locate: upon a numeric difference both sides are launched again to find the parameter and the module.
        ab: the reference version, a git ref or ``python:`` and an interpreter; None: there is none.
        report: the HTML file that the run is told in; None: there is none.
    """

    gpus: int | None
    device: str
    require_gpus: bool
    update_baselines: bool
    baselines_dir: Path
    results_dir: Path | None
    timeout_s: float
    missing_baseline: str
    strict: bool
    share_host: bool
    lease_timeout_s: float
    workload_dirs: tuple[Path, ...]
    launcher: str
    launches: int
    new_epoch: bool
    force_baseline: str | None
    max_launches: int
    max_pairs: int
    fail_improved: bool
    durations: bool
    locate: bool
    ab: str | None
    report: Path | None
    rootdir: Path


@dataclass(frozen=True)
class Option:
    """One option: ``--aorta-<name>`` on the command line, ``aorta_<name>`` in the ini file."""

    name: str
    parse: Callable[[str], Any]
    default: str | None
    help: str
    metavar: str | None = None
    alias: str | None = None

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--aorta-" + self.name.replace("_", "-")

    @property
    def ini(self) -> str:
        """Its name in the ini file."""
        return f"aorta_{self.name}"


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text

    return parse


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("an integer of 0 or more")
    return int(text)


def _at_least(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise ValueError(f"an integer from {least} to {most}")
        return int(text)

    return parse


def _reason(text: str) -> str:
    if not text.strip():
        raise ValueError("a reason, in words")
    return text.strip()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 7 * 86400:
        raise ValueError("a number of seconds above 0 and up to 604800 (a week)")
    return seconds


def _folder(text: str) -> str:
    if not text.strip():
        raise ValueError("a folder")
    return text


def _page(text: str) -> str:
    if not text.endswith(".html") or text.endswith("/.html"):
        raise ValueError("a file whose name ends in .html")
    return text


def _version(text: str) -> str:
    # Git would take a ref that starts with a dash for one of its options.
    if not text.strip() or text.startswith("-") or text == PYTHON_PREFIX:
        raise ValueError(f"a branch, tag or commit, or {PYTHON_PREFIX}PATH of another environment's interpreter")
    return text


def _boolean(text: str) -> bool:
    words = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


OPTIONS = (
    Option("gpus", _count, None, "GPUs this run may use; 0: CPU ranks only (default: what is visible)", "N"),
    Option("device", _choice("auto", "cuda", "cpu"), "auto", "device ranks compute on: auto, cuda or cpu", "KIND"),
    Option("require_gpus", _boolean, "false", "a test skipped for lack of GPUs is an error"),
    Option(
        "update_baselines",
        _boolean,
        "false",
        "write this run's values as the new baselines, and print what changed",
        alias="--update-baselines",
    ),
    Option("baselines", _folder, "baselines", "folder of the stored baselines (default: baselines)", "DIR"),
    Option(
        "results",
        _folder,
        None,
        "keep each launch's plan, logs and result here (default: a temporary folder)",
        "DIR",
    ),
    Option("timeout", _seconds, "300", "time limit of a launch in seconds (default: 300)", "SECONDS"),
    Option(
        "missing_baseline",
        _choice("fail", "record", "ignore"),
        "fail",
        "what a missing baseline does: fail, record or ignore (default: fail)",
        "ACTION",
    ),
    Option("share_host", _boolean, "false", "run timed tests beside others on this host, at the cost of noise"),
    Option(
        "lease_timeout",
        _seconds,
        "1800",
        "how long a test waits for devices that others hold (default: 1800)",
        "SECONDS",
    ),
    Option(
        "strict",
        _boolean,
        "false",
        "verdicts that decide nothing (not applicable, inconclusive) fail the test",
    ),
    Option(
        "launcher",
        _choice("torchrun", "forkserver"),
        "torchrun",
        "what starts ranks: torchrun, or forkserver from a process with torch imported (default: torchrun)",
        "KIND",
    ),
    Option(
        "launches",
        _at_least(1, 50),
        "10",
        "launches of each test that --update-baselines records, where step times are compared (default: 10)",
        "K",
    ),
    Option("new_epoch", _boolean, "false", "--update-baselines replaces what a baseline is centred on"),
    Option(
        "force_baseline",
        _reason,
        None,
        "record a noisy baseline all the same, and this reason with it",
        "REASON",
    ),
    Option(
        "max_launches",
        _at_least(1, 13),
        "5",
        "launches of a test, before a verdict is inconclusive; fewer than 3 never fail it (default: 5)",
        "N",
    ),
    Option(
        "max_pairs",
        _at_least(2, 12),
        "6",
        "pairs of launches of an A/B, before a verdict is inconclusive; fewer than 3 never fail it (default: 6)",
        "N",
    ),
    Option("fail_improved", _boolean, "false", "a value better than its baseline fails the test"),
    Option("durations", _boolean, "false", "show how long each launch took, and its parts"),
    Option(
        "locate",
        _boolean,
        "false",
        "launch both sides of a numeric comparison that failed once more, to find the parameter and the module",
    ),
    Option(
        "ab",
        _version,
        None,
        "version that A/B comparisons launch as their reference: a git ref, or python:PATH of an interpreter",
        "REF",
    ),
    Option("report", _page, None, "write the run as one HTML page here; needs pytest-aorta[report]", "FILE.html"),
    Option("workloads", _folder, "workloads", "folder of your own workloads (default: workloads)", "DIR"),
)


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini twin."""
    group = parser.getgroup("aorta", "distributed training workloads (pytest-aorta)")
    for option in OPTIONS:
        flags = [flag for flag in (option.alias, option.flag) if flag]
        if option.parse is _boolean:
            group.addoption(*flags, dest=option.ini, action="store_const", const="true", default=None, help=option.help)
        else:
            group.addoption(*flags, dest=option.ini, default=None, metavar=option.metavar, help=option.help)
        parser.addini(option.ini, f"ini twin of {option.flag}: {option.help}", type="string", default=option.default)


def read_options(config: pytest.Config) -> Options:
    """Parse and check every option; the command line wins over the ini file.

    Raises:
        SpecError: a value is not allowed, or two options contradict each other.
    """
    values = {option.name: _value(config, option) for option in OPTIONS}
    options = Options(
        gpus=values["gpus"],
        device=values["device"],
        require_gpus=values["require_gpus"],
        update_baselines=values["update_baselines"],
        baselines_dir=config.rootpath / values["baselines"],
        results_dir=None if values["results"] is None else config.rootpath / values["results"],
        timeout_s=values["timeout"],
        missing_baseline=values["missing_baseline"],
        strict=values["strict"],
        share_host=values["share_host"],
        lease_timeout_s=values["lease_timeout"],
        workload_dirs=(config.rootpath / values["workloads"],),
        launcher=values["launcher"],
        launches=values["launches"],
        new_epoch=values["new_epoch"],
        force_baseline=values["force_baseline"],
        max_launches=values["max_launches"],
        max_pairs=values["max_pairs"],
        fail_improved=values["fail_improved"],
        durations=values["durations"],
        locate=values["locate"],
        ab=values["ab"],
        report=None if values["report"] is None else config.rootpath / values["report"],
        rootdir=config.rootpath,
    )
    _refuse_contradictions(options)
    return options


def _value(config: pytest.Config, option: Option) -> Any:
    given, source = config.getoption(option.ini), option.flag
    if given is None:
        given, source = config.getini(option.ini), f"ini option {option.ini}"
    if given is None:
        return None
    try:
        return option.parse(given)
    except ValueError as error:
        raise SpecError(f"{source}: got {given!r}, allowed is {error}") from None


def _refuse_contradictions(options: Options) -> None:
    wants_cpu = options.device == "cpu" or options.gpus == 0
    if options.require_gpus and wants_cpu:
        asked = "--aorta-device=cpu" if options.device == "cpu" else "--aorta-gpus=0"
        raise SpecError(f"--aorta-require-gpus and {asked} contradict each other; drop one of them")
    if options.device == "cuda" and options.gpus == 0:
        raise SpecError("--aorta-device=cuda and --aorta-gpus=0 contradict each other; drop one of them")
    how = {"--aorta-new-epoch": options.new_epoch, "--aorta-force-baseline": options.force_baseline is not None}
    for flag, is_given in how.items():
        if is_given and not options.update_baselines:
            raise SpecError(f"{flag} says how to record baselines; it needs --update-baselines")
