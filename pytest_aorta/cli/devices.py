"""``aorta devices``: the devices of this host, and their leases."""

import argparse

from pytest_aorta.common.text import counted, emit, output_width, table
from pytest_aorta.launch.leases import holders
from pytest_aorta.plan.accelerators import visible_devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action of the subcommand."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    shown = ways.add_parser("list", help="list visible GPUs and leases")
    shown.set_defaults(run=_list_devices)


def _list_devices(_arguments: argparse.Namespace) -> int:
    """Print one line per device or other leased resource."""
    devices = {device.uuid: device for device in visible_devices()}
    held = {resource: claim for claim in holders() for resource in claim.resources}
    rows = [("token", "name", "model", "state")]
    for name in dict.fromkeys([*devices, *held]):
        device, claim = devices.get(name), held.get(name)
        state = f"held by {claim.owner} ({claim.process})" if claim else "free"
        rows.append((device.token if device else "-", name, device.model if device else "-", state))
    emit(table(rows, output_width()) if rows[1:] else [])
    emit([f"{counted(len(devices), 'GPU')} visible, {counted(len(held), 'resource')} leased"])
    return 0
