"""The recording of a test's launches as a new baseline: as many as it needs, whose weights are the same."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from pytest_aorta.common.errors import BaselineError, ComparisonFailed
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.series import digest, first_other_weights
from pytest_aorta.session.comparing import RunningComparison
from pytest_aorta.session.locating import every_step, hashes_weights
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import Repeated, comparison_text, passed
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.bitwise import first_difference, locate_first
from pytest_aorta.verdict.environment import TEST_HOOK_KEY, identity
from pytest_aorta.verdict.learning import BaselineRecording
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Reason, Verdicts


def record(running: RunningComparison) -> Verdicts:
    """Launch until the launches make a baseline, which is written if the test passes.

    Raises:
        BaselineError: The launches ran under a profiler or with a planted fault, compute different weights, can't be
            added to the stored baseline, or are too noisy for a metric that a marker names.
        ComparisonFailed: A metric is missing in a launch, or nothing would be compared.
    """
    options, result, test = running.options, running.results[Side.CANDIDATE], running.launcher.test.record.nodeid
    launches = tuple(StoredLaunch(launch.facts) for launch in running.comparison.launches)
    first = Baseline(running.comparison.case, test, result.platform, result.workload, identity(result.config), launches)
    if result.config.get(TEST_HOOK_KEY, {}) not in ({}, None):
        raise BaselineError(f"{first.case}: not recorded: the config plants a {TEST_HOOK_KEY}")
    if profiler := result.facts.profiler:
        raise BaselineError(f"{first.case}: not recorded: ranks ran under {profiler}, which slows them; record without")
    recording = BaselineRecording(running.stored, result.facts, options)
    new = running.settle(_launched(recording, first))
    # Comparing the baseline with itself shows metrics that are missing or differ between launches.
    itself = replace(running.stored, baseline=new, max_launches=len(new.launches), file="")
    verdicts = itself.judge(new.center_launches)
    again = Repeated(options.argument_of(test), options.repeated, is_recording=True)
    compared = running.comparison.replace(rows=verdicts.rows)
    missing = [row for row in verdicts.failing({Outcome.MISSING}) if row.not_applicable is not Reason.NOISY]
    if missing or (options.fail_on and compared.compared_nothing):  # as the comparison with this baseline would fail
        running.add()
        raise ComparisonFailed(comparison_text(compared, missing, again))
    if (hashed := _hashed_again(running, is_alone=len(new.launches) == 1)) is not None:
        new = recording.with_every_step(new, hashed)
    running.add(new=recording.learned(new, digest(running.old)))
    return verdicts


def _launched(recording: BaselineRecording, first: Baseline) -> Generator[Side, LaunchFacts, Baseline]:
    """Ask for as many launches as a baseline needs, and return them as a baseline of their own."""
    launches, baseline, forced = [*first.center_launches], first, recording.options.record.reason
    while recording.needs_another(baseline):
        launches.append((yield Side.CANDIDATE))
        baseline = first.replace(launches=tuple(map(StoredLaunch, launches)))
    noisy = recording.left_out(launches)
    if forced is None:
        return baseline.replace(left_out=noisy)
    return baseline.replace(forced={str(baseline.revision): forced}) if noisy else baseline


def _hashed_again(running: RunningComparison, *, is_alone: bool) -> LaunchFacts | None:
    """Check that launches of the same code compute the same weights; launch again if the result is alone.

    Return the facts of a script's launch that hashed every step, so that later differences are located.

    Raises:
        BaselineError: The weights differ; the message says which parameters differ first.
    """
    result, launcher = running.results[Side.CANDIDATE], running.launcher
    launch = launcher.find(result)
    if launch is None or not result.weight_hashes or not result.environment.get("bitwise_reproducible", True):
        return None
    hashed = passed(running.again(Side.CANDIDATE, every_step)).facts if hashes_weights(running) else None
    same = [one.result for one in launcher.launches if one.request == launch.request and one is not launch]
    if is_alone and not same and hashed is None:
        same = [passed(running.again(Side.CANDIDATE))]
    lines: list[str] = []
    for other in same:
        if first := first_difference(other, result, result.total_iterations, ["weight_hash"]):
            lines = locate_first(other, result, first, (), None, launcher.folder_of)
            break
    else:
        # A hash of all optimizers would not do: it covers those that were hashed in a step.
        lines = [first_other_weights(hashed.series, result.facts.series)] if hashed is not None else []
    if any(lines):
        raise BaselineError(
            f"{running.comparison.case}: not recorded, because two launches of the same code compute different weights:"
            + "".join(f"\n  {line}" for line in lines)
            + "\n  next: set the seed before the model is made, give every parameter a value, and start from one "
            "checkpoint; or do not record weights (recorder.weights, hash_weights, hash_every)"
        )
    return hashed
