"""``aorta workloads``: the list of workloads, and the config keys of a workload."""

import argparse
import json

from pytest_aorta.cli import ExitCode
from pytest_aorta.cli.target import add_shared, given_options
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import counted, emit, output_width, table, wrapped
from pytest_aorta.plan.workloads import WorkloadSpec, find_workload, workload_places


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="workload whose config keys to print")
    add_shared(parser, ("workloads",))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print all workloads, or one of them.

    Raises:
        SpecError: The folder of ``--workloads`` or the named workload does not exist, or can't be read.
    """
    folders = given_options(arguments).workloads
    if arguments.name is not None:
        emit(_one(find_workload(arguments.name, folders)))
        return ExitCode.OK
    specs, problems = [], []
    for name, places in sorted(workload_places(folders).items()):
        if ":" not in name and all(place.qualified for place in places):
            continue  # it is listed under its qualified name
        try:
            specs.append(find_workload(name, folders))
        except SpecError as error:
            problems.append(str(error))
    emit(_all(specs, problems))
    return ExitCode.PROBLEM if problems else ExitCode.OK


def _all(specs: list[WorkloadSpec], problems: list[str]) -> list[str]:
    rows = [("name", "launch mode", "min ranks", "config keys", "description")]
    rows += [
        (spec.name, spec.launch_mode, str(spec.min_world_size), str(len(spec.properties)), spec.description)
        for spec in specs
    ]
    listed = table(rows, output_width()) if specs else []
    return [*listed, *(f"can't be read: {problem}" for problem in problems), counted(len(specs), "workload")]


def _one(spec: WorkloadSpec) -> list[str]:
    width = output_width()
    declared = "any key is passed to the class" if spec.is_of_aorta else f"declared in {spec.yaml}"
    lines = [
        f"{spec.name}: {spec.description}",
        f"started by {spec.launch_mode}, on {spec.min_world_size} ranks or more; {declared}",
        "",
    ]
    for key, schema in spec.properties.items():
        others = {name: value for name, value in schema.items() if name not in ("default", "description")}
        lines += wrapped(f"{key} = {json.dumps(schema['default'])}  {json.dumps(others)}", width)
        lines += wrapped(f"    {' '.join(schema['description'].split())}", width)
    for key, by_value in spec.presets.items():
        for value, values in by_value.items():
            lines += wrapped(f"{key} = {value} changes defaults: {json.dumps(values)}", width)
    return lines
