"""The provenance of a launch as labeled text, the same in the terminal, in Markdown and in HTML."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.provenance import Provenance, version_text
from pytest_aorta.session.history.entries import MeasuredLaunch, Side

NOT_KNOWN = "unknown"
_CPU = "CPU ranks"


def run_pairs(version: Provenance | MeasuredLaunch, command: Sequence[str]) -> list[tuple[str, str]]:
    """Return the known facts about a run in which no launch left a result: commit, branch and command."""
    return [
        ("commit", version_text(version.commit, version.dirty) or NOT_KNOWN),
        ("branch", version.branch or ("none (detached head)" if version.commit else NOT_KNOWN)),
        ("command", shlex.join(command) or NOT_KNOWN),
    ]


def provenance_pairs(launch: LaunchFacts | MeasuredLaunch, command: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return what was measured, when, where and by which command, as pairs of a label and a value.

    The labels and their order are always the same, and a value that was not stored is "unknown".

    Args:
        launch: A launch of this run, of a result or of a baseline.
        command: Words of the run's command line, for a ``MeasuredLaunch``, which has none.
    """
    if isinstance(launch, LaunchFacts):
        command, is_on_cpu = launch.command or command, launch.device == "cpu"
        launch = MeasuredLaunch.of(launch, Side.CANDIDATE)
    else:
        is_on_cpu = launch.accelerator is None
    commit, branch, words = run_pairs(launch, command)
    return [
        commit,
        branch,
        ("measured", launch.measured_at),
        ("device", _CPU if is_on_cpu else launch.accelerator or NOT_KNOWN),
        ("torch", launch.torch or NOT_KNOWN),
        words,
    ]
