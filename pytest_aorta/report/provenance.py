"""Labels and values that say when, where and by which command something was measured."""

import shlex
from collections.abc import Sequence

from pytest_aorta.result.facts import Launches
from pytest_aorta.result.provenance import version_text


def provenance_values(launches: Launches, command: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return each label -> its distinct values in launches; of the times, the first and the last.

    The labels and their order are always the same. ``command`` has the words of the command line for a launch that has
    none.
    """
    values: dict[str, list[str]] = {}
    for launch in launches:
        version = launch.provenance
        found = {
            "commit": version_text(version.commit, version.dirty),
            "branch": version.branch or ("none (detached head)" if version.commit else ""),
            "measured": version.measured_at,
            "device": "CPU ranks" if launch.device == "cpu" else launch.environment.get("device_name"),
            "torch": launch.environment.get("torch"),
            "command": shlex.join(version.command or command),
        }
        for label, value in found.items():
            values.setdefault(label, []).append(str(value or "unknown"))
    if times := values.get("measured"):
        values["measured"] = [min(times), max(times)]
    return {label: list(dict.fromkeys(found)) for label, found in values.items()}
