"""Runs action.yml and the workflows and jobs of examples/ci as the runners of GitHub and GitLab do, without either."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "action.yml"
TEMPLATE = ROOT / "examples/ci/aorta.yml"
_NAME = r"(?:inputs|steps|github|runner|vars)\.[\w.-]+"
_INPUT = re.compile(r"\$\[\[ inputs\.([\w-]+) \]\]")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@dataclass
class Done:
    """The end of a job.

    Attributes:
        code: The exit code of the last step that failed, else 0.
        text: The output of all steps.
        used: Actions that were called, with their inputs.
        outputs: Outputs of the action.
        summary: The job summary.
    """

    code: int = 0
    text: str = ""
    used: dict[str, dict[str, str]] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    summary: str = ""


class Action:
    """One use of the composite action in the folder ``where``, with the variables of a runner."""

    def __init__(self, where: Path, variables: dict[str, str], event: str) -> None:
        self.where, self.variables, self.event = where, variables, event
        self.document = read_yaml(ACTION)
        self.values: dict[str, str] = {}
        (where / "runner").mkdir(exist_ok=True)

    def run(self, **given: str) -> Done:
        inputs = {name: entry.get("default", "") for name, entry in self.document["inputs"].items()}
        chosen = {**inputs, "python": sys.executable} | {name.replace("_", "-"): text for name, text in given.items()}
        self.values = {"github.event_name": self.event, "github.token": self.variables.get("THE_TOKEN", "")}
        self.values |= {f"inputs.{name}": self.shown(text) for name, text in chosen.items()}
        done = self.run_steps(self.document["runs"]["steps"])
        done.outputs = {name: self.shown(entry["value"]) for name, entry in self.document["outputs"].items()}
        done.summary = (self.where / "runner/summary").read_text(encoding="utf-8")
        return done

    def run_steps(self, steps: list[dict[str, Any]]) -> Done:
        done = Done()
        for step in steps:
            if self.is_wanted(step.get("if", "success()"), done):
                self.step(step, done)
        return done

    def is_wanted(self, condition: str, done: Done) -> bool:
        return bool(self.evaluated(condition)) and ("always()" in condition or not done.code)

    def evaluated(self, expression: str) -> Any:
        text = re.sub(_NAME, lambda found: repr(self.values.get(found[0], "")), expression)
        text = text.replace("&&", "and").replace("||", "or")
        names = {"always": lambda: True, "success": lambda: True, "startsWith": str.startswith}
        return eval(text, {"__builtins__": {}}, names)

    def shown(self, text: str) -> str:
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: str(self.evaluated(found[1])), text)

    def step(self, step: dict[str, Any], done: Done) -> None:
        if "uses" in step:
            given = {name: self.shown(str(value)) for name, value in step["with"].items()}
            done.used[step["uses"]] = given
            if step["uses"] == "./.pytest-aorta":
                action = Action(self.where, self.variables, self.event).run(**{"python": "python", **given})
                done.code, done.text = action.code or done.code, done.text + action.text
                done.used |= action.used
            return
        assert "${{" not in step["run"], "an expression in a script lets an input inject code"
        output, summary = self.where / "runner/output", self.where / "runner/summary"
        output.write_text("")
        summary.touch()
        environment = {
            **os.environ,
            **self.variables,
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "RUNNER_TEMP": str(self.where / "runner"),
            **{name: self.shown(text) for name, text in step.get("env", {}).items()},
        }
        folder = self.where / self.shown(step.get("working-directory", "."))
        ended = shell(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], folder, environment)
        done.text += ended.stdout
        done.code = ended.returncode or done.code
        for line in output.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            self.values[f"steps.{step['id']}.outputs.{name}"] = value


class Workflow(Action):
    """A job of a workflow of examples/ci, which gets the values of GitHub's expressions."""

    def __init__(
        self, where: Path, variables: dict[str, str], values: dict[str, str], event: str = "workflow_run"
    ) -> None:
        super().__init__(where, variables, event)
        self.values = {"runner.temp": str(where / "runner")} | values

    def run_job(self, file: str, job: str) -> Done:
        document = read_yaml(ROOT / "examples/ci" / file)
        return self.run_steps(document["jobs"][job]["steps"])


def run_template(where: Path, variables: dict[str, str], **given: object) -> Done:
    """Run the first job of the component for GitLab."""
    job = component(**given)[str(given.get("name", "aorta"))]
    return run_script(job, where, variables, Path(sys.executable).parent)


def run_script(job: dict[str, Any], where: Path, variables: dict[str, str], path: Path) -> Done:
    """Run the script of a job with the programs of a folder first on the path."""
    values = {
        name: entry["value"] if isinstance(entry, dict) else entry for name, entry in job.get("variables", {}).items()
    }
    assert all("$[[" not in line for line in job["script"])
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", **variables, **values}
    ended = shell(["sh", "-c", "set -e\n" + "\n".join(job["script"])], where, environment)
    return Done(ended.returncode, ended.stdout)


def component(**given: object) -> dict[str, Any]:
    """Return the jobs of the component, with its inputs filled in as GitLab does."""
    spec, jobs = yaml.safe_load_all(TEMPLATE.read_text(encoding="utf-8"))
    inputs = {name: entry["default"] for name, entry in spec["spec"]["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {filled(key): filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        if not isinstance(value, str):
            return value
        if (whole := _INPUT.fullmatch(value)) and isinstance(inputs[whole[1]], list):
            return inputs[whole[1]]
        return _INPUT.sub(lambda found: as_text(inputs[found[1]]), value)

    found: dict[str, Any] = filled(jobs)
    return found


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def shell(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
