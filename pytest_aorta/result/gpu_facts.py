"""What a launch's devices did meanwhile: clocks, power, temperature, and why they ran slower than they can. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

# The card or the machine protects itself. NVML's names, then those of amdsmi's residencies.
PROTECTIVE = (
    "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown",
    "prochot", "socket_thermal", "vr_thermal", "hbm_thermal",
)  # fmt: skip
# At its full power a healthy card says so too, in every launch of dense matrix products.
POWER_CAPS = ("sw_power_cap", "package_power")
# Of the card's highest SM clock: no power limit of the maker's own holds a healthy card below it.
LOW_CLOCK_SHARE = 0.6
# Of the samples, that a reason has to be in.
MIN_SHARE = 0.05


@dataclass(frozen=True)
class Reading:
    """One device at one moment; None where it does not tell."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capability:
    """What a device can do: its highest SM clock, its power limit, and the limit it came with."""

    max_sm_clock_mhz: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None


@dataclass(frozen=True)
class Sample:
    """All devices of a launch at one moment; ``in_steps``: all ranks were in their measured steps."""

    readings: tuple[Reading, ...]
    in_steps: bool


@dataclass(frozen=True)
class DeviceFacts:
    """One device during one launch.

    Attributes:
        device: how the test's process names it, e.g. its number.
        num_samples: that the numbers below are of.
        in_steps: they are those of the measured steps; else, where none fell into them, of the whole launch.
        sm_clock_mhz, memory_clock_mhz, power_w, temperature_c: ``min``, ``median`` and ``max``; empty if not known.
        throttle_reasons: reason -> share of the samples that it was in.
        max_sm_clock_mhz, power_limit_w, default_power_limit_w: what the device can do.
        before, after: the first and the last reading of the launch.
    """

    device: str
    num_samples: int
    in_steps: bool
    sm_clock_mhz: dict[str, float]
    memory_clock_mhz: dict[str, float]
    power_w: dict[str, float]
    temperature_c: dict[str, float]
    throttle_reasons: dict[str, float]
    max_sm_clock_mhz: float | None
    power_limit_w: float | None
    default_power_limit_w: float | None
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass(frozen=True)
class PlatformFacts:
    """A launch's devices, one entry a rank of this host; ``problem`` says why nothing is known, or no more."""

    source: str
    problem: str | None = None
    devices: tuple[DeviceFacts, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlatformFacts:
        """Build from the part of a validated result."""
        return cls(data["source"], data["problem"], tuple(DeviceFacts(**entry) for entry in data["devices"]))


def summarise(
    names: Sequence[str], capabilities: Sequence[Capability], samples: Sequence[Sample]
) -> tuple[DeviceFacts, ...]:
    """The facts of each device, from samples in order of time; none without samples."""
    if not samples:
        return ()
    counted = [sample for sample in samples if sample.in_steps] or samples
    return tuple(
        DeviceFacts(
            device=name,
            num_samples=len(counted),
            in_steps=any(sample.in_steps for sample in samples),
            sm_clock_mhz=_span([sample.readings[place].sm_clock_mhz for sample in counted]),
            memory_clock_mhz=_span([sample.readings[place].memory_clock_mhz for sample in counted]),
            power_w=_span([sample.readings[place].power_w for sample in counted]),
            temperature_c=_span([sample.readings[place].temperature_c for sample in counted]),
            throttle_reasons=_shares([sample.readings[place].throttle_reasons for sample in counted]),
            max_sm_clock_mhz=capability.max_sm_clock_mhz,
            power_limit_w=capability.power_limit_w,
            default_power_limit_w=capability.default_power_limit_w,
            before=_plain(samples[0].readings[place]),
            after=_plain(samples[-1].readings[place]),
        )
        for place, (name, capability) in enumerate(zip(names, capabilities, strict=True))
    )


def throttled(facts: PlatformFacts | None) -> list[str]:
    """One line for each device that ran slower than it should have, with the reasons and its clock."""
    found = []
    for device in facts.devices if facts else ():
        reasons = [
            f"{name} in {share:.0%} of samples"
            for name, share in sorted(device.throttle_reasons.items())
            if share >= MIN_SHARE and (name in PROTECTIVE or (name in POWER_CAPS and _is_held_down(device)))
        ]
        if reasons:
            found.append(f"GPU {device.device} throttled ({', '.join(reasons)}{_clock(device)})")
    return found


def lowest_sm_clock_mhz(facts: PlatformFacts | None) -> float | None:
    """The median SM clock in the measured steps of the device where it was lowest; None where that is not known."""
    clocks = [device.sm_clock_mhz.get("median") for device in facts.devices if device.in_steps] if facts else []
    known = [clock for clock in clocks if clock is not None]
    return min(known) if known else None


def _is_held_down(device: DeviceFacts) -> bool:
    """Whether a power cap is more than the card's usual one: by a lower limit, or by what it leaves of the clock."""
    limit, default = device.power_limit_w, device.default_power_limit_w
    if limit is not None and default is not None and limit < default:
        return True
    clock, highest = device.sm_clock_mhz.get("median"), device.max_sm_clock_mhz
    # An idle device's clock is low for another reason.
    return bool(device.in_steps and clock and highest and clock < LOW_CLOCK_SHARE * highest)


def _clock(device: DeviceFacts) -> str:
    if not device.sm_clock_mhz or device.max_sm_clock_mhz is None:
        return ""
    return f", SM clock {device.sm_clock_mhz['median']:,.0f} of {device.max_sm_clock_mhz:,.0f} MHz"


def _span(values: Sequence[float | None]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    return {"min": min(known), "median": median(known), "max": max(known)} if known else {}


def _shares(reasons: Sequence[tuple[str, ...]]) -> dict[str, float]:
    counts = Counter(name for names in reasons for name in names)
    return {name: count / len(reasons) for name, count in sorted(counts.items())}


def _plain(reading: Reading) -> dict[str, Any]:
    # A list, as it is when it has been read from a file.
    return vars(reading) | {"throttle_reasons": list(reading.throttle_reasons)}
