"""The plan of one launch, the one record of what is launched."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from msgspec.structs import replace

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import raised_as, read_json
from pytest_aorta.common.model import Count, Model, convert
from pytest_aorta.plan.device_kind import Backend
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.reference import Reference
from pytest_aorta.plan.workloads import ENVIRONMENT_KEY, WorkloadSpec, resolve_config
from pytest_aorta.plan.world import World

# Words of a command line in a test; a text in their place would be split into characters.
Words: TypeAlias = tuple[str, ...] | list[str]
_MAX_BYTES = 1 << 24


class Limits(Model, frozen=True):
    """The limits of a launch besides its time limit.

    Attributes:
        error_grace_s: Seconds that the other ranks get to write their evidence once a rank has failed.
        straggler_s: Seconds that the other ranks get to end once a rank has its result; one may evaluate or save alone.
        output_cap_bytes: Largest total size of all logs.
    """

    error_grace_s: float = 3.0
    straggler_s: float = 60.0
    output_cap_bytes: int = 64 << 20


class StepRecording(Model, frozen=True, omit_defaults=True):
    """How the steps of a script that does not use the recorder are recorded, from one optimizer step to the next.

    Attributes:
        warmup: Number of steps after the first one that are not recorded.
        hash_weights: Whether the weights are hashed, because launches of the same code compute the same bits.
        deterministic: Whether each rank sets seeds and ``torch.use_deterministic_algorithms`` before the script runs.
        hash_every_step: Whether weights and the ranks' own gradients are hashed in every step, and no step is profiled;
            a launch that locates a difference sets it, and a restart.
        hash_state: Whether what else training goes on from is recorded in every step too; a restart sets it.
        stop_after: The step after which the script is ended, as the next one has its gradients; 0: none. A restart sets
            it.
    """

    warmup: Count = 3
    hash_weights: bool = False
    deterministic: bool = False
    hash_every_step: bool = False
    hash_state: bool = False
    stop_after: Count = 0


class ScriptSettings(Model, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of the launches of a script, besides its arguments.

    Attributes:
        record: How the steps of a script are recorded; None if the script uses the recorder, and for a workload.
        fresh: Paths from pytest's root folder, such as those of checkpoints, that a launch starts without. The launch
            runs in a copy of the root folder, so that no launch reads what another has written; None: no copy.
        first_step: 0, or that each rank keeps gradients, weights and samples of its first step, and of how many batches
            of a loader one is made; ``workload.compare_arrangements`` sets it.
    """

    record: StepRecording | None = None
    fresh: tuple[str, ...] | None = None
    first_step: Count = 0


def script_settings(where: str, given: Mapping[str, Any]) -> ScriptSettings:
    """Return the settings of a script, from the keywords of a test; ``where`` starts the message of an error.

    Raises:
        SpecError: A key is unknown, or its value is not allowed.
    """
    with raised_as(SpecError):
        settings = convert(dict(given), ScriptSettings, where)
    for path in map(PurePath, settings.fresh or ()):
        if path.is_absolute() or ".." in path.parts or path == PurePath():
            raise SpecError(f"{where}: fresh: got {str(path)!r}, allowed are paths below pytest's root folder")
    return settings


class FunctionCall(Model, frozen=True):
    """A function of a module that each rank calls.

    Attributes:
        module: Name under which pytest has imported the module.
        name: Qualified name of the function in the module.
        arguments: File of the arguments, in the format of ``result/values.py``.
        search_path: The path on which pytest looks for modules.
        init: Whether the rank joins the default process group before the call.
    """

    module: str
    name: str
    arguments: Path
    search_path: tuple[str, ...]
    init: bool = True


class LaunchRequest(ScriptSettings, frozen=True):
    """A request to run a workload with a config, or a script with arguments.

    Attributes:
        name: Name of the workload, or file name of the script.
        spec: Declaration of the workload; None for a script.
        config: Config of the workload, or the arguments and environment of the script. The key ``environment`` sets
            variables of the ranks and does not reach the workload.
        script: Path ending in ``.py`` or dotted module; the program of a command; None for a workload.
        args: Arguments of the script or of the program.
        starts_ranks: Whether the program starts its ranks by itself.
        function: The function of the script that ranks call; None if they run the whole script.
    """

    name: str
    spec: WorkloadSpec | None
    config: dict[str, Any]
    script: str | None
    args: tuple[str, ...]
    starts_ranks: bool = False
    function: FunctionCall | None = None


class LaunchPlan(LaunchRequest, frozen=True, kw_only=True):
    """The complete plan of one launch: a request, and everything that was decided about it.

    The plan is the content of ``plan.json``, which ranks read.

    Attributes:
        world: Ranks and their devices.
        timeout_s: Time limit in seconds.
        run_dir: Folder of the launch's files.
        cwd: Working folder of the ranks, or the folder that ``copy`` is a copy of.
        copy: Working folder of the ranks if this launch has a copy of its own.
        limits: Limits besides the time limit.
        launcher: Way to start ranks; a fork server that is unfit leaves it to torchrun.
        lease_fds: Descriptors of open files that hold the lease of the devices until the last rank is gone.
        reference: A/B reference to launch; None for the code under test.
        profiler: Profiler that ranks run under, torch; None: no profiler.
        node_launcher: Words of the command that starts one node agent per node; ``{nodes}`` is their number.
        node: Number of the node whose ranks are started, on a node agent; None: all nodes.
        command: Words of the command line of the run, for the result's provenance.
    """

    world: World
    timeout_s: float
    run_dir: Path
    cwd: Path
    copy: Path | None = None
    limits: Limits = Limits()
    launcher: LauncherKind = LauncherKind.TORCHRUN
    lease_fds: tuple[int, ...] = ()
    reference: Reference | None = None
    profiler: str | None = None
    node_launcher: tuple[str, ...] = ()
    node: int | None = None
    command: tuple[str, ...] = ()

    @property
    def collective_timeout_s(self) -> float:
        """The time limit of a collective, which ends before the launch does, so that its record can be written."""
        return 0.8 * self.timeout_s

    @property
    def folder(self) -> Path:
        """The working folder of the ranks."""
        return self.copy or self.cwd

    def ranks_of(self, node: int) -> Sequence[int]:
        """Return the ranks that are started on a node."""
        here = self.world.ranks_per_node
        return self.world.ranks[node * here : (node + 1) * here]

    @property
    def title(self) -> str:
        """The name, with that of the A/B reference if there is one."""
        return f"{self.name} at {self.reference.name}" if self.reference else self.name

    @property
    def compares_bits(self) -> bool:
        """Return whether bits of the launch may be compared, for which the kernels of CPU ranks are pinned.

        The pins make the steps of some scripts half as long again.
        """
        return self.record is None or self.record.hash_weights

    @property
    def times_collectives(self) -> bool:
        """Return whether NCCL times each collective, which names late ranks; a launch that locates names none."""
        is_locating = self.record is not None and self.record.hash_every_step
        return self.world.backend == Backend.NCCL and self.world.size > 1 and not is_locating

    @property
    def own_config(self) -> dict[str, Any]:
        """The config that the workload is given."""
        return {key: value for key, value in self.config.items() if key != ENVIRONMENT_KEY}

    def counterpart(self, path: Path) -> Path:
        """Return the place of ``path`` in the copy of the working folder; ``path`` itself if it is not in the copy."""
        if self.copy is None or not path.is_relative_to(self.cwd):
            return path
        copied = self.copy / path.relative_to(self.cwd)
        return copied if copied.exists() else path

    @property
    def preload(self) -> Sequence[str]:
        """The modules that a fork server imports before it forks the ranks."""
        # The module of the function imports pytest, and no code of the user is imported before the fork.
        return ("pytest",) if self.function else self.spec.preload if self.spec else ()

    @property
    def program(self) -> str | None:
        """The path of the script, in the copy of the working folder if it is there; None for a workload."""
        return None if self.script is None else str(self.counterpart(Path(self.script)))


def read_plan(path: Path) -> LaunchPlan:
    """Return the plan in ``plan.json``, which pytest has written into the run folder.

    Raises:
        UnreadableFile: The file can't be read, or another version of this package has written the plan.
    """
    return convert(read_json(path, max_bytes=_MAX_BYTES), LaunchPlan, str(path))


def at_reference(request: LaunchRequest, reference: Reference) -> LaunchRequest:
    """Return the request for the A/B reference's version of the workload or script.

    A config key that the reference does not have is left out if its value is the default, so that a change that adds a
    key can be compared with its parent.

    Raises:
        SpecError: The reference does not have the workload, the script or a config key.
    """
    if request.spec is None:
        return replace(request, script=reference.script(request.script or ""))
    spec, own = reference.workload(request.spec), request.spec.properties
    config = {
        key: value
        for key, value in request.config.items()
        if key in spec.properties or key not in own or value != own[key]["default"]
    }
    with raised_as(SpecError, f"at {reference.name}: ", SpecError):
        return replace(request, spec=spec, config=resolve_config(spec, config))
