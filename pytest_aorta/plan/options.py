"""The options of a run: one table that declares them, and the frozen :class:`Options` with their values."""

from __future__ import annotations

import math
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import brief, did_you_mean
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.profiler import PROFILERS, TORCH, ProfilerSchedule

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


@dataclass(frozen=True)
class Options:
    """The settings of one run.

    Attributes:
        gpus: Number of GPUs this run may use; 0 means CPU ranks only, None all visible GPUs.
        device: ``auto``, ``cuda`` or ``cpu``.
        require_gpus: A test that lacks GPUs fails instead of being skipped.
        update_baselines: Write this run's values as new baselines.
        reset_baselines: ``update_baselines`` replaces the baseline center instead of adding launches to the baseline.
        force_baseline: Reason for recording a baseline although its launches are noisy; None: noisy launches are
            refused.
        baselines_dir: Folder of the stored baselines.
        results_dir: Folder of kept results; None means pytest's temporary folder.
        timeout_s: Default time limit of a launch, in seconds.
        fail_on: Verdicts that fail the test besides regressions and lost metrics.
        share_host: Timed tests run beside other tests of this host.
        lease_timeout_s: Seconds that a test waits for devices which other tests hold.
        workload_dirs: Folders of the user's own workloads.
        launcher: How ranks start in tests whose ``world`` marker does not choose a launcher.
        launches: Number of launches per test that ``update_baselines`` records.
        max_launches: Launches of the candidate per test, pairs in an A/B, after which an open verdict is inconclusive.
        locate: After a numeric difference, both sides are launched again to find the parameter and the module.
        profiler: Profiler that ranks run under, ``torch``, ``nsys`` or ``rocprofv3``; None: no profiler.
        profiler_schedule: Steps that torch's profiler records into kept traces; None: ``profile_steps``, once.
        progress: ``auto``, ``on`` or ``off``: whether the terminal shows the progress of a launch.
        nnodes: Number of nodes of this run; pytest runs on node 0.
        node_launcher: Words of the command that starts one node agent per node; empty: node agents wait on the nodes.
        rdzv_endpoint: Name or address of this host in the network of the nodes, and a port, 0 for any; None: host name.
        join_timeout_s: Seconds within which the node agent of every node has to connect.
        ab: A/B reference, a git ref or ``python:`` and the path of an interpreter; None: no A/B reference.
        report: HTML file of the report; None: no report.
        markdown: File of the findings as Markdown; None: no file.
        history: Folder that each run adds its comparisons to; None: no history.
        rootdir: pytest's root folder, from which relative folders start.
        command: Words of the command line of the run, which results and baselines store; empty if unknown.
        repeated: Words that repeat the options of the run in the command that reproduces a failure.
    """

    gpus: int | None
    device: str
    require_gpus: bool
    update_baselines: bool
    reset_baselines: bool
    force_baseline: str | None
    baselines_dir: Path
    results_dir: Path | None
    timeout_s: float
    fail_on: frozenset[FailOn]
    share_host: bool
    lease_timeout_s: float
    workload_dirs: tuple[Path, ...]
    launcher: LauncherKind
    launches: int
    max_launches: int
    locate: bool
    profiler: str | None
    profiler_schedule: ProfilerSchedule | None
    progress: str
    ab: str | None
    nnodes: int
    node_launcher: tuple[str, ...]
    rdzv_endpoint: tuple[str, int] | None
    join_timeout_s: float
    report: Path | None
    markdown: Path | None
    history: Path | None
    rootdir: Path
    command: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """The declaration of one option, from which the command line, the ini file, the help and the docs are made.

    Attributes:
        name: Name, ``--aorta-<name>`` on the command line and ``aorta_<name>`` in the ini file.
        help: Meaning, without the default.
        default: Value if neither the command line nor the ini file gives one.
        type: Converts text to a value, as argparse's ``type``; raises ArgumentTypeError for text that is not allowed.
        choices: Allowed values, as argparse's ``choices``; empty: ``type`` decides.
        metavar: Name of the value in the help.
        default_text: The default in words, if the value does not explain itself.
        own_flag: Name on the command line if it is not ``--aorta-<name>``.
        ini_only: The option describes the infrastructure and has no flag of pytest.
        writes: The option changes only what a run writes, so a command that reproduces a failure leaves it out.
    """

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    default_text: str | None = None
    own_flag: str | None = None
    ini_only: bool = False
    writes: bool = False

    @property
    def is_switch(self) -> bool:
        """True for a flag without a value."""
        return self.type is boolean

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return self.own_flag or _flag(self.name)

    @property
    def ini(self) -> str:
        """The name in the ini file."""
        return f"aorta_{self.name}"

    @property
    def shown_default(self) -> str:
        """The default in words."""
        if self.is_switch:
            return "off"
        return self.default_text or (
            "none"
            if self.default is None
            else f"{self.default:g}"
            if isinstance(self.default, float)
            else str(self.default)
        )

    def argparse_keywords(self) -> dict[str, Any]:
        """Return the keywords of ``add_argument``, without the default: pytest looks into the ini file first."""
        if self.is_switch:
            return {"dest": self.ini, "action": "store_true", "help": self.help}
        shown: dict[str, Any] = {"choices": self.choices} if self.choices else {"metavar": self.metavar}
        text = f"{self.help} (default: {self.shown_default})"
        return {"dest": self.ini, "type": self.type, "help": text.replace("%", "%%"), **shown}

    def word(self, value: Any) -> str:
        """Return the command line's word for ``value``, which :meth:`parse` or argparse has returned."""
        if self.is_switch:
            return self.flag
        text = ",".join(sorted(value)) or FAIL_ON_NOTHING if isinstance(value, frozenset) else str(value)
        return f"{self.flag}={text}"

    def parse(self, text: str, source: str) -> Any:
        """Return the value of a text that argparse has not parsed.

        Raises:
            SpecError: The text is not allowed; the message starts with ``source``.
        """
        try:
            value = self.type(text)
        except ArgumentTypeError as error:
            raise SpecError(f"{source}: {error}") from None
        if self.choices and value not in self.choices:
            raise SpecError(f"{source}: {not_allowed(text, f'one of {self.allowed}')}")
        return value

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty if any text is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        try:
            self.type("?")
        except ArgumentTypeError as error:
            return str(error).partition("allowed is ")[2]
        return ""


def _flag(name: str) -> str:
    return "--aorta-" + name.replace("_", "-")


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


def _reason(text: str) -> str:
    if not text.strip():
        raise not_allowed(text, "a reason, in words")
    return text.strip()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 7 * 86400:
        raise not_allowed(text, "a number of seconds above 0 and up to 604800 (a week)")
    return seconds


def _folder(text: str) -> str:
    if not text.strip():
        raise not_allowed(text, "a folder")
    return text


def _command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise not_allowed(text, f"a command, quoted as for a shell ({error})") from None
    if not words:
        raise not_allowed(text, "a command, e.g. 'srun --nodes={nodes} --ntasks={nodes}'")
    return words


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST`` or ``HOST:PORT``; the port is 0 if the text has none.

    Raises:
        ArgumentTypeError: The text has neither form.
    """
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]+))(?::(?P<port>[0-9]{1,5}))?", text)
    if match is None or int(match["port"] or 0) > 65535:
        raise not_allowed(text, "HOST or HOST:PORT, an IPv6 address in square brackets")
    return match["v6"] or match["host"], int(match["port"] or 0)


def _page(text: str) -> str:
    if not text.endswith(".html") or text.endswith("/.html"):
        raise not_allowed(text, "a file whose name ends in .html")
    return text


def _markdown(text: str) -> str:
    if not text.endswith(".md") or text.endswith("/.md"):
        raise not_allowed(text, "a file whose name ends in .md")
    return text


def _schedule(text: str) -> ProfilerSchedule:
    try:
        return ProfilerSchedule.parse(text)
    except ValueError as error:
        form = "words such as wait=1 warmup=1 active=3 repeat=2 shapes memory"
        raise not_allowed(text, form if text == "?" else f"{form} ({error})") from None


def _version(text: str) -> str:
    # Git would read a ref that starts with a dash as one of its own options.
    if not text.strip() or text.startswith("-") or text == PYTHON_PREFIX:
        raise not_allowed(text, f"a branch, tag or commit, or {PYTHON_PREFIX}PATH of another environment's interpreter")
    return text


def _fail_on(text: str) -> frozenset[FailOn]:
    words = [word.strip() for word in text.split(",")]
    if words == [FAIL_ON_NOTHING]:
        return frozenset()
    if not set(words) <= set(FailOn):
        known = [*_values(FailOn), FAIL_ON_NOTHING]
        hint = did_you_mean(sorted(set(words) - set(known)), known)
        raise not_allowed(text, f"a comma-separated list of {', '.join(FailOn)}, or {FAIL_ON_NOTHING}{hint}")
    return frozenset(map(FailOn, words))


def boolean(text: str) -> bool:
    """Return the truth value that an ini file spells as text.

    Raises:
        ArgumentTypeError: The text is not a truth value.
    """
    words = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
    if text.lower() not in words:
        raise not_allowed(text, "true or false")
    return words[text.lower()]


def _values(kinds: type[StrEnum]) -> tuple[str, ...]:
    # Plain text, since argparse's errors contain the repr of each choice.
    return tuple(kind.value for kind in kinds)


OPTIONS = (
    Option("gpus", "GPUs this run may use; 0: CPU ranks only", None, integer_from(0), metavar="N",
           default_text="all visible GPUs"),
    Option("device", "device that ranks compute on", AUTO, choices=(AUTO, *_values(DeviceKind))),
    Option("require_gpus", "fail tests that lack GPUs instead of skipping them", False, boolean),
    Option("update_baselines", "write this run's values as the new baselines, and print what changed", False, boolean,
           own_flag="--update-baselines", writes=True),
    Option("reset_baselines", "with --update-baselines: replace the baseline center instead of adding launches", False,
           boolean, writes=True),
    Option("force_baseline", "with --update-baselines: record noisy launches too, and this reason", None, _reason,
           metavar="REASON", writes=True),
    Option("baselines", "folder of the stored baselines", "baselines", _folder, metavar="DIR"),
    Option("results", "folder that keeps the plan, logs and result of each launch", None, _folder, metavar="DIR",
           default_text="a temporary folder", writes=True),
    Option("timeout", "time limit of each launch, in seconds", 300.0, _seconds, metavar="SECONDS"),
    Option("fail_on", "verdicts that fail the test besides regressions: a comma-separated list of "
           f"{', '.join(FailOn)}, or {FAIL_ON_NOTHING}", frozenset({FailOn.MISSING}), _fail_on, metavar="LIST",
           default_text=FailOn.MISSING),
    Option("launcher", "how ranks start: by torchrun, or by a fork server with torch imported", LauncherKind.TORCHRUN,
           choices=_values(LauncherKind)),
    Option("launches", "launches per test that --update-baselines records where step times are compared", 10,
           integer_from(1, 50), metavar="N", writes=True),
    Option("max_launches", "launches per test, pairs in an A/B, before an open verdict is inconclusive; fewer than 3 "
           "never fail a test", 6, integer_from(2, 12), metavar="N"),
    Option("locate", "after a numeric difference launch both sides again to find the parameter and the module", False,
           boolean),
    Option("ab", "A/B reference to launch: a git ref, or python:PATH of an interpreter", None, _version,
           metavar="REF"),
    Option("profiler", "keep traces of this profiler with the results of each launch", None, choices=PROFILERS),
    Option("report", "write an HTML report of the run here; needs pytest-aorta[report]", None, _page,
           metavar="FILE.html", writes=True),
    Option("markdown", "write the findings of the run here, for a comment on a pull request", None, _markdown,
           metavar="FILE.md", writes=True),
    Option("history", "folder that each run adds its comparisons to, for `aorta history`", None, _folder,
           metavar="DIR", writes=True),
    Option("nnodes", "nodes of this run; pytest runs on node 0", 1, integer_from(1, 4096), metavar="N"),
    Option("workloads", "folder of your own workloads", "workloads", _folder, metavar="DIR", ini_only=True),
    Option("share_host", "run timed tests beside other tests of this host, at the cost of noise", False, boolean,
           ini_only=True),
    Option("lease_timeout", "seconds a test waits for devices that others hold", 1800.0, _seconds, metavar="SECONDS",
           ini_only=True),
    Option("profiler_schedule", "steps of the traces of --aorta-profiler=torch: those to wait before each, to warm up, "
           "to record, and how often; with shapes of inputs and allocations on request", None, _schedule,
           metavar="WORDS", default_text="profile_steps, once", ini_only=True),
    Option("progress", "show the progress of a launch on the terminal; auto: not in CI", "auto",
           choices=("auto", "on", "off"), ini_only=True, writes=True),
    Option("node_launcher", "command that starts one node agent per node, e.g. 'srun --nodes={nodes} "
           "--ntasks={nodes}'", None, _command, metavar="COMMAND", default_text="node agents wait on the nodes",
           ini_only=True),
    Option("rdzv_endpoint", "name or address of this host in the network of the nodes, and a port", None,
           parse_endpoint, metavar="HOST[:PORT]", default_text="host name, any port", ini_only=True),
    Option("join_timeout", "seconds within which the node agent of every node has to connect", 300.0, _seconds,
           metavar="SECONDS", ini_only=True),
)  # fmt: skip


@dataclass(frozen=True)
class Replacement:
    """The text that replaces an option of an earlier version, on the command line and in the ini file."""

    flag: str
    ini: str

    @classmethod
    def by(cls, name: str, value: str = "") -> Replacement:
        """Return the replacement by an option of this plugin, with a value."""
        return cls(_flag(name) + value, f"aorta_{name}{value}")


# Names of earlier versions, in the ini file and on the command line.
RENAMED = {
    "strict": Replacement.by("fail_on", "=inconclusive,not-applicable,missing"),
    "fail_improved": Replacement.by("fail_on", "=improved,missing"),
    "missing_baseline": Replacement.by("fail_on", "=none in place of ignore, or --update-baselines in place of record"),
    "new_epoch": Replacement.by("reset_baselines"),
    "max_pairs": Replacement.by("max_launches"),
    "durations": Replacement(
        "pytest's --durations=N, 0 for all launches", "addopts = --durations=N, 0 for all launches"
    ),
}


def renamed_flags() -> dict[str, str]:
    """Return the text that replaces each flag of an earlier version, by flag."""
    ini_only = {
        option.flag: f"the ini key {option.ini}, or -o {option.ini}=..." for option in OPTIONS if option.ini_only
    }
    renamed = {_flag(name): replacement.flag for name, replacement in RENAMED.items()}
    return {**renamed, **ini_only, "--aorta-update-baselines": "--update-baselines"}


def make_options(values: Mapping[str, Any], rootdir: Path) -> Options:
    """Return the options from converted values, one per row of the table; folders are relative to ``rootdir``.

    Raises:
        SpecError: Two options contradict each other, or a file is in the place of a folder, or the reverse.
    """
    for name in ("baselines", "results", "history", "report", "markdown"):
        if values[name] is not None:
            with suppress(OSError):  # a path that can't be read is reported where it is used
                _check_place(name, values[name], rootdir / values[name], is_file=name in ("report", "markdown"))
    options = Options(
        gpus=values["gpus"],
        device=values["device"],
        require_gpus=values["require_gpus"],
        update_baselines=values["update_baselines"],
        reset_baselines=values["reset_baselines"],
        force_baseline=values["force_baseline"],
        baselines_dir=rootdir / values["baselines"],
        results_dir=None if values["results"] is None else rootdir / values["results"],
        timeout_s=values["timeout"],
        fail_on=values["fail_on"],
        share_host=values["share_host"],
        lease_timeout_s=values["lease_timeout"],
        workload_dirs=(rootdir / values["workloads"],),
        launcher=LauncherKind(values["launcher"]),
        launches=values["launches"],
        max_launches=values["max_launches"],
        locate=values["locate"],
        profiler=values["profiler"],
        profiler_schedule=values["profiler_schedule"],
        progress=values["progress"],
        ab=values["ab"],
        nnodes=values["nnodes"],
        node_launcher=values["node_launcher"] or (),
        rdzv_endpoint=values["rdzv_endpoint"],
        join_timeout_s=values["join_timeout"],
        report=None if values["report"] is None else rootdir / values["report"],
        markdown=None if values["markdown"] is None else rootdir / values["markdown"],
        history=None if values["history"] is None else rootdir / values["history"],
        rootdir=rootdir,
    )
    _refuse_contradictions(options)
    return options


def _check_place(name: str, given: str, path: Path, *, is_file: bool) -> None:
    if is_file and path.is_dir():
        raise SpecError(f"{_flag(name)}={given}: {path} is a folder, allowed is a file")
    folder = path.parent if is_file else path
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir():
        raise SpecError(f"{_flag(name)}={given}: {nearest} is a file, allowed is a folder")


def _refuse_contradictions(options: Options) -> None:
    wants_cpu = options.device == DeviceKind.CPU or options.gpus == 0
    if options.require_gpus and wants_cpu:
        asked = "--aorta-device=cpu" if options.device == DeviceKind.CPU else "--aorta-gpus=0"
        raise SpecError(f"--aorta-require-gpus and {asked} contradict each other; drop one of them")
    if options.device == DeviceKind.CUDA and options.gpus == 0:
        raise SpecError("--aorta-device=cuda and --aorta-gpus=0 contradict each other; drop one of them")
    if options.profiler_schedule is not None and options.profiler not in (None, TORCH):
        raise SpecError(
            f"aorta_profiler_schedule={options.profiler_schedule} is a schedule of torch's profiler, and "
            f"--aorta-profiler={options.profiler} records all steps; drop one of them"
        )
    if options.update_baselines and options.profiler is not None:
        raise SpecError(
            f"--update-baselines and --aorta-profiler={options.profiler} contradict each other: "
            f"a launch under a profiler can't be a baseline; drop one of them"
        )
    # Only --update-baselines writes baselines, so no other option implies it.
    how = {"--aorta-reset-baselines": options.reset_baselines,
           "--aorta-force-baseline": options.force_baseline is not None}  # fmt: skip
    for flag, is_given in how.items():
        if is_given and not options.update_baselines:
            raise SpecError(f"{flag} changes how baselines are recorded; give --update-baselines too")
    if options.nnodes > 1 and not options.node_launcher and not (options.rdzv_endpoint or ("", 0))[1]:
        raise SpecError(
            f"--aorta-nnodes={options.nnodes}: set the ini key aorta_node_launcher, a command that starts the node "
            f"agents, or aorta_rdzv_endpoint=HOST:PORT, where node agents connect "
            f"(aorta agent --wait --connect HOST:PORT)"
        )
