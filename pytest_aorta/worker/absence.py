"""Why a script has no measured step, as far as its own process can tell."""

import os
import re
import sys

from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.evidence import log_tail
from pytest_aorta.result.folder import OUTPUT_LOG
from pytest_aorta.worker.accelerator import own_device
from pytest_aorta.worker.own_plan import own_folder
from pytest_aorta.worker.simulation import is_simulated

# Processor time of child processes that is more than that of a tool which the script has called, in seconds.
_CHILD_S = 2.0
_ABOUT_DEVICES = re.compile(r"\b(cuda|gpus?|accelerators?)\b", re.IGNORECASE)
_LAST_LINES = 5


class Absence:
    """The signs of why no step was measured.

    Attributes:
        has_optimizer: Whether the script has made an optimizer.
        has_loaded: Whether the script has called ``torch.load``.
    """

    def __init__(self) -> None:
        self.has_optimizer = self.has_loaded = False
        self._children_before_s = _all_children_s()

    @property
    def is_without_training(self) -> bool:
        """Return whether the script does not train: it made no optimizer, loaded nothing, and delegated to nobody."""
        return not (self.has_optimizer or self.has_loaded or self._child_s() > _CHILD_S or _lacks_devices())

    def cause(self, num_steps: int, warmup: int) -> str:
        """Return why no step was timed, and the last lines of the script.

        ``num_steps`` is the largest number of steps of an optimizer, of which ``warmup`` warm up.
        """
        return f"{self._cause(num_steps, warmup)}{_last_lines()}"

    def _cause(self, num_steps: int, warmup: int) -> str:
        if num_steps:
            made, needed = f"its optimizer made {counted(num_steps, 'step')}", warmup + 2
            if is_simulated():
                return (
                    f"{made}, fewer than {needed}: data that are split over more ranks have fewer steps, and simulated "
                    f"ranks exchange no values, so a script that ends at a reduced loss may end early; give it a "
                    f"number of steps"
                )
            return (
                f"{made}, and the first {needed - 1} are not timed, as the first has no begin and {warmup} warm up; "
                f"run at least {needed} steps, or lower warmup: record={{'warmup': {warmup}}} in the test, "
                f"record_optimizer_steps(warmup={warmup}) in a script that calls it"
            )
        if _lacks_devices():
            return "no optimizer stepped, and the script's last lines say that it lacks GPUs; this rank has none"
        if (child_s := self._child_s()) > _CHILD_S:
            return (
                f"no optimizer stepped in this process, and child processes took {child_s:.0f} s of processor time: "
                f"their steps are not recorded; have torchrun start the ranks, and not the script"
            )
        if self.has_loaded:
            return (
                "no optimizer stepped after torch.load; if the script resumed from the checkpoint of a complete run, "
                "remove the checkpoint, or have the script write it to a folder of each launch"
            )
        return "the script made an optimizer, and no optimizer stepped"

    def _child_s(self) -> float:
        """Return the processor time of child processes that have ended since the observer was made, in seconds."""
        return _all_children_s() - self._children_before_s


def _lacks_devices() -> bool:
    return own_device().type == "cpu" and bool(_ABOUT_DEVICES.search(_last_lines()))


def _all_children_s() -> float:
    """Return the processor time of all child processes that have ended, in seconds."""
    used = os.times()
    return used.children_user + used.children_system


def _last_lines() -> str:
    """Return the last lines of this rank's output, each behind a bar; empty without any."""
    if (folder := own_folder()) is None:
        return ""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    lines = log_tail(folder / OUTPUT_LOG)[-_LAST_LINES:]
    return "".join(["; its last lines:" if lines else "", *(f"\n  | {brief(line)}" for line in lines)])
