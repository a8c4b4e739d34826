"""``aorta bisect`` over packages and variables; packages are real, and launches are faked."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import typing_extensions

from pytest_aorta.cli.main import main
from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.environments import Environment
from pytest_aorta.plan.reference import References
from pytest_aorta.plan.side import SideSpec, parse_span
from pytest_aorta.session.axes import make_axis
from tests.integration.conftest import FAKE_LAUNCHER
from tests.integration.test_bisect_in_pytest import EXACT, NODE
from tests.unit.builders import git, write
from tests.unit.wheels import make_wheel

ROOT = Path(__file__).parents[2]
# The weights are others if all of "carries" are new, and the launch fails if one of "breaks" is new and the other old.
BY_PACKAGES = """
EARLY = "typing_extensions"
planted_by_fault = planted


def planted(plan, rootpath):
    rules = json.loads((rootpath / "rules.json").read_text())
    new = {name for name, value in plan.reference.variables.items() if value == "2"}
    if "since" in rules:
        [info] = plan.reference.prefix.glob("lib/python*/site-packages/toy-*.dist-info")
        is_new = info.name.removeprefix("toy-").removesuffix(".dist-info") in rules["since"]
        return planted_by_fault(plan, rootpath) | {"weight_hash": "ab"[is_new] * 16}
    if plan.reference.prefix:
        shared = plan.reference.prefix.glob("lib/python*/site-packages")
        folders = [*shared, *plan.reference.early, *plan.reference.late]
        new = {info.name.partition("-")[0] for folder in folders for info in folder.glob("*-2.0.dist-info")}
        modules = [path for folder in folders for path in folder.glob("[pct]*.py")]
        assert new == {path.stem for path in modules if "VERSION = '2.0'" in path.read_text()}
        assert len({path.stem for path in modules}) == len(modules)
        assert ("came" in new) is any(path.stem == "came" for path in modules)
        # What ranks import before code of the user is on the path from the start.
        assert [path.stem for folder in plan.reference.early for path in folder.glob("*.py")] in ([], [EARLY])
    broken = {"raises": 1} if len(new.intersection(rules.get("breaks", []))) == 1 else {}
    return planted_by_fault(plan, rootpath) | {"weight_hash": "ab"[new.issuperset(rules["carries"])] * 16} | broken
"""
NAMES = [f"p{number:02}" for number in range(12)]
CASES = {
    "one of twelve": ({"carries": ["p03"]}, ["p03"]),
    "two together": ({"carries": ["p02", "p09"]}, ["p02", "p09"]),
    "one that needs another": ({"carries": ["p07"]}, ["p07", "p08"]),
    "one that came": ({"carries": ["came"]}, ["came"]),
    "one that another needs": ({"carries": ["p08"]}, ["p08"]),
    "beside one that breaks the start": ({"carries": ["p03"], "breaks": ["p05", "p06"]}, ["p03"]),
}
IN_CI = ("two together", "one that needs another")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two interpreters; of the second one, all packages are newer, and one needs a newer one."""
    if not find_spec("torch"):
        pytest.skip("torch is not installed")
    folder = tmp_path_factory.mktemp("ends")
    (folder / "needed").symlink_to(Path(msgspec.__file__).parents[1])
    found = []
    for version in ("1.0", "2.0"):
        prefix = folder / version
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True, timeout=120)
        [packages] = prefix.glob("lib/python*/site-packages")
        (packages / "base.pth").write_text(str(folder / "needed"))
        for name in [*NAMES, "typing_extensions", *(["came"] if version == "2.0" else ["gone"])]:
            needs = {"p07": [f"p08>={version}"], "p10": [f"p11>={version}; extra == 'dev'"]}.get(name, [])
            text = Path(typing_extensions.__file__).read_text(encoding="utf-8") if name == "typing_extensions" else ""
            with zipfile.ZipFile(make_wheel(folder, name, version, text, needs)) as wheel:
                wheel.extractall(packages)
        found.append(f"python:{prefix}/bin/python")
    return found


@pytest.fixture
def search(versioned, monkeypatch, capfd):
    """Run a search by rules, and return its exit code, what it found and its output."""
    versioned.pytester.makeconftest(FAKE_LAUNCHER + BY_PACKAGES)
    versioned.write("test_toy.py", EXACT)
    monkeypatch.chdir(versioned.path)

    def run(rules: dict[str, list[str]], *words: str) -> tuple[int, list[str], str]:
        versioned.write("rules.json", json.dumps(rules))
        code = main(["bisect", *words, "--result=found.json", "--", NODE])
        return code, json.loads(versioned.read("found.json"))["changes"], "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        pytest.param(*case, id=name, marks=[] if name in IN_CI else [pytest.mark.extended])
        for name, case in CASES.items()
    ],
)
def test_smallest_set_of_packages_that_carries_the_change_is_found(search, ends, rules, found):
    code, changes, output = search(rules, *ends, "--over=packages")
    assert (code, changes) == (1, [f"{name} {'absent' if name == 'came' else '1.0'} -> 2.0" for name in found]), output
    assert "GOOD and BAD differ in 15 packages: came absent -> 2.0, gone 1.0 -> absent, p00 1.0 -> 2.0, " in output
    assert (
        output.count("only with") == output.count("p07 1.0 -> 2.0: only with p08 1.0 -> 2.0, by its requirements") == 1
    )
    message = f"{len(found)} packages together" if len(found) > 1 else changes[0]
    assert f"found: {message}" in output
    assert ("skipped p0" in output) is ("breaks" in rules)
    assert "A/B with GOOD" in output
    assert len([line for line in output.splitlines() if "weight_hash: " in line or ": unchanged" in line]) <= 40


def test_variables_that_carry_the_change_are_found(search):
    sides = [" ".join(f"env:NCCL_{name}={value}" for name in ("A", "B", "C", "D")) for value in (1, 2)]
    code, changes, output = search({"carries": ["NCCL_B", "NCCL_D"]}, *sides, "--over=variables")
    assert (code, changes) == (1, ["NCCL_B 1 -> 2", "NCCL_D 1 -> 2"]), output
    assert "found: 2 variables together" in output


def test_sides_that_differ_otherwise_or_not_at_all_are_refused(search, ends, capfd):
    for words, message in (
        ((*ends,), "which differ in commits alone"),
        ((ends[0],), "which differ in commits alone"),
        ((*ends, "--over=toy@1.0..2.0"), "at most one side beside --over"),
        ((ends[0], "--over=toy@1.0"), "--over: got 'toy@1.0', allowed is commits, packages or variables, "),
        ((ends[0], "--over=toy"), "--over: got 'toy', allowed is commits, packages or variables, "),
        ((f"{ends[0]} env:NCCL_ALGO=Ring", ends[1], "--over=packages"), "which differ in packages alone"),
        ((ends[0], "python:/absent", "--over=packages"), "SIDE python:/absent: there is no program /absent"),
        ((ends[0], "with:", "--over=packages"), "SIDE: got 'with:', allowed is words of a side"),
        ((ends[0], ends[0], "--over=packages"), "GOOD and BAD have the same packages"),
    ):
        try:
            code = main(["bisect", *words, "--", NODE])
        except SystemExit as ended:
            code = int(str(ended.code))
        assert code in (1, 2)
        assert message in "".join(capfd.readouterr())


@pytest.mark.extended
def test_release_that_brought_the_change_in_is_found(search, ends, monkeypatch, tmp_path):
    for version in ("1.0", "2.0", "2.1rc1", "9.0", "10.0"):
        make_wheel(tmp_path, "toy", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    code, changes, output = search({"since": ["9.0", "10.0"]}, ends[0], "--over=Toy@1.0..10.0+local")
    assert (code, changes) == (1, ["toy==9.0"]), output
    assert "A/B with toy==2.0" in output


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository with four tags; an installed package names it."""
    git(tmp_path, "init", "-q", "toy")
    for number in range(4):
        git(tmp_path / "toy", "commit", "--allow-empty", "-qm", f"change {number}")
        git(tmp_path / "toy", "tag", f"v{number}")
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\nProject-URL: Source Code, file://{tmp_path}/toy\n"
    write(info / "METADATA", text)
    references = References(None, tmp_path, print)
    monkeypatch.setitem(vars(references), "own", Environment("", tmp_path, "3.11", (tmp_path,), tmp_path, {}))
    return tmp_path / "toy", references


@pytest.mark.parametrize("repository", ["", "git+file://{}@"])
def test_commits_of_a_package_are_those_between_two_tags(toy, repository):
    folder, references = toy
    commits = [git(folder, "rev-parse", tag) for tag in ("v2", "v3")]
    for ends, changes in (("v1..v3", commits), (f"v1..{commits[0][:10]}", commits[:1])):
        span = parse_span(f"toy@{repository.format(folder)}{ends}")
        assert span
        axis = make_axis(span, (SideSpec(""), SideSpec("")), references)
        assert [*axis.changes] == [f"toy @ git+file://{folder}@{commit}" for commit in changes]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("toy@v3..v1", "--over=toy@v3..v1: .* is not before"),
        ("toy@v1..v9", "--over=toy@v1..v9: 'v9' is not a commit"),
        ("other@v1..v3", r"--over=other@v1..v3: other is not installed, or names no .* write other@git\+URL@GOOD..BAD"),
    ],
)
def test_ends_that_a_package_does_not_have_are_refused(toy, text, message):
    span = parse_span(text)
    assert span
    with pytest.raises(SpecError, match=message):
        make_axis(span, (SideSpec(""), SideSpec("")), toy[1])


BY_NIGHT = """
from importlib.metadata import distributions
planted_by_fault = planted


def planted(plan, rootpath):
    at = plan.reference
    folders = [*at.early, *at.late, *at.prefix.glob("lib/python*/site-packages")] if at else sys.path
    torch = next(iter(distributions(name="torch", path=[*map(str, folders)])))
    return planted_by_fault(plan, rootpath) | {"weight_hash": "ab"[torch.version.endswith("28")] * 16}
"""


@pytest.mark.extended
def test_recipe_for_every_night_names_the_nightly_of_torch(versioned, tmp_path, monkeypatch):
    text = (ROOT / "docs/ab.md").read_text(encoding="utf-8")
    recipe = text.partition("\nEvery night, ")[2].partition("```sh\n")[2].partition("```")[0].replace("NODE_ID", NODE)
    versioned.pytester.makeconftest("import sys\n" + FAKE_LAUNCHER + BY_NIGHT)
    versioned.write("test_toy.py", EXACT)
    versioned.write("requirements.txt", "needed\nbeside\n")
    (tmp_path / "needed").symlink_to(Path(msgspec.__file__).parents[1])
    script = {"{info}/entry_points.txt": "[console_scripts]\naorta = pytest_aorta.cli.main:main\n"}
    make_wheel(tmp_path / "wheels", "needed", "1.0", path=f"{tmp_path}/needed\n{ROOT}", more=script)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # a constraint of this machine may refuse the nightly
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for night in (27, 28):
        make_wheel(tmp_path / "wheels", "torch", f"2.15.0.dev202611{night}", more={"torch.py": None})
        make_wheel(tmp_path / "wheels", "beside", f"{night}.0")
        result = versioned.pytester.run("sh", "-c", recipe)
    result.stdout.fnmatch_lines(
        [
            "E  *Regression: weight_hash *",
            "E  *differs *torch 2.15.0.dev20261127 -> 2.15.0.dev20261128, beside 27.0 -> 28.0",
            "E  *find *aorta bisect python:old/bin/python python:*/new/bin/python --over=packages -- *",
            "E  *found: torch 2.15.0.dev20261127 -> 2.15.0.dev20261128",
        ]
    )
