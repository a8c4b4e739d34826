"""Labels and values that say when, where and by which command something was measured."""

import shlex
from collections.abc import Sequence

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.provenance import Provenance, version_text

_NOT_KNOWN = "unknown"


def run_pairs(version: Provenance, command: Sequence[str]) -> list[tuple[str, str]]:
    """Return what is known of a run even if no launch left a result: commit, branch and command."""
    return [
        ("commit", version_text(version.commit, version.dirty) or _NOT_KNOWN),
        ("branch", version.branch or ("none (detached head)" if version.commit else _NOT_KNOWN)),
        ("command", shlex.join(command) or _NOT_KNOWN),
    ]


def provenance_values(launches: Sequence[LaunchFacts], command: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return each label -> its distinct values in launches; of the times, the first and the last.

    The labels and their order are always the same. ``command`` has the words of the command line for a launch that has
    none.
    """
    values: dict[str, list[str]] = {}
    for launch in launches:
        commit, branch, words = run_pairs(launch.provenance, launch.provenance.command or command)
        device = "CPU ranks" if launch.device == "cpu" else launch.environment.get("device_name")
        where = [("device", device), ("torch", launch.environment.get("torch"))]
        for label, value in (commit, branch, ("measured", launch.provenance.measured_at), *where, words):
            values.setdefault(label, []).append(str(value or _NOT_KNOWN))
    if times := values.get("measured"):
        values["measured"] = [min(times), max(times)]
    return {label: list(dict.fromkeys(found)) for label, found in values.items()}
