"""The frozen :class:`Options` of a run, made from converted values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.options.table import flag_of
from pytest_aorta.plan.options.values import FailOn, LauncherKind
from pytest_aorta.plan.profiler import TORCH, ProfilerSchedule


@dataclass(frozen=True)
class Options:
    """The settings of one run.

    Attributes:
        gpus: Number of GPUs this run may use; 0 means CPU ranks only, None all visible GPUs.
        device: ``auto``, ``cuda`` or ``cpu``.
        require_gpus: A test that lacks GPUs fails instead of being skipped.
        update_baselines: Write this run's values as new baselines.
        reset_baselines: ``update_baselines`` replaces the baseline center instead of adding launches to the baseline.
        force_baseline: Reason for recording a baseline although its launches are noisy; None: noisy launches are
            refused.
        baselines_dir: Folder of the stored baselines.
        results_dir: Folder of kept results; None means pytest's temporary folder.
        timeout_s: Default time limit of a launch, in seconds.
        fail_on: Verdicts that fail the test besides regressions and lost metrics.
        share_host: Timed tests run beside other tests of this host.
        lease_timeout_s: Seconds that a test waits for devices which other tests hold.
        workload_dirs: Folders of the user's own workloads.
        launcher: How ranks start in tests whose ``world`` marker does not choose a launcher.
        launches: Number of launches per test that ``update_baselines`` records.
        max_launches: Launches of the candidate per test, pairs in an A/B, after which an open verdict is inconclusive.
        locate: After a numeric difference, both sides are launched again to find the parameter and the module.
        profiler: Profiler that ranks run under, ``torch``, ``nsys`` or ``rocprofv3``; None: no profiler.
        profiler_schedule: Steps that torch's profiler records into kept traces; None: ``profile_steps``, once.
        progress: ``auto``, ``on`` or ``off``: whether the terminal shows the progress of a launch.
        nnodes: Number of nodes of this run; pytest runs on node 0.
        node_launcher: Words of the command that starts one node agent per node; empty: the run has one node.
        ab: A/B reference, a git ref or ``python:`` and the path of an interpreter; None: no A/B reference.
        report: HTML file of the report; None: no report.
        markdown: File of the findings as Markdown; None: no file.
        history: Folder that each run adds its comparisons to; None: no history.
        rootdir: pytest's root folder, from which relative folders start.
        command: Words of the command line of the run, which results and baselines store; empty if unknown.
        unfinished: Folder for interrupted recordings, which pytest keeps between runs; None: they are not kept.
        repeated: Words that repeat the options of the run in the command that reproduces a failure.
    """

    gpus: int | None
    device: str
    require_gpus: bool
    update_baselines: bool
    reset_baselines: bool
    force_baseline: str | None
    baselines_dir: Path
    results_dir: Path | None
    timeout_s: float
    fail_on: frozenset[FailOn]
    share_host: bool
    lease_timeout_s: float
    workload_dirs: tuple[Path, ...]
    launcher: LauncherKind
    launches: int
    max_launches: int
    locate: bool
    profiler: str | None
    profiler_schedule: ProfilerSchedule | None
    progress: str
    ab: str | None
    nnodes: int
    node_launcher: tuple[str, ...]
    report: Path | None
    markdown: Path | None
    history: Path | None
    rootdir: Path
    command: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    unfinished: Path | None = None


def make_options(values: Mapping[str, Any], rootdir: Path) -> Options:
    """Return the options from converted values, one per row of the table; folders are relative to ``rootdir``.

    Raises:
        SpecError: Two options contradict each other, a file is in the place of a folder or the reverse, or the folder
            of the baselines to record can't be written.
    """
    for name in ("baselines", "results", "history", "report", "markdown"):
        if values[name] is not None:
            with suppress(OSError):  # a path that can't be read is reported where it is used
                _check_place(name, values[name], rootdir / values[name], is_file=name in ("report", "markdown"))
    if values["update_baselines"]:
        with suppress(OSError):
            _check_writable(values["baselines"], rootdir / values["baselines"])
    options = Options(
        gpus=values["gpus"],
        device=values["device"],
        require_gpus=values["require_gpus"],
        update_baselines=values["update_baselines"],
        reset_baselines=values["reset_baselines"],
        force_baseline=values["force_baseline"],
        baselines_dir=rootdir / values["baselines"],
        results_dir=None if values["results"] is None else rootdir / values["results"],
        timeout_s=values["timeout"],
        fail_on=values["fail_on"],
        share_host=values["share_host"],
        lease_timeout_s=values["lease_timeout"],
        workload_dirs=(rootdir / values["workloads"],),
        launcher=LauncherKind(values["launcher"]),
        launches=values["launches"],
        max_launches=values["max_launches"],
        locate=values["locate"],
        profiler=values["profiler"],
        profiler_schedule=values["profiler_schedule"],
        progress=values["progress"],
        ab=values["ab"],
        nnodes=values["nnodes"],
        node_launcher=values["node_launcher"] or (),
        report=None if values["report"] is None else rootdir / values["report"],
        markdown=None if values["markdown"] is None else rootdir / values["markdown"],
        history=None if values["history"] is None else rootdir / values["history"],
        rootdir=rootdir,
    )
    _refuse_contradictions(options)
    return options


def _check_place(name: str, given: str, path: Path, *, is_file: bool) -> None:
    if is_file and path.is_dir():
        raise SpecError(f"{flag_of(name)}={given}: {path} is a folder, allowed is a file")
    nearest = _nearest(path.parent if is_file else path)
    if not nearest.is_dir():
        raise SpecError(f"{flag_of(name)}={given}: {nearest} is a file, allowed is a folder")


def _check_writable(given: str, folder: Path) -> None:
    if not os.access(nearest := _nearest(folder), os.W_OK):
        raise SpecError(
            f"{flag_of('baselines')}={given}: {nearest} can't be written, and --update-baselines writes there; make it "
            f"writable, or name another folder"
        )


def _nearest(folder: Path) -> Path:
    """Return the folder, or the closest of its parents that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _refuse_contradictions(options: Options) -> None:
    wants_cpu = options.device == DeviceKind.CPU or options.gpus == 0
    if options.require_gpus and wants_cpu:
        asked = "--aorta-device=cpu" if options.device == DeviceKind.CPU else "--aorta-gpus=0"
        raise SpecError(f"--aorta-require-gpus and {asked} contradict each other; drop one of them")
    if options.device == DeviceKind.CUDA and options.gpus == 0:
        raise SpecError("--aorta-device=cuda and --aorta-gpus=0 contradict each other; drop one of them")
    if options.profiler_schedule is not None and options.profiler not in (None, TORCH):
        raise SpecError(
            f"aorta_profiler_schedule={options.profiler_schedule} is a schedule of torch's profiler, and "
            f"--aorta-profiler={options.profiler} records all steps; drop one of them"
        )
    if options.update_baselines and options.profiler is not None:
        raise SpecError(
            f"--update-baselines and --aorta-profiler={options.profiler} contradict each other: "
            f"a launch under a profiler can't be a baseline; drop one of them"
        )
    # Only --update-baselines writes baselines, so no other option implies it.
    how = {"--aorta-reset-baselines": options.reset_baselines,
           "--aorta-force-baseline": options.force_baseline is not None}  # fmt: skip
    for flag, is_given in how.items():
        if is_given and not options.update_baselines:
            raise SpecError(f"{flag} changes how baselines are recorded; give --update-baselines too")
    if options.nnodes > 1 and not options.node_launcher:
        raise SpecError(
            f"--aorta-nnodes={options.nnodes}: set the ini key aorta_node_launcher, a command that starts a node agent "
            f"on each node, such as 'srun --nodes={{nodes}} --ntasks={{nodes}}'"
        )
    if options.nnodes > 1 and options.results_dir is None:
        raise SpecError(
            f"--aorta-nnodes={options.nnodes}: give --aorta-results, a folder on a file system that all nodes share"
        )
