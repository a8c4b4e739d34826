"""The declaration of every option: one table, from which the command line, the ini file and the docs are made."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.options.values import (
    AUTO,
    FAIL_ON_NOTHING,
    FailOn,
    LauncherKind,
    file_with_suffix,
    integer_from,
    not_allowed,
    parse_boolean,
    parse_command,
    parse_fail_on,
    parse_folder,
    parse_reason,
    parse_schedule,
    parse_seconds,
    parse_version,
    texts,
)
from pytest_aorta.plan.profiler import PROFILERS


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
        return self.type is parse_boolean

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return self.own_flag or flag_of(self.name)

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


def flag_of(name: str) -> str:
    """Return the command line's name of an option without a name of its own."""
    return "--aorta-" + name.replace("_", "-")


OPTIONS = (
    Option("gpus", "GPUs this run may use; 0: CPU ranks only", None, integer_from(0), metavar="N",
           default_text="all visible GPUs"),
    Option("device", "device that ranks compute on", AUTO, choices=(AUTO, *texts(DeviceKind))),
    Option("require_gpus", "fail tests that lack GPUs instead of skipping them", False, parse_boolean),
    Option("update_baselines", "write this run's values as the new baselines, and print what changed", False,
           parse_boolean, own_flag="--update-baselines", writes=True),
    Option("reset_baselines", "with --update-baselines: replace the baseline center instead of adding launches", False,
           parse_boolean, writes=True),
    Option("force_baseline", "with --update-baselines: record noisy launches too, and this reason", None, parse_reason,
           metavar="REASON", writes=True),
    Option("baselines", "folder of the stored baselines", "baselines", parse_folder, metavar="DIR"),
    Option("results", "folder that keeps the plan, logs and result of each launch", None, parse_folder, metavar="DIR",
           default_text="a temporary folder", writes=True),
    Option("timeout", "time limit of each launch, in seconds", 300.0, parse_seconds, metavar="SECONDS"),
    Option("fail_on", "verdicts that fail the test besides regressions: a comma-separated list of "
           f"{', '.join(FailOn)}, or {FAIL_ON_NOTHING}", frozenset({FailOn.MISSING}), parse_fail_on, metavar="LIST",
           default_text=FailOn.MISSING),
    Option("launcher", "how ranks start: by torchrun, or by a fork server with torch imported", LauncherKind.TORCHRUN,
           choices=texts(LauncherKind)),
    Option("launches", "launches per test that --update-baselines records where step times are compared", 10,
           integer_from(1, 50), metavar="N", writes=True),
    Option("max_launches", "launches per test, pairs in an A/B, before an open verdict is inconclusive; fewer than 3 "
           "never fail a test for a metric with noise", 6, integer_from(2, 12), metavar="N"),
    Option("locate", "after a numeric difference launch both sides again to find the parameter and the module", False,
           parse_boolean),
    Option("ab", "A/B reference to launch: a git ref, or python:PATH of an interpreter", None, parse_version,
           metavar="REF"),
    Option("profiler", "keep traces of this profiler with the results of each launch", None, choices=PROFILERS),
    Option("report", "write an HTML report of the run here; needs pytest-aorta[report]", None,
           file_with_suffix(".html"), metavar="FILE.html", writes=True),
    Option("markdown", "write the findings of the run here, for a comment on a pull request", None,
           file_with_suffix(".md"), metavar="FILE.md", writes=True),
    Option("history", "folder that each run adds its comparisons to, for `aorta history`", None, parse_folder,
           metavar="DIR", writes=True),
    Option("nnodes", "nodes of this run; pytest runs on node 0", 1, integer_from(1, 4096), metavar="N"),
    Option("workloads", "folder of your own workloads", "workloads", parse_folder, metavar="DIR", ini_only=True),
    Option("share_host", "run timed tests beside other tests of this host, at the cost of noise", False, parse_boolean,
           ini_only=True),
    Option("lease_timeout", "seconds a test waits for devices that others hold", 1800.0, parse_seconds,
           metavar="SECONDS", ini_only=True),
    Option("profiler_schedule", "steps of the traces of --aorta-profiler=torch: those to wait before each, to warm up, "
           "to record, and how often; with shapes of inputs and allocations on request", None, parse_schedule,
           metavar="WORDS", default_text="profile_steps, once", ini_only=True),
    Option("progress", "show the progress of a launch on the terminal; auto: not in CI", "auto",
           choices=("auto", "on", "off"), ini_only=True, writes=True),
    Option("node_launcher", "command that starts one node agent per node, e.g. 'srun --nodes={nodes} "
           "--ntasks={nodes}'", None, parse_command, metavar="COMMAND", default_text="none: one node",
           ini_only=True),
)  # fmt: skip


@dataclass(frozen=True)
class Replacement:
    """The text that replaces an option of an earlier version, on the command line and in the ini file."""

    flag: str
    ini: str

    @classmethod
    def by(cls, name: str, value: str = "") -> Replacement:
        """Return the replacement by an option of this plugin, with a value."""
        return cls(flag_of(name) + value, f"aorta_{name}{value}")


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
    renamed = {flag_of(name): replacement.flag for name, replacement in RENAMED.items()}
    return {**renamed, **ini_only, "--aorta-update-baselines": "--update-baselines"}
