"""Packages built from a copy of the tree: exactly the package's files, with a version from git's tags."""

import email
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.fresh import AROUND, ROOT, SOURCES, build, copy_tree
from tests.unit.builders import git, run_python

REPOSITORY = "https://hub.test/octo/pytest-aorta"


def package_files() -> dict[str, str]:
    """Map every file of the packages in the tree to its installed path."""
    files = [path for name in SOURCES for path in (ROOT / name).rglob("*") if path.is_file()]
    inside = [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]
    return {path.as_posix(): Path(SOURCES[path.parts[0]], *path.parts[1:]).as_posix() for path in inside}


def version_in(folder: Path) -> str:
    return run_python("-m", "setuptools_scm", cwd=folder, check=True).stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Copy the packages and neighboring files, some of which must not be shipped, outside of a repository."""
    return copy_tree(tmp_path_factory.mktemp("tree"), "tests", "baselines")


@pytest.fixture(scope="module")
def cloned(tree, tmp_path_factory):
    """Commit the copy without a tag, as in a shallow clone."""
    folder = tmp_path_factory.mktemp("clone") / "tree"
    shutil.copytree(tree, folder)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    return folder


@pytest.fixture(scope="module")
def built(cloned, tmp_path_factory):
    """Build an sdist, and a wheel from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPOSITORY_URL", REPOSITORY)
        build(cloned, out)
    return out


def test_sdist_contains_only_the_packages(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    generated = {name for name in files if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert files - generated == set(package_files()) | AROUND


def test_wheel_contains_only_the_packages(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == set(package_files().values())
    assert {"pytest_aorta/py.typed", "pytest_aorta/common/schemas/baseline.schema.json"} <= files


@pytest.fixture
def metadata(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_version_of_a_clone_without_tags_is_a_development_version(metadata):
    assert ".dev" in metadata["Version"]
    assert metadata["Version"] != "0.0.0"


def test_readme_and_addresses_work_in_an_index(metadata):
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", metadata.get_payload())
    paths = [link.removeprefix(f"{REPOSITORY}/{'raw' if picture else 'blob'}/HEAD/") for picture, link in links]
    addresses = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
    assert addresses.pop("Repository") == REPOSITORY
    paths += [address.removeprefix(f"{REPOSITORY}/blob/HEAD/") for address in addresses.values()]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert (len(links) > 15, metadata["Description-Content-Type"]) == (True, "text/markdown")


def test_version_comes_from_the_tag(cloned):
    git(cloned, "tag", "v1.2.3")
    try:
        assert version_in(cloned) == "1.2.3"
    finally:
        git(cloned, "tag", "-d", "v1.2.3")


def test_a_copy_without_git_has_a_version(tree):
    assert version_in(tree) == "0.2.0.dev0"


def test_development_has_a_setuptools_that_each_supported_torch_allows():
    """With torch 2.11 and 2.12, pip takes no setuptools from 82 on."""
    [pinned] = re.findall(r"^setuptools==(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert int(pinned) < 82
