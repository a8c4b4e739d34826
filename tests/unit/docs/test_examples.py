"""The example files agree with the program and with each other; no scheduler runs them here."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[3] / "examples"
MANIFESTS = sorted(EXAMPLES.glob("kubernetes/*.yaml"))


def pod(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["spec"]["template"]["spec"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_has_as_many_pods_as_pytest_has_nodes(path):
    *services, job = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if job["kind"] == "JobSet":  # which makes the service
        [replicated] = job["spec"]["replicatedJobs"]
        assert job["spec"]["successPolicy"]["targetReplicatedJobs"] == [replicated["name"]]
        job = replicated["template"]
    [script] = pod(job)["containers"][0]["args"]
    [num_nodes] = re.findall(r"--aorta-nnodes=(\d+)", script)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(num_nodes)
    assert job["spec"]["completionMode"] == "Indexed"
    for service in services:
        assert pod(job)["subdomain"] == service["metadata"]["name"]


@pytest.mark.skipif(shutil.which("xargs") is None, reason="no xargs here")
def test_launcher_for_pods_runs_each_command_on_every_pod(tmp_path):
    script = [str(EXAMPLES / "kubernetes/on_every_pod.sh"), str(tmp_path / "calls")]
    command = ["sh", "-c", 'echo "$JOB_COMPLETION_INDEX $*" >> "$0"', str(tmp_path / "seen"), "two words", "a"]
    with subprocess.Popen(script, env=os.environ | {"JOB_COMPLETION_INDEX": "1"}) as waiting:
        try:
            while not (tmp_path / "calls").exists():
                time.sleep(0.05)
            for _ in range(2):
                subprocess.run([*script, *command], env=os.environ | {"JOB_COMPLETION_INDEX": "0"}, check=True)
            deadline_s = time.monotonic() + 30
            while len((tmp_path / "seen").read_text().splitlines()) < 4 and time.monotonic() < deadline_s:
                time.sleep(0.05)
        finally:
            waiting.kill()
    assert sorted((tmp_path / "seen").read_text().splitlines()) == ["0 two words a"] * 2 + ["1 two words a"] * 2
