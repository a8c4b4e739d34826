"""Arguments of the fixtures' methods that are not allowed; one run covers all calls of a table."""

import pytest

AFTER_A_LAUNCH = [
    ("workload.check(None)", "check: got None, allowed is a result that run() or run_script() returned"),
    ("workload.check([result])", "check: got [WorkloadResult("),
    ("workload.check(result, label='')", "check: label is '', allowed is "),
    (r"workload.check(result, label='a\nb')", r"check: label is 'a\nb', allowed is "),
    ("workload.compare(result, result, label=' ')", "compare: label is ' ', allowed is a text of one line"),
    ("workload.run_script('train.py', environment=3)", "environment: got 3, allowed is a mapping from names to "),
    (
        "workload.run_script('train.py', environment={1: 'a', 'B': 'c'})",
        "environment: got {1: 'a', 'B': 'c'}, allowed is ",
    ),
    ("workload.run_script('train.py', environment={'WORLD_SIZE': '1'})", "environment: got ['WORLD_SIZE'], allowed is"),
    (
        "workload.run_script('train.py', record={'hash_weigths': True})",
        "$.record: unknown key 'hash_weigths' (did you mean 'hash_weights'?); there are ['deterministic', ",
    ),
    ("workload.run_script('train.py', fresh=['train.py'])", "script 'train.py': fresh: ['train.py'] hold the script"),
    ("workload.run_script('train.py', record={'warmup': -1})", "script 'train.py': $.record.warmup: got -1"),
    (
        "workload.run_script('train.py', fresh=['../x'])",
        "script 'train.py': fresh: got '../x', allowed are paths below",
    ),
    ("workload.run_command(['acelerate'])", "command ['acelerate']: 'acelerate' is not beside "),
    ("workload.run_command([])", "command []: '' is not beside "),
    ("workload.run_command('python train.py')", "allowed is a list with one text per argument, such as ['python', "),
    ("distributed_world.again(3)", "again: got 3, allowed is a result that "),
    ("distributed_world.again(result, reference=1)", "again: reference is 1, allowed is True, False or the words of "),
    ("distributed_world.again(result, reference=True)", "no A/B reference to launch; name one with --aorta-ab=SIDE"),
]
# Python's own words.
MISSPELT = [
    ("workload.run_script('train.py', rec0rd={})", "unexpected keyword argument 'rec0rd'"),
    ("workload.run_command(['python'], env={})", "unexpected keyword argument 'env'"),
]
LIST = "allowed is a list with one text per argument"
SCRIPT = "allowed is a path ending in .py or a dotted module name"
BEFORE_A_LAUNCH = [
    ("workload.run('tyo')", "no workload named 'tyo' (did you mean 'toy'?); there are ['copy_compute', "),
    ("workload.run('toy', step=3)", "workload 'toy' has no config keys ['step'] (did you mean 'steps'?); there are ["),
    ("workload.run('toy', steps='3')", "config of workload 'toy': steps: '3' is not of type 'integer'"),
    ("workload.run('toy', step_ms=float('nan'))", "step_ms: got nan, allowed is plain JSON: "),
    ("workload.run_script('absent.py')", "script 'absent.py': there is no file "),
    ("workload.run_script('')", f"script '': {SCRIPT}"),
    ("workload.run_script('train.yaml')", f"script 'train.yaml': {SCRIPT}"),
    ("workload.run_script('-c')", f"script '-c': {SCRIPT}"),
    ("workload.run_script('train.sh --x')", f"script 'train.sh --x': {SCRIPT}"),
    ("workload.run_script('train.py', '--steps 3')", f"args are '--steps 3', {LIST}, such as ['--steps', '3']"),
    ("workload.run_script('train.py', b'--steps 3')", f"args are b'--steps 3', {LIST}, such as ['--steps', '3']"),
    ("workload.run_script('train.py', 3)", f"args are 3, {LIST}"),
    ("""workload.run_script('train.py', "it's")""", f"""{LIST}, such as ["it's"]"""),
    ("workload.compare(*pair, steps=0)", "compare: steps is 0, allowed is an integer of 1 or more"),
    ("workload.compare(*pair, steps=4, metrics=['los'])", "metrics ['los'] are unknown (did you mean 'loss'?)"),
    ("workload.compare(*pair, steps=4, metrics=[])", "compare: metrics is empty; allowed are ['all_gather_ms'"),
    ("workload.compare(*pair, metrics=[])", "compare: metrics is empty; allowed are ['all_gather_ms'"),
    ("workload.compare(*pair, metrics=filter(None, ['']))", "compare: metrics is empty; allowed are "),
    ("workload.compare(*pair, metrics=filter(None, ['los']))", "['los'] are unknown (did you mean 'loss'?)"),
    ("workload.compare({'steps': 3}, pair[1])", "variant {'steps': 3}: allowed is a mapping with "),
    (
        "workload.compare_arrangements('train.py', batch_arg='--b')",
        "a script without it needs parser.add_argument('--b', type=int)",
    ),
    (
        "workload.compare_arrangements('train.py', ['--b=x'], batch_arg='--b')",
        "--b: the script's arguments ['--b=x'] have no integer of it",
    ),
    ("workload.compare_arrangements({'workload': 'toy'})", "batch_size of toy is None, needed is an integer"),
    ("workload.compare(pair[0], 7)", "variant 7: allowed is a mapping with the name of a workload at the key "),
]


def run_calls(
    project, table: list[tuple[str, str]], before: str, total: str, kind: str = "SpecError"
) -> pytest.RunResult:
    """Run a test for each call, which has to fail with the message beside it."""
    for script in ("train.py", "train.yaml"):
        project.write(script, "")
    project.tests_of([call for call, _ in table], before)
    ran = project.run("--aorta-results=kept", shows=total.format(len(table)), failed=len(table))
    lines = [line for line in ran.outlines if line.startswith("E  ")]
    assert [
        line for line, (_, message) in zip(lines, table, strict=True) if f"{kind}: " not in line or message not in line
    ] == []
    return ran


def test_argument_that_is_not_allowed_is_an_error_that_names_it(project):
    total = "aorta: {0} of {0} tests failed, {0} tests failed without a verdict*"
    ran = run_calls(project, AFTER_A_LAUNCH, "result = workload.run('toy')", total)
    ran.stdout.no_fnmatch_line("*contextlib*")


def test_name_that_is_misspelt_or_was_replaced_is_an_error_before_any_launch(project):
    run_calls(project, MISSPELT, "pass", "aorta: no test launched, {} tests failed before a launch", "Error")


def test_what_cannot_be_launched_or_compared_is_an_error_before_any_launch(project):
    total = "aorta: no test launched, {} tests failed before a launch"
    run_calls(project, BEFORE_A_LAUNCH, "pair = {'workload': 'toy'}, {'workload': 'toy'}", total)
    assert not (project.path / "kept").exists()
