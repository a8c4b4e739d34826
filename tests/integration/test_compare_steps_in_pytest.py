"""Two variants compared step by step, in an inner pytest with faked launches."""

import pytest

from tests.unit.builders import each_of

STEPS = ("1", "2", "3", "4")
HASHES = {step: step * 16 for step in STEPS}
LOSSES = dict.fromkeys(STEPS, 0.5)


@pytest.fixture
def paired(project):
    """A test that compares two mappings; the candidate's step times distinguish it."""

    def write(call="workload.compare(*pair, steps=4)", **candidate):
        project.one_test(f"pair = {{'workload': 'toy', 'fault': {candidate!r}}}, {{'workload': 'toy'}}; {call}")
        return project

    project.plant(weight_hashes=HASHES, losses=LOSSES)
    return write


def test_mappings_are_launched_and_equal_bits_pass(paired):
    project = paired("assert len(workload.compare(*pair, steps=4).rows) == 3")
    shows = ["  pass *weight_hash *444444444444 *: all 4 steps", "aorta: 1 test OK, 3 metrics unchanged, 2 launches*"]
    project.run("-v", "--aorta-results=kept", shows=shows, passed=1)


def test_first_difference_fails_with_step_metric_and_config(paired):
    odd = {"weight_hashes": HASHES | {"3": "f" * 16, "4": "f" * 16}, "losses": LOSSES | {"4": 0.25}}
    project = paired(**odd)
    project.plant()
    project.plant(by_launch={"1": {"weight_hashes": HASHES, "losses": LOSSES}})
    shows = [
        "E  *Regression: loss (0.5 -> 0.25, limit exact)",
        "E  *Regression: weight_hash (333333333333 -> ffffffffffff, limit exact)",
        "E  *measured  toy on cpu-x2-gloo, 4 steps",
        "E  *cause     loss, grad_norm: first in step 4, in 1 of 4 steps",
        "E  *cause     weight_hash: first in step 3, in 2 of 4 steps",
        "E  *cause     config: fault=*, the reference's fault={}",
        "E  *cause     first difference: step 3, weight_hash",
        "aorta: *, 2 launches*",
    ]
    project.run("--aorta-no-locate", shows=shows, failed=1)


LOCATING = {
    "1": {"weight_hashes": HASHES, "losses": LOSSES},
    "2": {"weight_hashes": HASHES | {"2": "e" * 16}, "losses": LOSSES},
    "3": {"weight_hashes": HASHES, "losses": LOSSES},
    "4": {"weight_hashes": HASHES | {"2": "e" * 16}, "losses": LOSSES, "tensor_hash": "a" * 32},
}


LOCATED = [
    "E  *first difference: step 2, weight_hash",
    "E  *step 2, gradients: 1 of 2 gradients differ, first w [[]2, 3]",
    "E  *step 2, weights: 1 of 2 parameters differ, first w [[]2, 3]",
    "aorta: 1 of 1 test failed, *, 4 launches*",
]


LOCATIONS = {
    "by default": ("-q", "", LOCATING["4"], LOCATED),
    "by argument": ("--aorta-no-locate", ", locate=True", LOCATING["4"], LOCATED),
    "turned off": ("-q", ", locate=False", LOCATING["4"], ["aorta: 1 of 1 test failed, *, 2 launches*"]),
    "does not come back": (
        "-q",
        "",
        LOCATING["3"],
        ["E  *launched once more, they differ in no step up to 2: results vary between launches *"],
    ),
    "failed launch": (
        "-q",
        "",
        {"raises": 1},
        ["E  *Regression: weight_hash *", "E  *not located further, because a launch failed: *ValueError: boom*"],
    ),
}


@each_of("option, more, last, lines", LOCATIONS)
def test_locating_launches_each_once_more_and_names_the_parameter(paired, option, more, last, lines):
    project = paired(f"workload.compare(*pair, steps=4{more})")
    project.plant(by_launch=LOCATING | {"4": last})
    project.run(option, shows=lines)


def test_steps_that_are_not_there_fail_and_name_the_key(paired):
    project = paired("workload.compare(*pair, steps=4, metrics=['weight_hash'])")
    project.plant(weight_hashes={"4": "0" * 16}, losses=LOSSES)
    project.run(
        "--aorta-fail-on=none",
        failed=1,
        shows="E  *Missing: weight_hash, the candidate has values for 1 of steps 1 to 4, but not for step 1; "
        "*hash_every*",
    )


@pytest.mark.parametrize(
    ("arguments", "metrics"),
    [
        ("steps=4, metrics=['num_parameters', 'loss']", ["loss", "num_parameters"]),
        ("metrics=filter(None, ['final_loss'])", ["final_loss"]),
    ],
)
def test_metrics_may_be_any_iterable_and_those_of_launches_come_after_those_of_steps(paired, arguments, metrics):
    project = paired(f"assert [row.metric for row in workload.compare(*pair, {arguments}).rows] == {metrics}")
    project.plant(weight_hashes=HASHES, losses=LOSSES, metrics={"num_parameters": 3.0})
    project.run(passed=1)


def test_results_of_the_reference_version_come_from_it_again(versioned):
    versioned.one_test(
        "first = workload.run('toy'); "
        "workload.compare(first, distributed_world.again(first, reference=True), metrics=['step_time_mean'])",
        "@pytest.mark.tolerance(step_time_mean='5%')",
    )
    versioned.run("--aorta-ab=HEAD", "--aorta-results=kept")
    planned = versioned.planned()
    assert len(planned) > 2
    assert planned.count("HEAD") == len(planned) // 2


RING = "HEAD env:NCCL_ALGO=Ring"


@pytest.mark.parametrize(
    ("compared", "planned"),
    [
        (f"{{'workload': 'toy'}}, '{RING}', steps=4", ["", RING]),
        (f"workload.run('toy'), '{RING}', metrics=['final_loss']", ["", RING]),
        (f"again(workload.run('toy'), reference='HEAD'), '{RING}', metrics=['final_loss']", ["", "HEAD", RING]),
    ],
)
def test_a_text_is_a_side_at_which_the_candidate_is_launched_too(versioned, compared, planned):
    versioned.one_test(f"again = distributed_world.again; workload.compare({compared})")
    versioned.plant(weight_hashes=HASHES, losses=LOSSES)
    versioned.run("--aorta-results=kept", passed=1)
    assert versioned.planned() == planned


def test_difference_from_a_side_says_how_the_sides_differ(versioned, monkeypatch):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    versioned.one_test("workload.compare(workload.run('toy'), 'env:NCCL_ALGO=Ring', metrics=['num_parameters'])")
    versioned.plant(metrics={"num_parameters": 3.0}, reference={"metrics": {"num_parameters": 2.0}})
    versioned.run(
        failed=1,
        shows=[
            "E  *num_parameters *",
            "E  *baseline *env:NCCL_ALGO=Ring, launched in turn with this code",
            "E  *differs *NCCL_ALGO Ring -> unset",
        ],
    )


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("nowhere", "reference=nowhere: 'nowhere' is not a commit of this clone; *fetch*"),
        ("python:", "reference=python:: got 'python:', allowed is words of a side*"),
        ("env:LD_PRELOAD=x", "reference=env:LD_PRELOAD=x: env: *allowed is *"),
        ("", "again: reference is '', allowed is True, False or the words of a side"),
    ],
)
def test_text_that_is_no_side_is_refused(versioned, side, message):
    versioned.one_test(f"workload.compare(workload.run('toy'), {side!r})")
    versioned.run(failed=1, shows=f"E  *SpecError: {message}")


def test_script_takes_no_config_keys(project):
    project.write("train.py", "")
    project.one_test("distributed_world.again(workload.run_script('train.py'), steps=3)")
    project.run(shows="E  *SpecError: script 'train.py' has no config keys; can't change ?'steps'?")
