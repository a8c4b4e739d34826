"""Differences between two launches: environment, versions, settings, config and number of steps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.facts import CHOICES, PROGRAM_ENVIRONMENT, Launches, LaunchFacts
from pytest_aorta.result.system import OWN_VERSION, PACKAGES
from pytest_aorta.verdict.baseline import Baseline

_VERSIONS = ("torch", "cuda", "hip", "cudnn", "triton")
# The config key of test hooks. A launch with a planted fault is compared with the baseline of the undisturbed workload.
TEST_HOOK_KEY = "fault"
# Facts that can be None because of the host rather than the code under test.
_FROM_HOST = ("cpu_kernels", "cublas")
# Facts that the code under test sets. If one of them is False, a launch is not bitwise reproducible.
_REPRODUCIBILITY = ("deterministic_algorithms", "bitwise_reproducible")


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that identifies its baseline: all keys except the test hook."""
    return {key: value for key, value in config.items() if key != TEST_HOOK_KEY}


def other_versions(facts: LaunchFacts, recorded: LaunchFacts, side: str) -> str | None:
    """Return the first library of another version that chooses operators and kernels, or None."""
    for name in _VERSIONS:
        here, there = facts.environment.get(name), recorded.environment.get(name)
        if here != there:
            return f"{name} is {here}, the {side}'s {there}"
    return None


class _Changes(NamedTuple):
    """The differences of two launches' numeric environments as text, with both values; empty if there are none.

    Attributes:
        machine: What belongs to the machine, or is installed there. Numbers are then not compared bit for bit.
        settings: What the code under test sets.
    """

    machine: str
    settings: str


def changes(facts: LaunchFacts, recorded: LaunchFacts) -> _Changes:
    """Return what differs, without choices of setup()."""
    here, there = facts.environment, recorded.environment
    left_out = _left_out(facts, recorded)
    if None in (here.get("cublas"), there.get("cublas")):  # baselines of earlier versions lack this fact
        left_out.add("cublas")
    keys = sorted((here.keys() | there.keys()) - left_out, key=lambda key: (key != "torch", key))
    different = [key for key in keys if here.get(key) != there.get(key)]

    def text(words: str, *, of_machine: bool) -> str:
        chosen = [key for key in different if _is_of_machine(key, here, there) is of_machine]
        shown = [f"{key} {there.get(key)!r} -> {here.get(key)!r}" for key in chosen]
        return f"{words}: {', '.join(shown)}" if shown else ""

    return _Changes(text("other environment", of_machine=True), text("changed settings", of_machine=False))


def machine_changes(facts: LaunchFacts, recorded: LaunchFacts, *, is_exact: bool) -> list[str]:
    """Return what of the machine, or of what is installed there, is known on both sides and differs, as text.

    Of what can move times alone, packages can move an exact metric too.
    """
    here, there = (side.environment | side.description.system for side in (facts, recorded))
    left_out = {*_left_out(facts, recorded), OWN_VERSION}
    left_out |= facts.description.system.keys() - {PACKAGES} if is_exact else set()
    known = sorted((here.keys() & there.keys()) - left_out, key=lambda key: (key != "torch", key))
    differ = (key for key in known if here[key] != there[key] and _is_of_machine(key, here, there))
    return [f"{key} {there[key]} -> {here[key]}" for key in differ]


def _left_out(facts: LaunchFacts, recorded: LaunchFacts) -> set[str]:
    """Return the facts that are not compared: choices of setup(), and what only one of two launches may report.

    Launches of one session block ran on the same CPUs, whose vendor then does not matter.
    """
    return {*CHOICES} | ({"cpu_vendor"} if facts.provenance.block == recorded.provenance.block else set())


def other_setting(recorded: LaunchFacts, launches: Launches) -> str:
    """Return the first difference in launcher or environment; both change times and numbers without a code change."""
    for launch in launches:
        if launch.launcher != recorded.launcher:
            return f"launcher is {launch.launcher!r}, the baseline's {recorded.launcher!r}"
        if difference := next(filter(None, changes(launch, recorded)), ""):
            return difference
    return ""


def _is_of_machine(key: str, here: Mapping[str, object], there: Mapping[str, object]) -> bool:
    """Return whether a fact that differs belongs to the machine or the installation, not to the code under test."""
    match key:
        case "cpu_vendor":  # reported unless the code declares that it computes the same bits on every CPU
            return None not in (here.get(key), there.get(key))
        case "cpu_capability" | "cpu_kernels":
            # The launcher pins the kernels of a CPU with AVX2, so that all of these CPUs report the capability of the
            # pins. Others tell of another CPU as far as the code did not change the pins.
            has_avx2 = [str(side.get("cpu_capability")).startswith("AVX") for side in (here, there)]
            is_pinned = [side.get("cpu_kernels") is not None for side in (here, there)]
            differs = here.get("cpu_capability") != there.get("cpu_capability")
            return differs and is_pinned == has_avx2 and not all(is_pinned)
    return key not in PROGRAM_ENVIRONMENT


def lost_reproducibility(launches: Launches, recorded: LaunchFacts, side: str) -> str | None:
    """Return the fact that makes a launch not bitwise reproducible although ``recorded`` is, or None.

    Without this check, code whose numbers changed could avoid the comparison. The text calls ``recorded`` by the word
    ``side``.
    """
    if not is_reproducible(recorded):
        return None
    for facts in launches:
        left_out = {*_FROM_HOST, *_left_out(facts, recorded)}
        for key, there in sorted(recorded.environment.items()):
            if there is not None and facts.environment.get(key) is None and key not in left_out:
                return f"the launch does not report {key}, which is {there!r} in the {side}"
        for key in _REPRODUCIBILITY:
            if recorded.environment.get(key, True) and not facts.environment.get(key, True):
                return f"{key} is False, but True in the {side}"
    return None


def is_reproducible(facts: LaunchFacts) -> bool:
    """Return whether a second launch is known to compute the same bits, or nothing else is known."""
    return bool(facts.environment.get("bitwise_reproducible", True))


def changed_settings(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Return the settings of two configs that differ, as text for each config; empty texts if the configs are equal."""
    nothing = object()  # unequal to every value
    keys = sorted(one.keys() | other.keys())
    changed = [key for key in keys if not _is_same(one.get(key, nothing), other.get(key, nothing))]
    there, here = (
        ", ".join(f"{key}={brief(repr(side[key]))}" if key in side else f"no key {key}" for key in changed)
        for side in (one, other)
    )
    return there, here


def _is_same(one: object, other: object) -> bool:
    """Return whether two values of a config are equal. In Python ``True == 1``, but a config can allow both."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def other_steps(launches: Launches, recorded: LaunchFacts, *, is_ab: bool = False) -> str:
    """Return text if a launch has another number of measured steps than that of the other side; else empty.

    A script can change its number of steps without a change of the config, and statistics over fewer steps hide slow
    steps.
    """
    there, here = ("the reference ran", "launch") if is_ab else ("the baseline was recorded with", "test has")
    for facts in launches:
        if facts.num_steps != recorded.num_steps:
            return f"{there} {counted(recorded.num_steps, 'measured step')}, the {here} {facts.num_steps}"
    return ""


def changed_choice(facts: LaunchFacts, recorded: LaunchFacts) -> str | None:
    """Return the key of the first choice of setup() that differs between two launches, or None."""
    return next((key for key in CHOICES if facts.environment.get(key) != recorded.environment.get(key)), None)


def other_setup(baseline: Baseline, workload: str, config: dict[str, Any], launches: Launches) -> str | None:
    """Return why a baseline is not one of these launches, or None if it is.

    The reason is another workload or script, config or choice of setup().
    """
    before = "the baseline was recorded with"
    if baseline.workload != workload:
        return f"{before} the workload {baseline.workload!r}, the test has {workload!r}"
    there, here = changed_settings(baseline.config, config)
    if there:
        return f"{before} {there}, the test has {here}"
    recorded = baseline.center_launches[-1]
    for facts in launches:
        if key := changed_choice(facts, recorded):
            chosen, other = (side.environment.get(key) for side in (recorded, facts))
            return f"{before} {key}={chosen!r}, which setup chose, and a launch with {other!r}"
    return None


def other_device(launches: Launches, other: LaunchFacts, side: str) -> str | None:
    """Return text if a launch computed on another kind of device than the other side on the same platform, or None.

    The code has left the devices of its world, e.g. because torch finds no GPU and a script then takes the CPU.
    """
    there = other.environment.get("device")
    for here in (launch.environment.get("device") for launch in launches):
        if None not in (here, there) and here != there:
            return f"the ranks computed on {here}, those of the {side} on {there}"
    return None
