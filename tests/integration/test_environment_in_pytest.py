"""Environment variables of a config, and the baselines that belong to them."""

import json

RUNS_TWICE = """
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

def test_one(workload):
    workload.check(workload.run("toy"))
    workload.check(workload.run("toy", environment=ENVIRONMENT))
"""


def cases(project) -> dict[str, dict]:
    stored = [json.loads(path.read_text()) for path in project.baseline_files()]
    return {baseline["case"]: baseline["config"]["environment"] for baseline in stored}


def test_case_with_another_environment_has_its_own_name_and_baseline(gpu):
    gpu.test_file(RUNS_TWICE)
    gpu.run("--update-baselines", "--aorta-launches=3", passed=1)
    name = "test_toy.py::test_one::toy"
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert cases(gpu) == {name: {}, f"{name}[CUDA_DEVICE_MAX_CONNECTIONS=1]": one}
    gpu.run(passed=1)
    # The baseline of another value is not used.
    gpu.test_file(RUNS_TWICE.replace('"1"', '"8"'))
    gpu.run(shows="*test-one-toy-cuda-device-max-connections-8-*", failed=1)


def test_scripts_environment_is_its_config(project):
    script = repr(str(project.write("train.py", "")))
    project.one_test(
        f"assert workload.run_script({script}, environment={{'NCCL_ALGO': 'Ring'}}).config"
        " == {'args': [], 'environment': {'NCCL_ALGO': 'Ring'}}"
    )
    project.run(passed=1)
