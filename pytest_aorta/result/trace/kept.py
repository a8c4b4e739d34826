"""Profiler traces that a launch kept."""

from pathlib import Path

from pytest_aorta.common.text import some_of
from pytest_aorta.result.folder import RANKS_FOLDER, TRACE_FILE

# The key of a kept trace that says whether the host had a head start in its steps.
HEAD_START_KEY = "headStart"
_NO_HEAD_START = (
    "the host had no head start in their steps, so communication can be exposed that the metrics show as hidden"
)


def traces_note(run_dir: Path, *, on_device: bool) -> tuple[str, ...]:
    """Return a note that says where torch's traces of a launch are and what they show; none without traces."""
    found = sorted(run_dir.glob(f"{RANKS_FOLDER}/*/{TRACE_FILE}"))
    if not found:
        return ()
    note = f"; {_NO_HEAD_START}" if on_device else ""
    return (f"traces of torch in {run_dir}: {some_of([str(path.relative_to(run_dir)) for path in found], 1)}{note}",)
