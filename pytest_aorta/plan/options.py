"""Command line options and their ini twins, read once into frozen :class:`Options`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.profiler import PROFILERS

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
        profiler: what ranks run under, ``torch``, ``nsys`` or ``rocprofv3``; None: nothing.
        progress: ``auto``, ``on`` or ``off``: whether the terminal tells how far a launch is.
        nnodes: nodes of this run, of which the one that pytest runs on is node 0.
        node_launcher: the words of the command that starts one agent a node; none: on other nodes agents wait.
        rdzv_endpoint: this host's name or address in the nodes' network, and the port, 0 for any; None: by host name.
        join_timeout_s: how long every node's agent may take to come.
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
    profiler: str | None
    progress: str
    ab: str | None
    nnodes: int
    node_launcher: tuple[str, ...]
    rdzv_endpoint: tuple[str, int] | None
    join_timeout_s: float
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
    def is_switch(self) -> bool:
        """Whether it stands on the command line without a value."""
        return self.parse is boolean

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


def _command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"a command, quoted as for a shell ({error})") from None
    if not words:
        raise ValueError("a command, e.g. 'srun --nodes={nodes} --ntasks={nodes}'")
    return words


def parse_endpoint(text: str) -> tuple[str, int]:
    """``HOST`` or ``HOST:PORT`` as host and port, which is 0 where it is not given.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]+))(?::(?P<port>[0-9]{1,5}))?", text)
    if match is None or int(match["port"] or 0) > 65535:
        raise ValueError("HOST or HOST:PORT, an IPv6 address in square brackets")
    return match["v6"] or match["host"], int(match["port"] or 0)


def _page(text: str) -> str:
    if not text.endswith(".html") or text.endswith("/.html"):
        raise ValueError("a file whose name ends in .html")
    return text


def _version(text: str) -> str:
    # Git would take a ref that starts with a dash for one of its options.
    if not text.strip() or text.startswith("-") or text == PYTHON_PREFIX:
        raise ValueError(f"a branch, tag or commit, or {PYTHON_PREFIX}PATH of another environment's interpreter")
    return text


def boolean(text: str) -> bool:
    """Return the truth value that an ini file spells as text.

    Raises:
        ValueError: the text is not a truth value.
    """
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
    Option("require_gpus", boolean, "false", "a test skipped for lack of GPUs is an error"),
    Option(
        "update_baselines",
        boolean,
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
    Option("share_host", boolean, "false", "run timed tests beside others on this host, at the cost of noise"),
    Option(
        "lease_timeout",
        _seconds,
        "1800",
        "how long a test waits for devices that others hold (default: 1800)",
        "SECONDS",
    ),
    Option(
        "strict",
        boolean,
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
    Option("new_epoch", boolean, "false", "--update-baselines replaces what a baseline is centred on"),
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
    Option("fail_improved", boolean, "false", "a value better than its baseline fails the test"),
    Option("durations", boolean, "false", "show how long each launch took, and its parts"),
    Option(
        "locate",
        boolean,
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
    Option(
        "profiler",
        _choice(*PROFILERS),
        None,
        "keep each launch's traces beside its results: torch, nsys or rocprofv3 (default: none)",
        "NAME",
    ),
    Option(
        "progress",
        _choice("auto", "on", "off"),
        "auto",
        "how far a launch is, on the terminal: auto (not in CI), on or off (default: auto)",
        "WHEN",
    ),
    Option("nnodes", _at_least(1, 4096), "1", "nodes of this run; pytest runs on node 0 (default: 1)", "N"),
    Option(
        "node_launcher",
        _command,
        None,
        "command that starts one agent a node, e.g. 'srun --nodes={nodes} --ntasks={nodes}' (default: agents wait)",
        "COMMAND",
    ),
    Option(
        "rdzv_endpoint",
        parse_endpoint,
        None,
        "this host's name or address in the nodes' network, and a port (default: its host name, any port)",
        "HOST[:PORT]",
    ),
    Option("join_timeout", _seconds, "300", "how long every node's agent may take to come (default: 300)", "SECONDS"),
    Option("report", _page, None, "write the run as one HTML page here; needs pytest-aorta[report]", "FILE.html"),
    Option("workloads", _folder, "workloads", "folder of your own workloads (default: workloads)", "DIR"),
)


def make_options(values: Mapping[str, Any], rootdir: Path) -> Options:
    """Options of parsed values, one for each row of the table; folders are relative to ``rootdir``.

    Raises:
        SpecError: two of them contradict each other.
    """
    options = Options(
        gpus=values["gpus"],
        device=values["device"],
        require_gpus=values["require_gpus"],
        update_baselines=values["update_baselines"],
        baselines_dir=rootdir / values["baselines"],
        results_dir=None if values["results"] is None else rootdir / values["results"],
        timeout_s=values["timeout"],
        missing_baseline=values["missing_baseline"],
        strict=values["strict"],
        share_host=values["share_host"],
        lease_timeout_s=values["lease_timeout"],
        workload_dirs=(rootdir / values["workloads"],),
        launcher=values["launcher"],
        launches=values["launches"],
        new_epoch=values["new_epoch"],
        force_baseline=values["force_baseline"],
        max_launches=values["max_launches"],
        max_pairs=values["max_pairs"],
        fail_improved=values["fail_improved"],
        durations=values["durations"],
        locate=values["locate"],
        profiler=values["profiler"],
        progress=values["progress"],
        ab=values["ab"],
        nnodes=values["nnodes"],
        node_launcher=values["node_launcher"] or (),
        rdzv_endpoint=values["rdzv_endpoint"],
        join_timeout_s=values["join_timeout"],
        report=None if values["report"] is None else rootdir / values["report"],
        rootdir=rootdir,
    )
    _refuse_contradictions(options)
    return options


def parse_option(option: Option, given: str, source: str) -> Any:
    """The value that a text stands for.

    Raises:
        SpecError: it is not allowed; the message begins with ``source``.
    """
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
    if options.update_baselines and options.profiler is not None:
        raise SpecError(
            f"--update-baselines and --aorta-profiler={options.profiler} contradict each other: "
            f"a launch under a profiler makes no baseline; drop one of them"
        )
    how = {"--aorta-new-epoch": options.new_epoch, "--aorta-force-baseline": options.force_baseline is not None}
    for flag, is_given in how.items():
        if is_given and not options.update_baselines:
            raise SpecError(f"{flag} says how to record baselines; it needs --update-baselines")
    if options.nnodes > 1 and not options.node_launcher and not (options.rdzv_endpoint or ("", 0))[1]:
        raise SpecError(
            f"--aorta-nnodes={options.nnodes}: give --aorta-node-launcher, which starts the other nodes' agents, or "
            f"--aorta-rdzv-endpoint=HOST:PORT, at which agents wait (aorta agent --wait --connect HOST:PORT)"
        )
