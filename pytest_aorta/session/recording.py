"""The recording of a test's launches as a new baseline: as many as it needs, whose weights are the same."""

from __future__ import annotations

from pytest_aorta.common.errors import BaselineError, ComparisonFailed
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.series import first_other_weights
from pytest_aorta.session.baselines import Recording
from pytest_aorta.session.comparing import RunningComparison
from pytest_aorta.session.locating import every_step, hashes_weights
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import Repeated, comparison_text, passed
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.bitwise import first_difference, locate_first
from pytest_aorta.verdict.learning import with_every_step
from pytest_aorta.verdict.verdicts import Verdicts


def record(running: RunningComparison) -> Verdicts:
    """Launch until the launches make a baseline, which is written if the test passes.

    Raises:
        BaselineError, ComparisonFailed: As in :class:`~pytest_aorta.session.baselines.Recording`, or the launches
            compute different weights, or nothing would be compared.
    """
    options, result, test = running.options, running.results[Side.CANDIDATE], running.launcher.test.record.nodeid
    launches = tuple(StoredLaunch(launch.facts) for launch in running.comparison.launches)
    first = Baseline(running.comparison.case, test, result.platform, result.workload, result.config, launches)
    recording = Recording(first, running.marked, options, running.read_baseline(), running.defaults)
    new, verdicts = running.settle(recording.launched())
    compared = running.comparison.replace(rows=verdicts.rows)
    if options.fail_on and compared.compared_nothing:  # as the comparison with this baseline would fail
        running.add()
        again = Repeated(options.argument_of(test), options.repeated, is_recording=True)
        raise ComparisonFailed(comparison_text(compared, [], again))
    hashed = _hashed_again(running, is_alone=len(new.launches) == 1)
    if hashed is not None:
        new = with_every_step(new, hashed, running.marked)
    running.add(new=recording.merged(new))
    return verdicts


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
            lines = [str(note) for note in locate_first(other, result, first, (), None, launcher.folder_of)]
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
