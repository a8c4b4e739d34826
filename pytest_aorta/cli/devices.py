"""``aorta devices``: the devices of this host, their leases, and the devices that are marked bad."""

from __future__ import annotations

import argparse

from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.text import counted, emit, output_width, table
from pytest_aorta.launch.leases import bad_marks, clear_bad, holders
from pytest_aorta.plan.accelerators import visible_devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of the subcommand."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    shown = ways.add_parser("list", help="list visible GPUs, leases, and bad marks")
    shown.set_defaults(run=_list_devices)
    cleared = ways.add_parser("clear-bad", help="remove the bad mark of a device")
    cleared.add_argument("token", metavar="TOKEN", help="number or name of the device in `aorta devices list`")
    cleared.set_defaults(run=_clear)


def _list_devices(_arguments: argparse.Namespace) -> int:
    """Print one line per device or other leased resource."""
    devices = {device.uuid: device for device in visible_devices()}
    held = {resource: claim for claim in holders() for resource in claim.resources}
    bad = bad_marks()
    rows = [("token", "name", "model", "state")]
    for name in dict.fromkeys([*devices, *held, *bad]):
        device, claim = devices.get(name), held.get(name)
        states = [f"held by {claim.owner} ({claim.process})"] if claim else []
        states += [f"bad: {bad[name]}"] if name in bad else []
        rows.append(
            (device.token if device else "-", name, device.model if device else "-", "; ".join(states) or "free")
        )
    emit(table(rows, output_width()) if rows[1:] else [])
    emit([f"{counted(len(devices), 'GPU')} visible, {counted(len(held), 'resource')} leased, {len(bad)} marked bad"])
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    """Remove the bad mark of a device.

    Raises:
        UsageError: No device of that name is marked bad.
    """
    marks = bad_marks()
    token = arguments.token
    if token not in marks:
        # The driver is asked only to translate a number into a name.
        names = {device.token: device.uuid for device in visible_devices()}
        token = names.get(token, token)
    if token not in marks:
        there = ", ".join(sorted(marks)) or "none"
        raise UsageError(f"devices clear-bad: {arguments.token!r} is not marked bad; marked are: {there}")
    clear_bad(token)
    emit([f"{token} can be leased again; the mark was: {marks[token]}"])
    return 0
