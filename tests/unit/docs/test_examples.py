"""The example files agree with the program and with each other; no scheduler runs them here."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_aorta.cli import main as cli
from pytest_aorta.common import variables
from pytest_aorta.plan.options import OPTIONS

EXAMPLES = Path(__file__).parents[3] / "examples"
SBATCH = sorted(EXAMPLES.glob("slurm/*.sbatch"))
MANIFESTS = sorted(EXAMPLES.glob("kubernetes/*.yaml"))
FLAGS = {option.flag: option for option in OPTIONS}


def pod(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["spec"]["template"]["spec"])


@pytest.mark.parametrize("path", [*SBATCH, *MANIFESTS], ids=lambda path: path.name)
def test_options_of_an_example_are_there(path):
    names = set(re.findall(r"--aorta-[a-z-]+", path.read_text(encoding="utf-8")))
    assert names
    assert names <= set(FLAGS)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_batch_script_is_well_formed(path):
    ended = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert ended.stderr == ""


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_batch_script_asks_slurm_before_its_first_command(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives
    assert max(directives) < first


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_has_as_many_pods_as_pytest_has_nodes(path):
    service, job = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    [script] = pod(job)["containers"][0]["args"]
    [num_nodes] = re.findall(r"--aorta-nnodes=(\d+)", script)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(num_nodes)
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod(job)["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_waiting_agents_of_a_manifest_look_where_pytest_is(path):
    service, job = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    [container] = pod(job)["containers"]
    [script] = container["args"]
    [port] = re.findall(r"-o aorta_rdzv_endpoint=\"\$\(hostname\):(\d+)\"", script)
    [command] = re.findall(r"exec aorta (agent .*)", script)
    arguments = cli.parser().parse_args(shlex.split(command))
    # The pods of an Indexed Job are named after the job and their index.
    assert arguments.connect == (f"{job['metadata']['name']}-0.{service['metadata']['name']}", int(port))
    assert arguments.wait
    assert variables.AGENT_TOKEN in {entry["name"] for entry in container["env"]}
