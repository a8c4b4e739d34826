"""Readings of the devices' sensors during a launch, condensed device by device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from msgspec import field

from pytest_aorta.common.model import Fact, Model, Name, NotNegative, Text
from pytest_aorta.plan.accelerators import Reading

# Reasons that protect the device or the host, by NVML's names.
PROTECTIVE = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
)
# A healthy GPU reports it too in every launch that computes dense matrix products at full power.
POWER_CAP = "sw_power_cap"
# Fraction of the highest SM clock. The default power limit never holds a healthy GPU below this fraction.
LOW_CLOCK_FRACTION = 0.6
# Fraction of the samples that must report a reason before the launch counts as throttled.
MIN_FRACTION = 0.05


@dataclass(frozen=True)
class Sample:
    """The readings of all devices at one moment; ``in_steps`` shows if all ranks were in their measured steps."""

    readings: tuple[Reading, ...]
    in_steps: bool


class DeviceFacts(Model, frozen=True):
    """The facts of one device during one launch.

    Attributes:
        device: the device's name in pytest's process, e.g. its number.
        in_steps: whether the samples are those of the measured steps; if no sample fell into the steps, the samples
            are those of the whole launch.
        sm_clock_mhz: the median of the SM clock; None if unknown.
        throttle_reasons: reason -> fraction of the samples that report the reason.
        max_sm_clock_mhz: the highest SM clock of the device; None if unknown.
    """

    device: Text
    in_steps: bool
    sm_clock_mhz: NotNegative | None
    throttle_reasons: dict[Name, NotNegative]
    max_sm_clock_mhz: NotNegative | None


class PlatformFacts(Model, frozen=True):
    """The sensor readings of a launch's devices.

    Attributes:
        source: ``NVML`` or ``amdsmi``.
        problem: the reason why readings are missing or ended early; None if there is none.
        devices: clock and throttling of each device, one entry per rank of this host.
        about: what can move times of all devices, such as the driver and the power limit.
    """

    source: str
    problem: str | None = None
    devices: tuple[DeviceFacts, ...] = ()
    about: dict[Name, Fact] = field(default_factory=dict)

    @property
    def throttled(self) -> list[str]:
        """Return one line per throttled device, with the reasons and the device's clock."""
        found = []
        for device in self.devices:
            reasons = [
                f"{name} in {fraction:.0%} of samples"
                for name, fraction in sorted(device.throttle_reasons.items())
                if fraction >= MIN_FRACTION and (name in PROTECTIVE or (name == POWER_CAP and _is_held_down(device)))
            ]
            if reasons:
                found.append(f"GPU {device.device} throttled ({', '.join(reasons)}{_clock(device)})")
        return found

    @property
    def lowest_sm_clock_mhz(self) -> float | None:
        """Return the lowest of the devices' median SM clocks in the measured steps; None if no clock is known."""
        clocks = (device.sm_clock_mhz for device in self.devices if device.in_steps and device.sm_clock_mhz)
        return min(clocks, default=None)


def summarize(
    names: Sequence[str], max_sm_clocks_mhz: Sequence[float | None], samples: Sequence[Sample]
) -> tuple[DeviceFacts, ...]:
    """Return the facts of each device, from samples in order of time; empty without samples."""
    if not samples:
        return ()
    counted = [sample for sample in samples if sample.in_steps] or samples
    return tuple(
        DeviceFacts(
            device=name,
            in_steps=any(sample.in_steps for sample in samples),
            sm_clock_mhz=_median([sample.readings[number].sm_clock_mhz for sample in counted]),
            throttle_reasons=_fractions([sample.readings[number].throttle_reasons for sample in counted]),
            max_sm_clock_mhz=max_sm_clock_mhz,
        )
        for number, (name, max_sm_clock_mhz) in enumerate(zip(names, max_sm_clocks_mhz, strict=True))
    )


def _is_held_down(device: DeviceFacts) -> bool:
    """Return whether a power cap is unusual: the clock is very low in the measured steps."""
    clock, highest = device.sm_clock_mhz, device.max_sm_clock_mhz
    # Outside the steps the device may be idle, which lowers its clock too.
    return bool(device.in_steps and clock and highest and clock < LOW_CLOCK_FRACTION * highest)


def _clock(device: DeviceFacts) -> str:
    if not device.sm_clock_mhz or device.max_sm_clock_mhz is None:
        return ""
    return f", SM clock {device.sm_clock_mhz:,.0f} of {device.max_sm_clock_mhz:,.0f} MHz"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _fractions(reasons: Sequence[tuple[str, ...]]) -> dict[str, float]:
    counts = Counter(name for names in reasons for name in names)
    return {name: count / len(reasons) for name, count in sorted(counts.items())}
