"""A kind of device is added to the host's side in two modules: a made-up kind is, in a copy of the package."""

import shutil
from pathlib import Path

from pytest_aorta.common.files import PACKAGE_ROOT
from tests.unit.builders import run_python, write

# File, a line of it, and what takes the line's place.
ADDED = [
    ("plan/device_kind.py", '    CPU = "cpu"\n', '    TOY = "toy"\n    CPU = "cpu"\n'),
    ("plan/device_kind.py", '    GLOO = "gloo"\n', '    TOYCCL = "toyccl"\n    GLOO = "gloo"\n'),
    ("plan/device_kind.py", "BACKENDS = {", "BACKENDS = {DeviceKind.TOY: Backend.TOYCCL, "),
    ("plan/device_kind.py", "KINDS = {", 'KINDS = {"toys": DeviceKind.TOY, '),
    ("plan/device_kind.py", "LIBRARIES = (", 'LIBRARIES = ("toy_sdk", '),
    ("plan/device_kind.py", "HIDDEN = {", 'HIDDEN = {"TOY_VISIBLE": "none", '),
    (
        "plan/accelerators.py",
        "ACCELERATORS: dict[str, Accelerator] = {",
        """
class Toys:
    source = "toyml"

    def devices(self, environ):
        tokens = environ.get("TOY_VISIBLE", "0,1,2").split(",")
        return [Device(token, "Toy 9000", f"TOY-{token}", "toys") for token in tokens]

    def show(self, devices, environ):
        environ["TOY_VISIBLE"] = ",".join(device.token for device in devices)

    def sensors(self, devices):
        raise SensorsUnavailable("toys have none")


ACCELERATORS: dict[str, Accelerator] = {"toys": Toys(), """,
    ),
]
USED = """
from pathlib import Path
from pytest_aorta.launch.guarded import launch_environment
from pytest_aorta.launch.watch import LaunchWatch
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.world import WorldSpec, resolve_world
from pytest_aorta.result.facts import NUMERIC_ENVIRONMENT
from pytest_aorta.verdict.causes import notes_on
from pytest_aorta.verdict.environment import changes
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise import blocks, default_variance
from tests.unit.builders import make_facts, make_options

GROWS = {"step_time_growth": 0.2}
devices = visible_devices({"TOY_VISIBLE": "2,1"})
world = resolve_world(WorldSpec("all", "toy"), make_options(), devices)
print(world.platform)
cpu = resolve_world(WorldSpec(2, "cpu"), make_options(), devices)
own = {"timeout_s": 9.0, "run_dir": Path("/run"), "cwd": Path("/")}
plans = [LaunchPlan("toy", None, {}, "train.py", (), world=each, **own) for each in (world, cpu)]
environs = [launch_environment(plan, {"TOY_VISIBLE": "0,1,2"}) for plan in plans]
print(*(f"{environ['TOY_VISIBLE']} {environ['AORTA_DEVICE']};" for environ in environs))
with LaunchWatch(plans[0], None) as watch:
    pass
print(watch.platform_facts.source, watch.platform_facts.problem)
here, there = (make_facts(environment={"device": "toy", "toy_sdk": number}, **GROWS) for number in (1, 2))
print(changes(here, there).machine, "toy_sdk" in NUMERIC_ENVIRONMENT, blocks([here]) == blocks([there]))
print(*notes_on([], [here], [there], "baseline")[0])
print([name for name, row in METRICS.items() if default_variance(row, "toy") != default_variance(row, "cuda")])
"""
SAID = [
    "toy-9000-x2-toyccl",
    "2,1 toy; none cpu;",
    "toyml toys have none",
    "other environment: toy_sdk 2 -> 1 True True",
    "steps get slower within a launch by at least 20.0%",
    "[]",
]


def test_made_up_kind_of_device_is_leased_watched_checked_and_compared(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE_ROOT, tmp_path / "pytest_aorta", ignore=shutil.ignore_patterns("__pycache__"))
    for name, line, added in ADDED:
        file = tmp_path / "pytest_aorta" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(line) == 1, (name, line)
        write(file, text.replace(line, added))
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE_ROOT.parent)!r}]\n"
    done = run_python("-c", path + USED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == SAID
