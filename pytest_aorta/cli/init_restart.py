"""The test of a restart that ``aorta init`` writes for a script that saves and loads, and what launches have shown."""

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pytest_aorta.cli.init_launches import Pair
from pytest_aorta.cli.target import ScriptTarget
from pytest_aorta.common.errors import LaunchError, ResultError, SpecError
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.restarts import restarted_script
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.bitwise import RESTART_METRICS, first_difference, joined, num_steps
from pytest_aorta.verdict.restarts import STEPS, lost

# An option by which a script goes on from a checkpoint.
_OPTION = re.compile(r"""["'](--[\w-]*(?:resume|load|restore|checkpoint|ckpt)[\w-]*)["']""")
_MOST_TRIED = 6


class Restart(NamedTuple):
    """The arguments of ``compare_restart`` that fit a script, empty if none do, and what was measured."""

    call: str = ""
    note: str = ""


def restart_of(world: DistributedWorld, target: ScriptTarget, pair: Pair) -> Restart:
    """Restart a script after a step at which it has saved, by each argument that may load what it has written."""
    one = pair.one
    if target.script is None or not pair.repeats or not isinstance(one, WorkloadResult):
        return Restart()
    steps, own, is_counted = num_steps(one), [*target.args], False
    saved = sorted({step for rank in one.ranks for series in rank.series for step in series.saved})
    after = next((step for step in saved if 2 <= step <= steps - 2), 0)
    restarts = 2 if 2 * after in saved and 2 * after <= steps - 2 else 1
    if saved and not after:
        # It saves at its end, which an argument may set.
        own = [re.sub(rf"^(-[\w-]+=)?{steps}$", rf"\g<1>{STEPS}", word) for word in own]
        after, restarts, is_counted = steps // 3, 2, own != [*target.args]
        if after < 2 or not is_counted:
            said = f"the script saves at its end alone, and no argument is its number of steps, {steps}"
            return Restart("", f"a restart is not tested: {said}")
    if not after:
        return Restart()
    record = {key: value for key, value in pair.settings["record"].items() if key == "deterministic"}
    settings: dict[str, Any] = {"fresh": sorted(pair.written), **({"record": record} if record else {})}
    counted = {"steps": steps} if is_counted else {}
    tried = list(_resuming(target, own, pair.written))[:_MOST_TRIED]
    for args in tried:
        try:
            straight, parts = restarted_script(
                [world, world], target.script, (own, args), settings, after, restarts, **counted
            )
        except (LaunchError, ResultError, SpecError):  # an argument that the script lacks, or whose value is no path
            continue
        if _first_weights(parts[1]) != _first_weights(straight):
            words = [target.script, own, args]
            given = {"after": after, "restarts": restarts, **counted, **settings}
            call = f"{', '.join([*map(repr, words), *(f'{key}={value!r}' for key, value in given.items())])}"
            return Restart(call, _measured(straight, reduce(joined, parts), [after * (n + 1) for n in range(restarts)]))
    shown = " or ".join(" ".join(args[len(own) :]) or "its own arguments" for args in tried)
    said = f"the script saves after step {after}, but does not load that with {shown}"
    return Restart("", f"a restart is not tested: {said}")


def _resuming(target: ScriptTarget, own: list[str], written: Sequence[str]) -> Iterator[list[str]]:
    """Yield arguments by which the script may go on from what it has written: its own, then with each option."""
    path = Path(target.script or "")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    options = [option for option in dict.fromkeys(_OPTION.findall(text)) if option not in own]
    yield from ([*own, option, name] for option in options for name in written)
    yield from ([*own, option] for option in options)
    yield own


def _first_weights(result: WorkloadResult) -> list[str]:
    """Return the hashes of each optimizer's weights before the first step, on each rank."""
    return [one.weights.hashes.get("0", "") for rank in result.ranks for one in rank.series]


def _measured(straight: WorkloadResult, restarted: WorkloadResult, stops: list[int]) -> str:
    steps = [num_steps(restarted), num_steps(straight)]
    difference = first_difference(restarted, straight, min(steps), RESTART_METRICS)
    where = f"restarted after {'steps' if stops[1:] else 'step'} {' and '.join(map(str, stops))}, the script"
    if difference is None and steps[0] == steps[1]:
        return f"{where} computed the same as straight on"
    said = lost(restarted.facts, straight.facts, stops, difference, steps)
    return f"the test fails: {where} computed something else: {'; '.join(said)}"
