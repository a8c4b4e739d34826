"""``aorta run``: launches a workload or a script, and keeps and prints the result of each trial."""

import argparse
import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pytest_aorta.cli import ExitCode, add_folder
from pytest_aorta.cli.workloads import require_folder
from pytest_aorta.common.errors import DevicesUnavailable, ResultError, SpecError, UsageError
from pytest_aorta.common.files import UnreadableFile, raised_as, write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.strict_yaml import parse_yaml, read_yaml
from pytest_aorta.common.text import brief, counted, emit
from pytest_aorta.launch.guarded import require_torch
from pytest_aorta.plan.options import OPTIONS, Options, check_profiler, integer_from, make_options
from pytest_aorta.plan.workloads import WorkloadSpec, find_workload, resolve_config
from pytest_aorta.plan.world import ALL_DEVICES, MAX_WORLD_SIZE, World, WorldSpec, resolve_world
from pytest_aorta.result.facts import LaunchFacts, over_ranks
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.launcher import Session, TestSpec
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import METRICS, Direction, format_value
from pytest_aorta.verdict.rows import not_profiled

# The name of the lease's holder, which tests that wait for the lease report.
OWNER = "aorta run"
# Options of pytest that this command shares.
SHARED = ("gpus", "timeout", "workloads", "launcher", "profiler")
MAX_TRIALS = 100
MAX_STEPS = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand; options of pytest have the same names."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", metavar="NAME", help="workload to launch; `aorta workloads` lists them")
    what.add_argument("--script", metavar="FILE", help="training script (.py) or dotted module that records steps")
    parser.add_argument("args", nargs="*", metavar="ARG", help="arguments of the script, after --")
    parser.add_argument(
        "--trials", metavar="N", type=integer_from(1, MAX_TRIALS), default=1, help="separate launches (default: 1)"
    )
    parser.add_argument("--steps", metavar="N", type=integer_from(1, MAX_STEPS), help="measured steps (key `steps`)")
    parser.add_argument(
        "--nproc", metavar="N", type=integer_from(1, MAX_WORLD_SIZE),
        help="ranks (default: the GPUs of this run, or 2 CPU ranks)",
    )  # fmt: skip
    add_config(parser)
    add_shared(parser, SHARED)
    parser.set_defaults(run=run)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare the options that give the config of a workload, and the folder of results."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML mapping of config keys")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="assignments",
        help="value of a config key, or with dots of a key inside an object; may be repeated; wins over --config",
    )  # fmt: skip
    add_folder(parser, "results", "folder of results")


def add_shared(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Declare the options of pytest that have these names."""
    for option in OPTIONS:
        if option.name in names:
            flags = [f"--{option.name.replace('_', '-')}"] + ([] if option.ini_only else [option.flag])
            parser.add_argument(*flags, default=option.default, **option.argparse_keywords())


def run(arguments: argparse.Namespace) -> int:
    """Launch, keep and print each trial.

    Raises:
        UsageError: The command line is wrong; nothing was launched.
        SpecError: The workload or its config is wrong; nothing was launched.
        AortaError: A launch failed; earlier trials are kept.
    """
    trials = arguments.trials
    options = given_options(arguments)
    check_profiler(options.profiling.tool, "--profiler")
    launch = given_launch(arguments, options)
    spec = TestSpec(WorldSpec(ALL_DEVICES if arguments.nproc is None else arguments.nproc))
    test = RunningTest(OWNER)
    with closing(Session(options)) as session, terminable():
        world = _world(session, spec, launch)
        folder = arguments.results / launch.folder
        require_torch()
        # A script may change the working folder.
        with session.launcher(world, spec, test, folder.absolute() / "launches", timed=True) as launcher:
            distributed_world, results = DistributedWorld(launcher), []
            for _ in range(trials):
                results.append(launch.start(distributed_world))
                written = write_trial(folder, results[-1])
                emit([f"{written}:", *(f"  {line}" for line in summary_lines(results[-1]))])
                emit([f"  {note}" for note in test.record.launches[-1].traces])
                sys.stdout.flush()
    failed = sum(not result.passed for result in results)
    emit([f"{counted(trials, 'trial')}: " + (f"{failed} failed by their own checks" if failed else "ok")])
    return ExitCode.PROBLEM if failed else ExitCode.OK


@dataclass(frozen=True)
class _Launch:
    """A checked launch; ``folder`` is its folder in the folder of results, and a script has no ``config``."""

    folder: str
    name: str
    min_world_size: int = 1
    config: dict[str, Any] | None = None
    args: list[str] | tuple[str, ...] = ()

    def start(self, world: DistributedWorld) -> WorkloadResult:
        """Launch once."""
        if self.config is None:
            return world.run_script(self.name, self.args)
        return world.run(self.name, **self.config)


def given_launch(arguments: argparse.Namespace, options: Options) -> _Launch:
    """Return the workload or script that a command line names.

    Raises:
        UsageError, SpecError: The command line or the config is wrong.
    """
    if arguments.workload is None:
        unfit = {"--steps": arguments.steps, "--config": arguments.config, "--set": arguments.assignments}
        if given := [flag for flag, value in unfit.items() if value]:
            raise UsageError(f"{given[0]}: a script has no config keys; give arguments of the script after --")
        path = Path(arguments.script)
        folder = path.stem if path.suffix == ".py" else arguments.script
        if not folder or "/" in folder:
            raise UsageError(f"--script: got {arguments.script!r}, allowed is a file ending in .py or a dotted module")
        return _Launch(folder, arguments.script, args=arguments.args)
    if arguments.args:
        raise UsageError(f"{arguments.args}: a workload takes no arguments; --set KEY=VALUE sets config keys")
    spec = find_workload(arguments.workload, options.workload_dirs)
    config = _given_config(spec, arguments.config, arguments.steps, arguments.assignments)
    # Stores of artifacts refuse a colon in a path.
    return _Launch(spec.name.replace(":", "-"), spec.name, spec.min_world_size, config)


def _world(session: Session, spec: TestSpec, launch: _Launch) -> World:
    with raised_as(UsageError, "--nproc, --gpus: ", DevicesUnavailable):
        world = resolve_world(spec.world, session.options, session.devices)
    if world.size < launch.min_world_size:
        raise UsageError(
            f"workload {launch.name!r} needs at least {launch.min_world_size} ranks, and this run has {world.size}: "
            f"fewer ranks have nothing to shard or to communicate; ask for more with --nproc"
            + (", or for CPU ranks with --gpus=0" if world.devices else "")
        )
    return world


def given_options(arguments: argparse.Namespace, **chosen: Any) -> Options:
    """Return the options that a command line gives, or that the command has ``chosen``.

    Raises:
        UsageError: A folder of workloads does not exist.
    """
    values = {option.name: getattr(arguments, option.key, option.default) for option in OPTIONS} | chosen
    for folder in values["workloads"]:
        require_folder(folder)
    return make_options(values, Path.cwd(), command=arguments.command_line)


# Smaller differences between the medians of ranks are noise.
_LEAST_SPAN = 0.01
_SHOWN = ("step_time_p50", "step_time_p99")


def summary_lines(result: WorkloadResult) -> list[str]:
    """Return lines about step times, ranks, metrics, weight hash and loss, as far as the result has them."""
    facts = result.facts
    lines = [_step_times(result, facts), *_ranks(result), *_metrics(result), *_costs(facts)]
    if note := facts.description.late_steps or not_profiled(METRICS["exposed_comm_ms"], facts):
        lines.append(f"overlap: {note}")
    lines += filter(None, (facts.description.optimizers, *map(str, facts.description.replicas[:1])))
    if result.weight_hashes:
        step = max(result.weight_hashes, key=int)
        lines.append(f"weight hash after step {step}: {result.weight_hashes[step]}")
    if result.loss:
        lines.append(f"loss: {result.loss[0]:.6g} in the first step, {result.loss[-1]:.6g} in the last")
    for series in facts.series:
        if curve := [*series.loss[0].values()] if series.loss else []:
            lines.append(
                f"loss of {series.name} on rank 0: {curve[0]:.6g} in the first step, {curve[-1]:.6g} in the last"
            )
    return lines + _failure_lines(result)


def _step_times(result: WorkloadResult, facts: LaunchFacts) -> str:
    # A percentile that needs more steps is not printed; the file has all step times.
    named = [METRICS[name] for name in _SHOWN if facts.num_steps >= METRICS[name].min_steps]
    shown = [f"{row.name.removeprefix('step_time_')} {format_value(row.measure(facts), 'ms')}" for row in named]
    if len(named) < len(_SHOWN):
        shown.append(f"slowest {format_value(facts.step_time_ms['max'], 'ms')}")
    return f"step time: {', '.join(shown)} ({facts.num_steps} steps on {result.platform})"


def _ranks(result: WorkloadResult) -> list[str]:
    own = [median(times) for times in result.rank_step_times_ms]
    if len(own) == 1:
        return [f"only rank 0 of {result.world_size} has step times"] if result.world_size > 1 else []
    slowest, fastest = max(own), min(own)
    if slowest <= fastest * (1 + _LEAST_SPAN):
        return [f"ranks: all within {_LEAST_SPAN:.0%} of each other by their own median step"]
    return [
        f"ranks: {own.index(slowest)} is the slowest by its own median step, {slowest:.4g} ms; "
        f"{own.index(fastest)} the fastest, {fastest:.4g} ms"
    ]


def _metrics(result: WorkloadResult) -> list[str]:
    shown = []
    for name in sorted(result.rank_metrics):
        metric, value = METRICS.get(name), over_ranks(name, result.rank_metrics[name])
        is_count = metric.direction is Direction.EXACT if metric else value.is_integer()
        shown.append(f"{name}: {format_value(value, metric.unit if metric else '', exact=is_count)}")
    return shown


def _costs(facts: LaunchFacts) -> list[str]:
    costs = {name: value for name, row in METRICS.items() if row.cost is not None and (value := row.measure(facts))}
    shown = [f"{name} {format_value(value, METRICS[name].unit, exact=True)}" for name, value in costs.items()]
    return [f"costs of a step: {', '.join(shown)}"] if shown else []


def _failure_lines(result: WorkloadResult, limit: int = 3) -> list[str]:
    if result.passed:
        return []
    found = [str(detail) for detail in result.failure_details[:limit]]
    return [f"FAILED: {result.failure_count} of its own checks", *(f"  {line}" for line in found)]


# Values of a result over its ranks, which AORTA's files have.
_AORTA_NAMES = (
    "passed", "failure_count", "first_failure_iteration", "failure_details", "configured_iterations",
    "total_iterations", "executed_iterations", "main_work_started", "elapsed_sec", "step_times_ms", "metrics",
    "weight_hashes", "loss", "grad_norm", "environment",
)  # fmt: skip


def write_trial(folder: Path, result: WorkloadResult) -> Path:
    """Write a result, with the values that AORTA's files have, under the next free number and return its file.

    Raises:
        ResultError: The file can't be written.
    """
    number, path = 0, folder / "trial_0.json"
    with raised_as(ResultError, f"{path}: can't be written: "):
        folder.mkdir(parents=True, exist_ok=True)
        while path.exists():
            number += 1
            path = folder / f"trial_{number}.json"
        write_json(path, to_builtins(result) | {name: to_builtins(getattr(result, name)) for name in _AORTA_NAMES})
    return path


def _given_config(
    spec: WorkloadSpec, file: Path | None, steps: int | None, assignments: Sequence[str]
) -> dict[str, Any]:
    """Return the given values without defaults, after a check of the whole config.

    Raises:
        UsageError: The file is not a mapping, or an assignment is not KEY=VALUE.
        SpecError: A key is unknown, or a value is not allowed.
    """
    given = _read_file(file) if file else {}
    if steps is not None:
        given["steps"] = steps
    # A dotted key changes a part of the default.
    for assignment in assignments:
        key, value = _parse(assignment)
        path = key.split(".")
        _assign(spec, given, path, _typed(_schema(spec, path), value, assignment.partition("=")[2]))
    resolve_config(spec, given)
    return given


def _read_file(file: Path) -> dict[str, Any]:
    with raised_as(UsageError, "--config: "):
        document = read_yaml(file)
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError(f"--config: {file}: got {type(document).__name__}, allowed is a mapping of config keys")
    return document


def _parse(assignment: str) -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UsageError(f"--set: got {assignment!r}, allowed is KEY=VALUE, with dots into objects (fault.kind=zero)")
    try:
        return key, parse_yaml(text, brief(repr(text)))
    except UnreadableFile as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"--set: {key}: {problem}") from None


def _assign(spec: WorkloadSpec, given: dict[str, Any], path: list[str], value: Any) -> None:
    name, *inner = path
    if name in spec.properties:
        given.setdefault(name, copy.deepcopy(spec.properties[name]["default"]))
    elif inner:
        resolve_config(spec, {name: None})  # reports the unknown key
    parent: Any = given
    for number, part in enumerate(path[:-1], 1):
        parent = parent.setdefault(part, {})
        if not isinstance(parent, dict):
            where = ".".join(path[:number])
            raise SpecError(f"--set: {'.'.join(path)}: {where} is {parent!r}, and only objects have keys")
    parent[path[-1]] = value


def _schema(spec: WorkloadSpec, path: Sequence[str]) -> Mapping[str, Any]:
    """Return the schema of a key, or of a part of it; empty without a declaration."""
    schema: Any = spec.properties.get(path[0], {})
    for part in path[1:]:
        schema = schema.get("properties", {}).get(part) or schema.get("additionalProperties", {})
        if not isinstance(schema, Mapping):
            return {}
    return dict(schema)


def _typed(schema: Mapping[str, Any], value: Any, text: str) -> Any:
    """Correct a type that YAML 1.1 misreads: it reads the 0 of HSA_ENABLE_SDMA=0 as a number, and 1e-3 as text."""
    types = schema.get("type", ())
    types = {types} if isinstance(types, str) else set(types)
    if types == {"string"} and isinstance(value, bool | int | float):
        return text
    if isinstance(value, str) and "number" in types and "string" not in types:
        try:
            return float(value)
        except ValueError:
            return value
    return value
