"""The test of a restart that ``aorta init`` writes for a script that saves and loads, and what launches have shown."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytest_aorta.cli.init_launches import Pair
from pytest_aorta.cli.target import ScriptTarget
from pytest_aorta.common.errors import AortaError, ComparisonFailed
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.verdict.bitwise import num_steps
from pytest_aorta.verdict.restarts import BEGAN_ANEW, NUM_STEPS, STEPS

# An option by which a script goes on from a checkpoint.
_OPTION = re.compile(r"""["'](--[\w-]*(?:resume|load|restore|checkpoint|ckpt)[\w-]*)["']""")
_MOST_TRIED = 6
_UNTESTED = "a restart is not tested: the script"


class Restart(NamedTuple):
    """The arguments of ``compare_restart`` that fit a script, empty if none do, and what was measured."""

    call: str = ""
    note: str = ""


def restart_of(runner: WorkloadRunner, target: ScriptTarget, pair: Pair) -> Restart:
    """Restart a script after a step at which it has saved, by each argument that may load what it has written."""
    one = pair.one
    if target.script is None or not pair.repeats or not isinstance(one, WorkloadResult):
        return Restart()
    steps, own, given = num_steps(one), [*target.args], dict[str, Any]()
    saved = sorted({step for rank in one.ranks for series in rank.series for step in series.saved})
    after = next((step for step in saved if 2 <= step <= steps - 2), 0)
    restarts = 2 if 2 * after in saved and 2 * after <= steps - 2 else 1
    if saved and not after:
        # It saves at its end, which an argument may set.
        own = [re.sub(rf"^(-[\w-]+=)?{steps}$", rf"\g<1>{STEPS}", word) for word in own]
        after, restarts, given = steps // 3, 2, {"steps": steps}
        if after < 2 or own == [*target.args]:
            return Restart("", f"{_UNTESTED} saves at its end alone, and no argument is its number of steps, {steps}")
    if not after:
        return Restart()
    given = {"after": after, "restarts": restarts, **given, "fresh": sorted(pair.written)}
    if pair.settings["record"].get("deterministic"):
        given["record"] = {"deterministic": True}
    where = f"restarted after {'steps' if restarts > 1 else 'step'} {after}{f' and {2 * after}' * (restarts > 1)}"
    tried = list(_resuming(target.script, own, pair.written))[:_MOST_TRIED]
    for args in tried:
        note = f"{where}, the script computed the same as straight on"
        try:
            runner.compare_restart(target.script, own, args, **given)
        except ComparisonFailed as error:
            if BEGAN_ANEW in str(error) and NUM_STEPS in str(error):
                continue
            first = str(error).partition("\n")[0]
            note = f"the test fails: {where}, the script computed something else: {first}"
        except AortaError:  # an argument that the script lacks, or whose value is no path
            continue
        words = map(repr, [target.script, own, args])
        return Restart(", ".join([*words, *(f"{key}={value!r}" for key, value in given.items())]), note)
    shown = " or ".join(" ".join(args[len(own) :]) or "its own arguments" for args in tried)
    saves = "at its end" if STEPS in str(own) else f"after step {after}"
    return Restart("", f"{_UNTESTED} saves {saves}, but does not load that with {shown}")


def _resuming(script: str, own: list[str], written: Sequence[str]) -> Iterator[list[str]]:
    """Yield arguments by which the script may go on from what it has written: its own, then with each option."""
    module = script.replace(".", "/")
    paths = map(Path, (script, *(f"{root}{module}{end}" for root in ("", "src/") for end in (".py", "/__main__.py"))))
    text = "".join(path.read_text("utf-8", "replace") for path in paths if path.is_file())
    options = [option for option in dict.fromkeys(_OPTION.findall(text)) if option not in own]
    yield from ([*own, option, name] for option in options for name in written)
    yield from ([*own, option] for option in options)
    yield own
