"""The ``workload`` fixture's object: launches workloads and compares them with a baseline or another variant."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import brief
from pytest_aorta.plan.launch_plan import Words
from pytest_aorta.plan.workloads import ENVIRONMENT_KEY, WorkloadSpec, case_suffix, find_workload, resolve_config
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.arranging import arranged_args, arranged_config, arrangements, judged, shown
from pytest_aorta.session.axes import GOOD, Point
from pytest_aorta.session.comparing import RunningComparison, compare_with_baseline
from pytest_aorta.session.launcher import Launcher
from pytest_aorta.session.record import Side
from pytest_aorta.session.recording import record
from pytest_aorta.session.restarts import restarted_script
from pytest_aorta.session.rounds import in_pairs, passed
from pytest_aorta.session.search import MAX_PAIRS, Bisection, Search
from pytest_aorta.session.world import DistributedWorld, check_result
from pytest_aorta.verdict.arrangements import Arrangement
from pytest_aorta.verdict.bitwise import RESTART_METRICS, STEP_METRICS, from_first_step, joined, split
from pytest_aorta.verdict.metrics import METRICS, check_compared
from pytest_aorta.verdict.restarts import STEPS
from pytest_aorta.verdict.verdicts import Verdicts

# Config keys of checkpoints, and of a learning rate that may depend on the length of the run.
_SAVE, _LOAD, _SCHEDULE = "save_checkpoint", "load_checkpoint", "lr_schedule"


class WorkloadRunner(DistributedWorld):
    """The object of the fixture ``workload``, which launches workloads in a test's world and compares their results."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._session = launcher.session
        self._test = launcher.test

    def _returned(self, result: WorkloadResult) -> WorkloadResult:
        return passed(result)

    def check(self, result: WorkloadResult, *, label: str | None = None) -> Verdicts:
        """Compare a result with the stored baseline of this test, and fail the test on a failing verdict.

        If one launch is not enough for a verdict, the workload is launched again, up to ``--aorta-max-launches`` times
        in total. With ``--aorta-ab``, these launches alternate with launches of the version that the option names. With
        ``--update-baselines``, the result and further launches become the baseline if the test passes. ``label``
        distinguishes the comparisons of one test; its default is the workload's name. Later comparisons with one label
        are numbered from 2.

        Raises:
            ComparisonFailed: A verdict fails the test.
            NothingCompared: All that fails the test is that metrics are missing.
            BaselineError: The baseline can't be read, or the launches can't be added to it.
            WorkloadFailed: The workload's own checks failed in the launch of ``result`` or in a further launch.
            SpecError: An argument is not allowed, a marker was added after the world was made, or as in
                :meth:`~pytest_aorta.DistributedWorld.again`.
            LaunchError, ResultError: As in :meth:`~pytest_aorta.DistributedWorld.again`.
        """
        check_result("check", result)
        label = passed(result).workload if label is None else label
        suffix = case_suffix(result.config.get(ENVIRONMENT_KEY, {}))
        case = self._case("check", label, suffix=suffix)
        running = RunningComparison(self.launcher, case, result)
        if self._session.bisection:
            return self._search(running, self._session.bisection)
        return record(running) if self._options.update_baselines else compare_with_baseline(running)

    def compare(
        self,
        candidate: WorkloadResult | Mapping[str, Any],
        reference: WorkloadResult | Mapping[str, Any] | str,
        *,
        steps: int | None = None,
        metrics: Iterable[str] | None = None,
        label: str = "A/B",
        locate: bool | None = None,
    ) -> Verdicts:
        """Compare two variants in this test's world, and fail the test if the candidate differs or is worse.

        Each variant is a result of this test, or a mapping with the key ``workload`` and config keys. A mapping is
        launched. A text as reference is a side, in the words of ``--aorta-ab``, at which the candidate is launched too.

        With ``steps``, the loss, gradient norm and weight hash of each of the first ``steps`` measured steps must be
        bitwise equal. Mappings that set no other values are launched with this number of steps, without warmup and with
        a hash after each step. The first difference is located. Both variants are launched once more to
        locate it, unless ``locate`` is False (default: ``--aorta-no-locate``). ``metrics`` limits the comparison to the
        named metrics.

        Without ``steps``, ``metrics`` names metrics of launches. The default is the metrics that a comparison with a
        baseline would use. Metrics with noise need more launches: both variants are launched alternately, up to
        ``--aorta-max-launches`` pairs.

        ``label`` names the comparison in reports and in the history. If a test compares several times with one label,
        later comparisons are numbered from 2.

        Raises:
            ComparisonFailed: The variants differ, the candidate is worse, or one variant lacks a metric.
            WorkloadFailed: The workload's own checks failed in a launch.
            SpecError: An argument or a config is not allowed, or a search for a commit runs the test.
            LaunchError, ResultError: As in :meth:`~pytest_aorta.DistributedWorld.run` and
                :meth:`~pytest_aorta.DistributedWorld.again`.
        """
        case, chosen = self._case("compare", label, steps), None if metrics is None else [*metrics]
        if steps is None and chosen is not None:
            check_compared(chosen, METRICS)
        by_step, by_launch = split(chosen) if steps is not None else ([], chosen)
        given = [candidate] if isinstance(reference, str) else [reference, candidate]
        variants = [passed(one) if isinstance(one, WorkloadResult) else self._declared(one) for one in given]
        *others, here = [one if isinstance(one, WorkloadResult) else self._run(*one, steps) for one in variants]
        there = self.again(here, reference=reference) if isinstance(reference, str) else others[0]
        running = RunningComparison(self.launcher, case, here, there)
        running.locates = running.locates if locate is None else locate
        if steps is not None:
            verdicts = running.judge_steps(steps, by_step)
            if not by_launch or running.failing(verdicts):
                return running.conclude(verdicts)
            running.steps, running.comparison = 0, running.comparison.replace(rows=verdicts.rows)
        running.version = self._other_version(here, there)
        pairs = running.paired(by_launch, self._options.max_launches)
        is_reversed = self.launcher.is_before(there, here)
        return running.conclude(
            running.settle(in_pairs(pairs, [here.facts], [there.facts], reference_first=is_reversed))
        )

    def compare_restart(
        self,
        target: Mapping[str, Any] | str | Path,
        args: Words = (),
        resume_args: Words = (),
        *,
        after: int,
        steps: int | None = None,
        restarts: int = 1,
        into: Mapping[str, Any] | None = None,
        ranks: tuple[int, int] | None = None,
        metrics: Iterable[str] | None = None,
        environment: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
        fresh: Words | None = (),
        label: str = "restart",
    ) -> Verdicts:
        """Train straight on, then again with new processes after checkpoints; fail the test if a bit differs.

        With ``restarts=2`` and ``after=5``, training is restarted after steps 5 and 10. The loss, gradient norm and
        weight hash of each step must be bitwise equal, aligned by the number of the training step; those of a script's
        settings, buffers, and state of optimizers and averaged models too. The failure names what differs first.

        A workload saves a checkpoint at the end of each launch. A script saves and loads by its own means: it is ended
        when the step that follows ``after`` has its gradients, and has to have saved before; with ``{steps}`` in its
        arguments, it ends by itself, after as many steps in total as this is replaced by. Each of both runs has a
        copy of pytest's root folder, in which a restart finds what the launches before it have written.

        Args:
            target: A mapping with the workload, at the key ``workload``, and config keys; or a script.
            args: Arguments of the script that trains all steps.
            resume_args: Arguments of the script that goes on after a restart.
            after: The step after which training is restarted; of a script, 2 or more.
            steps: Training steps of a workload in total, or of a script with ``{steps}`` in its arguments; other
                scripts make those that their arguments say.
            restarts: Number of restarts.
            into: Config keys that differ after the restart, such as another layout that has equal bits.
            ranks: Number of ranks before and after the restart, the first ones of the test's world; all by default.
            metrics: Which metrics of steps are compared; all that the target has by default.
            environment, record, fresh: Those of a script, as in :meth:`~pytest_aorta.DistributedWorld.run_script`.
            label: As in :meth:`compare`.

        Raises:
            ComparisonFailed: A value of a step differs.
            SpecError: An argument is not allowed, the workload has no checkpoints, or its learning rate depends on the
                number of steps.
            WorkloadFailed, LaunchError, ResultError: As in :meth:`compare`.
        """
        case, is_script = self._case("compare_restart", label, steps), not isinstance(target, Mapping)
        known, least = (RESTART_METRICS, 2) if is_script else (STEP_METRICS, 1)
        is_counted = not is_script or any(STEPS in word for word in (*args, *resume_args))
        if restarts < 1 or after < least or (steps is None) is is_counted or restarts * after >= (steps or math.inf):
            raise SpecError(
                f"compare_restart: after is {after!r}, restarts is {restarts!r}, steps is {steps!r}; allowed are "
                f"restarts every {least} or more steps, before the last step; a workload needs steps, as does a script "
                f"with {STEPS} in its arguments, and no other script"
            )
        if (args or resume_args or environment or record or fresh) if not is_script else into:
            raise SpecError(
                "compare_restart: args, resume_args, environment, record and fresh are for scripts, into for workloads"
            )
        chosen = None if metrics is None else [*metrics]
        if chosen is not None:
            check_compared(chosen, known)
        worlds = self._restarted(ranks)
        if isinstance(target, Mapping):
            assert steps is not None
            straight, parts = self._restarted_workload(worlds, target, into or {}, steps, after, restarts)
        else:
            settings = {"environment": environment, "record": record, "fresh": fresh}
            straight, parts = restarted_script(worlds, target, (args, resume_args), settings, after, restarts, steps)
        running = RunningComparison(self.launcher, case, reduce(joined, parts), straight)
        running.locates, running.stops = False, [after * number for number in range(1, restarts + 1)]
        by_step = chosen or [name for name in known if not is_script or known[name].bits(straight)]
        return running.conclude(running.judge_steps(None if is_script else steps, by_step))

    def _restarted_workload(
        self,
        worlds: Sequence[WorkloadRunner],
        config: Mapping[str, Any],
        into: Mapping[str, Any],
        steps: int,
        after: int,
        restarts: int,
    ) -> tuple[WorkloadResult, list[WorkloadResult]]:
        """Launch a workload straight on, and in parts of which each loads the checkpoint of the part before."""
        variants = [self._declared(config), self._declared({**config, **into})]
        for spec, own in variants:
            _check_restarts(spec, own)
        with tempfile.TemporaryDirectory(dir=self.launcher.shared_folder(), prefix="checkpoint-") as folder:
            straight, parts = worlds[0]._run(*variants[0], steps), []
            for number in range(restarts + 1):
                spec, own = variants[number > 0]
                save = {_SAVE: f"{folder}/{number}"} if number < restarts else {}
                load = {_LOAD: f"{folder}/{number - 1}"} if number else {}
                count = after if save else steps - restarts * after
                parts.append(worlds[number > 0]._run(spec, own | save | load, count))
        return straight, parts

    def compare_arrangements(
        self,
        target: str | Path | Mapping[str, Any],
        args: Words = (),
        *,
        batch_arg: str | None = None,
        accumulate_arg: str | None = None,
        others: Sequence[Any] = (),
        environment: Mapping[str, str] | None = None,
        fresh: Words | None = (),
        label: str = "arrangements",
    ) -> list[Verdicts]:
        """Train the first step on the same samples in other arrangements; fail the test if gradients differ.

        The target is launched on all ranks of the test's world, on one rank that accumulates as many micro-batches, and
        on one rank with a batch as many times as large. The last of these is what the others are compared with. It is
        proved that all train on the same samples, with the same weights. Gradients, after their reduction and before
        clipping, have to be equal but for rounding; else the failure has their factor. Then the norm of gradients, the
        loss that is reported, learning rates, buffers, the update of the weights, and the number of steps are compared.

        Args:
            target: A script as in :meth:`~pytest_aorta.DistributedWorld.run_script`, or as in :meth:`compare`.
            args: Arguments of the script, with the batch of a rank.
            batch_arg: The argument that sets the batch of a rank, such as ``--batch-size``; of a workload, the config
                key, by default ``batch_size``. Without it, and without ``accumulate_arg``, one rank trains on the
                batches of a ``torch.utils.data.DataLoader`` that are joined to one.
            accumulate_arg: The argument that sets how many batches a rank accumulates; of a workload, the config key,
                by default ``gradient_accumulation``.
            others: Further arrangements on all ranks with the same samples: lists of arguments that are added, or
                mappings of config keys, such as ``{"tensor_parallel_degree": 2, "batch_size": 8}``.
            environment, fresh: As in :meth:`~pytest_aorta.DistributedWorld.run_script`; by default, launches run in
                copies of pytest's root folder, so that none finds what another one has written.
            label: As in :meth:`compare`.

        Raises:
            ComparisonFailed: Samples, weights, gradients or what follows from them differ.
            NothingCompared: No sample or no gradient is known.
            SpecError: An argument is not allowed, or the world has one rank.
            WorkloadFailed, LaunchError, ResultError: As in :meth:`compare`.
        """
        self._case("compare_arrangements", label, 1)
        if isinstance(target, Mapping):
            batch_arg, accumulate_arg = batch_arg or "batch_size", accumulate_arg or "gradient_accumulation"
        every = arrangements(self.size, has_batch=bool(batch_arg), has_accumulation=bool(accumulate_arg))
        every[:0] = [Arrangement(self.size, other=shown(other)) for other in others]
        planned = list[tuple[Arrangement, Callable[[], WorkloadResult]]]()
        for one, other in zip(every, [*others, *[()] * (len(every) - len(others))], strict=True):
            world = WorkloadRunner(self.launcher.first(one.ranks))
            factors = {batch_arg or "": one.batch, accumulate_arg or "": one.accumulated}
            if isinstance(target, Mapping):
                spec, config = self._declared({**target, **dict(other)})
                launch = partial(world._run, spec, arranged_config(spec, config, factors), 1, first_step=1)
            else:
                words = self._script(target, arranged_args([*args, *other], factors))
                joined = one.batch if not (batch_arg or accumulate_arg) else 1
                record = {"deterministic": True, "warmup": 0}
                settings = {"record": record, "fresh": fresh, "first_step": joined}
                launch = partial(world._run_words, Path(words[0]).name, words, environment, settings)
            planned.append((one, launch))
        launched = [(one, launch()) for one, launch in planned]
        cases = [self._case("compare_arrangements", f"{label}, {one}", 1) for one in every[:-1]]
        return judged(self.launcher, cases, launched)

    def _case(self, method: str, label: str, steps: int | None = None, *, suffix: str = "") -> str:
        """Return the case of a comparison; a number distinguishes comparisons of the test with the same label.

        Raises:
            SpecError: An argument is not allowed, the test's markers have changed, or a search for a commit runs a test
                that compares variants.
        """
        self._test.check()
        if self._session.bisection and method != "check":
            raise SpecError(f"aorta bisect: the test uses workload.{method}; name a test that uses workload.check")
        if not label.strip() or not label.isprintable():
            raise SpecError(f"{method}: label is {brief(repr(label))}, allowed is a text of one line")
        if steps is not None and steps < 1:
            raise SpecError(f"{method}: steps is {steps!r}, allowed is an integer of 1 or more, or None")
        if steps is not None and self.launcher.world.simulated:
            self._test.lacks("compares values step by step, which a simulated world does not have")
        first, taken = (
            f"{self._test.record.nodeid}::{label}{suffix}",
            {one.case for one in self._test.record.comparisons},
        )
        numbered = (f"{first} {number}" for number in itertools.count(2))
        return next(case for case in itertools.chain([first], numbered) if case not in taken)

    def _restarted(self, ranks: object) -> list[WorkloadRunner]:
        """Return the worlds before and after a restart."""
        size = self.size
        if ranks is None:
            return [self, self]
        match ranks:
            case (int(), int()) if min(ranks) > 0 and max(ranks) <= size and self.launcher.world.nodes == 1:
                return [WorkloadRunner(self.launcher.first(count)) for count in ranks]
        raise SpecError(f"compare_restart: ranks is {ranks!r}, allowed are two numbers from 1 to {size}, on one node")

    def _declared(self, variant: object) -> tuple[WorkloadSpec, dict[str, Any]]:
        """Return the workload that the mapping of a variant names, and its config keys."""
        if not isinstance(variant, Mapping) or "workload" not in variant:
            raise SpecError(
                f"variant {variant!r}: allowed is a mapping with the name of a workload at the key 'workload' and with "
                f"config keys, or in compare a result of this test"
            )
        config = {key: value for key, value in variant.items() if key != "workload"}
        return find_workload(variant["workload"], self._options.workloads), config

    def _run(
        self, spec: WorkloadSpec, config: dict[str, Any], steps: int | None, *, first_step: int = 0
    ) -> WorkloadResult:
        """Launch a variant; a number of steps means that the first ones are measured and hashed."""
        usual = {} if steps is None else from_first_step(steps)
        usual = {key: value for key, value in usual.items() if key in spec.properties}
        return self._run_spec(spec, usual | config, first_step=first_step)

    def _search(self, running: RunningComparison, bisection: Bisection) -> Verdicts:
        """Search for what changed a metric of a comparison."""
        only, result = bisection.request.metric, running.results[Side.CANDIDATE]
        if only:
            check_compared([only], METRICS.keys() | running.marked)
        request, running.version = self.launcher.launch_of(result).request, bisection.axis.short(GOOD)

        def launched(point: Point) -> LaunchFacts:
            return passed(self.launcher.launch(request, bisection.axis.reference(point)).result).facts

        pairs = running.paired(only and [only], MAX_PAIRS)
        return Search(bisection, pairs, result.facts, launched, self._session.say).run()

    def _other_version(self, candidate: WorkloadResult, reference: WorkloadResult) -> str:
        """Return the version that ``reference`` ran, if only the version differs between both sides; else empty."""
        here, there = self.launcher.find(candidate), self.launcher.find(reference)
        if here is None or there is None or there.plan.reference is None:
            return ""
        is_same = (here.request, here.plan.reference) == (there.request, None)
        return there.plan.reference.name if is_same else ""


def _check_restarts(spec: WorkloadSpec, config: Mapping[str, Any]) -> None:
    """Check that a workload can go on from a checkpoint, and computes the same when it does."""
    if absent := sorted({_SAVE, _LOAD} - set(spec.properties)):
        raise SpecError(f"compare_restart: workload {spec.name!r} has no config key {absent[0]}, so it can't go on")
    schedule = resolve_config(spec, config).get(_SCHEDULE) or {}
    if schedule.get("kind", "constant") != "constant" and schedule.get("steps") is None:
        raise SpecError(
            f"compare_restart: {_SCHEDULE}.steps is null, so the learning rate depends on the number of steps of each "
            f"launch, and a restart changes it; allowed is the number of all training steps"
        )
