"""Commands that start their own ranks: each rank is measured, named when it fails, and gone at the end."""

from pathlib import Path

import pytest

from pytest_aorta.common.errors import LaunchError, SpecError
from tests.unit.builders import nightly

pytestmark = [pytest.mark.world(size=2, device="cpu"), pytest.mark.launch_timeout(240)]
SCRIPT = str(Path(__file__).parent / "scripts" / "own_ranks.py")
TORCHRUN = ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29655"]


@pytest.mark.parametrize(
    "command",
    [
        ["python", SCRIPT, "spawn", ""],
        nightly(["python", SCRIPT, "fork", "left at once"]),
        nightly(["python", SCRIPT, "spawn", "left at once"]),
        nightly(["python", SCRIPT, "first is a rank", ""]),
        nightly([*TORCHRUN, SCRIPT, "environment", ""]),
        nightly([*TORCHRUN, SCRIPT, "exec", ""]),
    ],
    ids=["spawn", "fork, left at once", "left at once", "first is a rank", "torchrun", "exec"],
)
def test_each_rank_of_a_command_is_measured_as_under_torchrun(distributed_world, command):
    result = distributed_world.run_command(command, record={"hash_weights": True})
    assert [len(times) for times in result.rank_step_times_ms] == [21, 21]
    assert result.workload == "own_ranks.py"
    assert result.config["args"] == command
    assert {rank.environment["deterministic_algorithms"] for rank in result.ranks} == {False}


@pytest.mark.parametrize(
    ("start", "fault", "said", "rank"),
    [
        ("fork", "raise", "rank 1 failed first: ValueError: planted in step 20", 1),
        nightly("spawn", "kill", "rank 1 ended without a result or an error, as by SIGKILL", 1),
        nightly(
            "first is a rank",
            "kill",
            "rank 1 ended without a result or an error, as by SIGKILL",
            1,
        ),
        nightly("spawn", "absent", "rank 1 never reported; ", 1),
        nightly(
            "spawn",
            "code",
            "exit code 3 of the command python; every rank left its result",
            None,
        ),
    ],
)
def test_rank_of_a_command_that_fails_is_named(distributed_world, start, fault, said, rank):
    with pytest.raises(LaunchError) as caught:
        distributed_world.run_command(["python", SCRIPT, start, fault])
    assert said in str(caught.value)
    assert caught.value.rank == rank


@pytest.mark.extended
@pytest.mark.launch_timeout(100)
def test_rank_of_a_command_that_hangs_is_named_and_ended(distributed_world):
    with pytest.raises(LaunchError) as caught:
        distributed_world.run_command(["python", SCRIPT, "spawn", "hang"])
    assert caught.value.rank == 1
    assert "hang in collective: " in str(caught.value)
    assert "rank 0 waits for rank 1, which never entered gloo:all_reduce number " in str(caught.value)


def test_command_without_a_program_is_refused_before_the_launch(distributed_world):
    with pytest.raises(SpecError, match=r"command \['akselerate'\]: 'akselerate' is not beside"):
        distributed_world.run_command(["akselerate"])
