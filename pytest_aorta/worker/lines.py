"""The line of the user's code and the module that run at each moment of a step, by Python's tracing of calls.

The stacks of torch's profiler name the line on which a function begins, so that all operators of a script that has no
functions would be on its first line.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Collection
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from torch import nn

from pytest_aorta.common.clock import time
from pytest_aorta.common.text import brief, is_harness, is_library
from pytest_aorta.result.trace.kineto_places import Moment
from pytest_aorta.worker.finite import roots_of
from pytest_aorta.worker.own_plan import own_plan
from pytest_aorta.worker.torch_private import CALL_MODULE, keep_from_compiler
from pytest_aorta.worker.weight_hash import logical_name

# Beyond, as in a loop over single samples in Python, a step takes too much memory.
_MOST = 2_000_000
_LONGEST_CODE = 60


# The innermost module that runs, and the file and the line of the user's code. The methods of a named tuple are Python,
# which the compiler would trace where it runs, and torch 2.11 makes an empty tuple of what it traced.
_State: TypeAlias = tuple[nn.Module | None, str, int]
_NONE: _State = (None, "", 0)


class Lines:
    """Context that notes the lines and modules of the body in the thread that enters it.

    Nothing is noted where a debugger or a measurement of coverage traces the thread.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._noted: list[tuple[int, _State]] = []
        self._stack = [_NONE]
        self._frames: list[FrameType] = []

    def __enter__(self) -> Lines:
        """Trace the frames that run, and those that follow."""
        if sys.gettrace() is None:
            keep_from_compiler(Lines._called, Lines._went_on, Lines._note, is_harness, is_library)
            self._frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
            for frame in reversed(self._frames):
                frame.f_trace = self._called(frame, "call", None)
            sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        """End the trace, and name the modules."""
        if not self._frames:
            return
        sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        if len(self._noted) < _MOST:
            names = _names({module for _, (module, *_) in self._noted if module is not None})
            self.moments = [
                Moment(began_ns, names.get(id(module), ""), _source(file, line) if file else "")
                for began_ns, (module, file, line) in self._noted
            ]
        self._noted, self._stack, self._frames = [], [_NONE], []

    def _called(self, frame: FrameType, _event: str, _arg: object) -> Any:
        code, (module, file, line) = frame.f_code, self._stack[-1]
        if code is CALL_MODULE:
            frame.f_trace_lines = False
            self._stack.append((frame.f_locals["self"], file, line))
        elif not _is_of_library(code.co_filename):
            self._stack.append((module, code.co_filename, frame.f_lineno))
        else:
            return None
        self._note()
        return self._went_on

    def _went_on(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self._stack[-1] = (*self._stack[-1][:2], frame.f_lineno)
            self._note()
        elif event == "return" and len(self._stack) > 1:
            self._stack.pop()
            self._note()
        return self._went_on

    def _note(self) -> None:
        if len(self._noted) < _MOST:
            self._noted.append((time.time_ns(), self._stack[-1]))


@cache
def _source(file: str, line: int) -> str:
    """Return the place of a line with its code, by which it is found again where other lines have moved it."""
    return f"{shown(file)}:{line} {brief(linecache.getline(file, line).strip(), _LONGEST_CODE)}".rstrip()


_is_of_library = cache(is_library)


@cache
def shown(file: str) -> str:
    """Return a path from the launch's working folder, which the script may have left, or else its last three parts."""
    plan, path = own_plan(), Path(file)
    for folder in (*([plan.folder] if plan else []), Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return "/".join(path.parts[-3:]).replace("//", "/")


def _names(modules: Collection[nn.Module]) -> dict[int, str]:
    """Return the path of each of the modules, and of others, in the largest module that has it, by its id."""
    named = (pair for root in roots_of(modules) for pair in root.named_modules())
    return {id(module): logical_name(f"{name}.").rstrip(".") for name, module in named}
