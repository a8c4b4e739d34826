"""The target of a command line: a workload with its config, a training script, or a command that starts its ranks."""

import argparse
import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import DevicesUnavailable, ResultError, SpecError, UsageError
from pytest_aorta.common.files import UnreadableFile, raised_as, write_text
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.strict_yaml import parse_yaml, read_yaml
from pytest_aorta.common.text import brief, emit
from pytest_aorta.launch.guarded import require_torch
from pytest_aorta.launch.watch import SpokenState
from pytest_aorta.plan.options import OPTIONS, Options, file_ending_in, integer_from, make_options
from pytest_aorta.plan.workloads import WorkloadSpec, find_workload, resolve_config
from pytest_aorta.plan.world import MAX_WORLD_SIZE, WorldSpec, resolve_world
from pytest_aorta.report.timeline import Drawing, svg
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.launcher import Launcher
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.session import Session, TestSpec
from pytest_aorta.session.world import DistributedWorld


@dataclass(frozen=True)
class WorkloadTarget:
    """A workload with checked config keys."""

    spec: WorkloadSpec
    config: Mapping[str, Any]

    @property
    def slug(self) -> str:
        """The name, as part of a path: stores of artifacts refuse a colon there."""
        return self.spec.name.replace(":", "-")

    def launch(self, world: DistributedWorld) -> WorkloadResult:
        """Launch the workload once."""
        return world.run(self.spec.name, **self.config)


@dataclass(frozen=True)
class ScriptTarget:
    """A script or dotted module with its arguments; without a script, a command that starts its own ranks."""

    script: str | None
    args: Sequence[str]

    @property
    def slug(self) -> str:
        """The path or module, or the first of a command's words that names a script, as part of a path."""
        words = [self.script] if self.script else self.args
        named = next((word for word in words if word.endswith(".py")), words[0])
        return re.sub(r"\W+", "_", named.removesuffix(".py")).strip("_")

    def launch(self, world: DistributedWorld, **settings: Any) -> WorkloadResult:
        """Launch the script or the command once, with settings of the world's methods."""
        if self.script is None:
            return world.run_command([*self.args], **settings)
        return world.run_script(self.script, [*self.args], **settings)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare the options that give the config of a workload, and the folder of results."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML mapping of config keys")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="assignments",
        help="value of a config key, or with dots of a key inside an object; may be repeated; wins over --config",
    )
    add_results(parser)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Declare the option for the folder of results."""
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=Path("results"), help="folder of results (default: %(default)s)"
    )


def add_ranks(parser: argparse.ArgumentParser, least: int = 1, default: str = "the GPUs of this run, or 2") -> None:
    """Declare the option for the number of ranks."""
    ranks, text = integer_from(least, MAX_WORLD_SIZE), f"ranks (default: {default})"
    parser.add_argument("--nproc", metavar="N", type=ranks, help=text)


def add_drawing(parser: argparse.ArgumentParser) -> None:
    """Declare the option that draws the step's schedule."""
    parser.add_argument(
        "--draw",
        metavar="FILE.svg",
        type=file_ending_in(".svg"),
        help="draw the step on the nominal machine: streams, exposed collectives, and what these wait for",
    )


def write_drawing(file: Path, panels: Sequence[tuple[str, Drawing]], problem: str = "") -> None:
    """Write what ``--draw`` asks for.

    Raises:
        ResultError: There is nothing to draw, or the file can't be written.
    """
    if not panels:
        raise ResultError(f"--draw: no graph of streams with a collective was recorded{problem and f': {problem}'}")
    with raised_as(ResultError, f"--draw: {file}: not written: "):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, svg(panels))
    emit([f"drawn: {file}"])


def add_shared(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Declare the options of pytest that have these names."""
    for option in OPTIONS:
        if option.name in names:
            flags = [f"--{option.name.replace('_', '-')}"] + ([] if option.ini_only else [option.flag])
            parser.add_argument(*flags, default=option.default, **option.argparse_keywords())


def given_options(arguments: argparse.Namespace, **chosen: Any) -> Options:
    """Return the options that a command line gives, or that the command has ``chosen``.

    Raises:
        SpecError: As in :func:`~pytest_aorta.plan.options.make_options`.
    """
    values = {option.name: getattr(arguments, option.key, option.default) for option in OPTIONS} | chosen
    return make_options(values, Path.cwd(), command=arguments.command_line)


@contextmanager
def opened(options: Options) -> Iterator[Session]:
    """Yield the session of a command; it says what it waits for, and a signal ends it."""
    with closing(Session(options, line=SpokenState())) as session, terminable():
        yield session


@contextmanager
def launching(session: Session, spec: WorldSpec, folder: Path, *, timed: bool) -> Iterator[Launcher]:
    """Yield the launcher of a command, whose launches have folders in ``folder``; leases have the command's name.

    Raises:
        UsageError: There are fewer devices than the command line asks for.
        SpecError: torch is not installed.
    """
    with raised_as(UsageError, "--nproc, --gpus: ", DevicesUnavailable):
        world = resolve_world(spec, session.options, [] if spec.simulated else session.devices)
    require_torch()
    test = RunningTest(" ".join(session.options.command[:2]))
    # A script may change the working folder.
    with session.launcher(world, TestSpec(spec), test, folder.absolute(), timed=timed) as launcher:
        yield launcher


def given_target(
    options: Options, arguments: argparse.Namespace, workload: str | None, script: str | None
) -> WorkloadTarget | ScriptTarget:
    """Return a workload with the keys of a config file and of assignments, or else a script with its arguments.

    Raises:
        UsageError: A script has a config, a workload has arguments, the file is not a mapping, or an assignment is not
            KEY=VALUE.
        SpecError: The workload or a key is unknown, or a value is not allowed.
    """
    args, config, assignments = arguments.args, arguments.config, arguments.assignments
    if workload is None:
        if config or assignments:
            raise UsageError("--config, --set: a script has no config keys; give arguments of the script after --")
        return ScriptTarget(script, args)
    if args:
        raise UsageError(f"{[*args]}: a workload takes no arguments; --set KEY=VALUE sets config keys")
    spec = find_workload(workload, options.workloads)
    given = _read_file(config) if config else {}
    for assignment in assignments:
        _assign(spec, given, assignment)
    resolve_config(spec, given)
    return WorkloadTarget(spec, given)


def _read_file(file: Path) -> dict[str, Any]:
    with raised_as(UsageError, "--config: "):
        document = read_yaml(file)
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError(f"--config: {file}: got {type(document).__name__}, allowed is a mapping of config keys")
    return document


def _assign(spec: WorkloadSpec, given: dict[str, Any], assignment: str) -> None:
    """Add the value of KEY=VALUE; a dotted key changes a part of what is given, or of the default."""
    key, equals, text = assignment.partition("=")
    path = key.split(".")
    if not equals or not all(path):
        raise UsageError(f"--set: got {assignment!r}, allowed is KEY=VALUE, with dots into objects (fault.kind=zero)")
    parent, schema = given, _schema({"properties": spec.properties}, path[0])
    for part, below in pairwise(path):
        parent = parent.setdefault(part, copy.deepcopy(schema.get("default", {})))
        if not isinstance(parent, dict):
            raise SpecError(f"--set: {key}: {part} is {parent!r}, and only objects have keys")
        schema = _schema(schema, below)
    if schema.get("type") == "string":
        parent[path[-1]] = text
        return
    try:
        parent[path[-1]] = parse_yaml(text, brief(repr(text)))
    except UnreadableFile as error:
        raise UsageError(f"--set: {key}: {' '.join(str(error).split())}") from None


def _schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of a key of an object; empty without a declaration."""
    below = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
    return below if isinstance(below, Mapping) else {}
