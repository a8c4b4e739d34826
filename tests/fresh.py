"""An environment outside of the clone, in which pages are followed by copying: packages are wheels of a folder.

The environment has no index. ``pip install pytest-aorta`` takes the wheel of this tree, ``pip install pytest`` that of
the running pytest; what they and torch require is importable as the declared requirements of each, and nothing else is.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.builders import run_python

ROOT = Path(__file__).parents[1]
# The packages of the tree, and the names that they are installed under.
SOURCES = {"pytest_aorta": "pytest_aorta", "workloads": "aorta_workloads"}
AROUND = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
INSTALLED = ("pytest", "pytest-aorta")


def copy_tree(folder: Path, *more: str) -> Path:
    """Copy the packages and the files around them, outside of a repository."""
    for name in [*SOURCES, *more]:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    for name in AROUND:
        shutil.copy(ROOT / name, folder)
    return folder


def build(tree: Path, out: Path, *options: str) -> None:
    done = run_python("-m", "build", "--no-isolation", "--outdir", str(out), *options, str(tree))
    assert done.returncode == 0, done.stdout + done.stderr


def required(*names: str) -> dict[str, Distribution]:
    """Map the names of packages, and of what they require, to the installed distributions."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        try:
            known = found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        asked = [Requirement(text) for text in known.requires or ()]
        extras = needed.extras or {""}
        wanted = (one for one in asked if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras))
        waiting += [one for one in wanted if canonicalize_name(one.name) not in found or one.extras]
    return found


class Fresh:
    """Folders of wheels and of importable requirements, for shells that begin with neither pytest nor this package."""

    def __init__(self, folder: Path) -> None:
        self.libraries, self.wheels = folder / "libraries", folder / "wheels"
        (folder / "tree").mkdir(parents=True)
        self.libraries.mkdir()
        build(copy_tree(folder / "tree"), self.wheels, "--wheel")
        for name, package in required("torch", "pytest-aorta[report]").items():
            files = [file for file in package.files or () if ".." not in file.parts]
            if name == "pytest":
                with zipfile.ZipFile(self.wheels / f"pytest-{package.version}-py3-none-any.whl", "w") as wheel:
                    for file in files:
                        wheel.write(file.locate(), str(file))
            elif name not in INSTALLED:
                for top in {file.parts[0] for file in files}:
                    (self.libraries / top).symlink_to(Path(str(package.locate_file(top))))

    def shell(self, folder: Path) -> "Shell":
        environment = {
            "HOME": str(folder.parent),
            "PATH": os.pathsep.join([str(Path(sys.base_prefix) / "bin"), "/usr/bin", "/bin"]),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONPATH": str(self.libraries),
        }
        return Shell(folder, environment)


class Shell:
    """One session of a shell: the folder and the environment that a command leaves are those of the next one."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        who = {f"GIT_{role}_{what}": "a@b.test" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self.folder, self.state = folder, folder.parent / f"{folder.name}.state"
        self.environment = {**environment, **who, "CUDA_VISIBLE_DEVICES": ""}

    def run(self, commands: str) -> subprocess.CompletedProcess[str]:
        """Run commands as copied from a page."""
        code = f'set -e\ntrap \'pwd >"{self.state}"; env -0 >>"{self.state}"\' EXIT\n{commands}\n'
        done = subprocess.run(
            ["bash", "-c", code],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        folder, _, variables = self.state.read_text().partition("\n")
        self.folder = Path(folder)
        kept = (entry.partition("=") for entry in variables.split("\0") if entry)
        self.environment = {name: value for name, _, value in kept if not re.fullmatch("_|PWD|OLDPWD|SHLVL", name)}
        return done
