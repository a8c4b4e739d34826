"""``aorta init``: writes a test, pytest's settings and ``.gitignore``, so that a script can be tested at once."""

from __future__ import annotations

import argparse
import configparser
import re
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.common.documents import read_regular
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.files import write_text
from pytest_aorta.common.text import did_you_mean, emit
from pytest_aorta.plan.accelerators import visible_devices

# Folders that runs write to; baselines are committed.
_IGNORED = ("results/",)
_MAX_IGNORED_BYTES = 1 << 20
_INI = """\
[pytest]
# Ranks are forked from a process that has torch imported, which saves seconds in each launch.
aorta_launcher = forkserver
# Plan, logs and result of each launch.
aorta_results = results
# A test whose marker names a metric fails if the launches do not decide it.
aorta_fail_on = missing,marked-inconclusive
"""
_BUILT_IN_TEST = '''\
"""Trains a small Llama under FSDP2 and compares it with the baseline."""

import pytest


{markers}
def test_training(workload):
    result = workload.run("llama_fsdp2", size="debug", steps=10)
    workload.check(result)
'''
_SCRIPT_TEST = '''\
"""Runs {shown} and compares it with the baseline."""

import pytest


{markers}
def test_{name}(workload):
    result = workload.run_script({measured!r}{arguments})
{note}    workload.check(result)
'''
_MEASURED = '''\
"""Runs {what} unchanged and records its steps, from one step of the optimizer to the next."""

import runpy
import sys
from pathlib import Path

from pytest_aorta.worker import record_optimizer_steps

{before}

{note}record_optimizer_steps(warmup=3, hash_weights={hash_weights})
{started}
'''
_OF_SCRIPT = {
    "what": "{shown}",
    "before": "SCRIPT = Path(__file__).with_name({script.name!r})",
    "started": 'sys.argv[0] = str(SCRIPT)\nrunpy.run_path(str(SCRIPT), run_name="__main__")',
}
_OF_MODULE = {
    "what": "the module {module}",
    "before": "# The package of this folder comes before an installed one.\n"
    "sys.path.insert(0, str(Path(__file__).parent / {top!r}))",
    "started": 'runpy.run_module({module!r}, run_name="__main__", alter_sys=True)',
}
# Files with settings of pytest, in its order -> their section; None: the whole file.
_SETTINGS = {
    **dict.fromkeys(("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini")),
    "pyproject.toml": "pytest",
    "tox.ini": "pytest",
    "setup.cfg": "tool:pytest",
}
# Folders that contain packages, from the root.
_TOPS = (".", "src")
# The lanes of docs/ci.md: bits are compared on any machine, times only on GPUs.
_CPU_MARKERS = ("numerics", "world(size=2)")
_GPU_MARKERS = ("overlap", "world(size=2)")
_STEP_TIMES = 'tolerance(step_time_p50="5%")'
# Weights are reproducible only if the script makes both calls.
_DETERMINISTIC = {
    r"\bmanual_seed\(": "manual_seed(SEED)",
    r"\buse_deterministic_algorithms\(": "use_deterministic_algorithms(True)",
}
_USES_RECORDER = r"\brecorder\.step\("
_RECORDS_WEIGHTS = r"\brecorder\.weights\("
_WIDTH = 100


@dataclass(frozen=True)
class _NewFile:
    path: Path
    text: str
    # A line about what the file lacks.
    note: str = ""


@dataclass(frozen=True)
class _Module:
    """A module of a package; ``top`` is the folder that contains the package, from the root."""

    name: str
    top: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.usage = "aorta init [SCRIPT] [-- ARG ...]"
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="training script (.py) or dotted module to test")
    parser.add_argument("args", nargs="*", metavar="ARG", help="arguments of the script in the test, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files and lines that do not exist yet, and print what was written.

    Raises:
        UsageError: The script does not exist in this folder.
        AortaError: A file can't be written, or a driver does not list the GPUs; then nothing was written.
    """
    root = Path.cwd()
    settings, ignored = _settings_of_pytest(root), _ignored(root)
    files = _files(root, arguments.script, arguments.args)
    notes = [f"note: {file.note}" for file in files if file.note and not file.path.exists()]
    emit(_written(root, file) for file in files)
    emit([_write_settings(root, settings), _write_ignored(root, ignored)])
    emit([*notes, "next: record the baseline with pytest --update-baselines, and commit baselines/"])
    return ExitCode.OK


def _files(root: Path, script: str | None, args: Sequence[str]) -> list[_NewFile]:
    tests = root / "tests" if (root / "tests").is_dir() else root
    if script is None:
        return [_NewFile(tests / "test_training.py", _BUILT_IN_TEST.format(markers=_markers()))]
    relative = _find(root, script).relative_to(root.resolve())
    source = (root / relative).read_text(encoding="utf-8", errors="replace")
    module = _module(root, relative)
    measured, note, files = module.name if module else str(relative), "", []
    if re.search(_USES_RECORDER, source):
        if not re.search(_RECORDS_WEIGHTS, source):
            note = f"weights are not compared, because {relative} does not call recorder.weights(model); add this"
    else:
        # The folder of a script is on the path of its ranks, where modules of a package would hide others.
        path = Path(f"{relative.stem}_measured.py") if module else relative.with_name(f"{relative.stem}_measured.py")
        measured, files = str(path), [_measured(root, path, relative, module, source)]
    name = re.sub(r"\W", "_", relative.stem)
    arguments = f", {list(args)!r}" if args else ""
    values = {"shown": _in_docstring(relative), "name": name, "measured": measured, "arguments": arguments}
    text = _SCRIPT_TEST.format(**values, markers=_markers(_STEP_TIMES), note=_comment(note, "    "))
    return [*files, _NewFile(tests / f"test_{name}.py", text, note)]


def _find(root: Path, given: str) -> Path:
    """Return the absolute path of a script, given as a path or as a dotted module.

    Raises:
        UsageError: There is no such file in ``root`` or below it.
    """
    path = (root / given).resolve()
    if path.suffix == ".py" and not path.exists():
        similar = did_you_mean([path.name], sorted(found.name for found in path.parent.glob("*.py")))
        raise UsageError(f"script {given!r}: there is no file {path}{similar}")
    allowed = "allowed is a script ending in .py, or a module, in this folder or below it"
    if "." in given.strip(".") and not path.exists() and all(part.isidentifier() for part in given.split(".")):
        file = f"{given.replace('.', '/')}.py"
        found = [place for top in _TOPS if (place := (root / top / file).resolve()).is_file()]
        if not found:
            raise UsageError(f"module {given!r}: there is no file {file}, also not below src; {allowed}")
        path = found[0]
    if path.suffix != ".py" or not path.is_file() or not path.is_relative_to(root.resolve()):
        raise UsageError(f"SCRIPT: got {given!r}, {allowed}")
    return path


def _module(root: Path, script: Path) -> _Module | None:
    """Return the module that a script below ``root`` is; None for a script outside of packages."""
    top = script.parent
    while top != Path() and (root / top / "__init__.py").is_file():
        top = top.parent
    parts = script.relative_to(top).with_suffix("").parts
    is_module = len(parts) > 1 and all(part.isidentifier() for part in parts)
    return _Module(".".join(parts), str(top)) if is_module else None


def _markers(*of_times: str) -> str:
    """Return the lines of a test's markers; ``of_times`` are needed where step times are compared, on GPUs."""
    names = (*_GPU_MARKERS, *of_times) if visible_devices() else _CPU_MARKERS
    return "\n".join(f"@pytest.mark.{name}" for name in names)


def _measured(root: Path, measured: Path, script: Path, module: _Module | None, source: str) -> _NewFile:
    """Return the script that records another script's steps, and the weights if the other script is deterministic."""
    absent = [call for pattern, call in _DETERMINISTIC.items() if not re.search(pattern, source)]
    note = (
        f"weights are not compared, because {script} does not call torch's {' and '.join(absent)}; "
        f"add this, then set hash_weights=True in {measured}"
        if absent
        else ""
    )
    own = {"script": script, "shown": _in_docstring(script)}
    named = {"module": module.name, "top": module.top} if module else own
    parts = {key: text.format(**named) for key, text in (_OF_MODULE if module else _OF_SCRIPT).items()}
    text = _MEASURED.format(**parts, hash_weights=not absent, note=_comment(note))
    return _NewFile(root / measured, text, note)


def _in_docstring(name: Path) -> str:
    """Return a file's name as a docstring can contain it."""
    return repr(str(name))[1:-1].replace('"', r"\"")


def _comment(note: str, indent: str = "") -> str:
    """Return a note as a comment of one or more lines."""
    lines = textwrap.wrap(
        note[:1].upper() + note[1:], _WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{indent}# {line}\n" for line in lines)


def _written(root: Path, file: _NewFile) -> str:
    """Write a file that does not exist, and return a line about it."""
    name = file.path.relative_to(root)
    try:
        with file.path.open("x", encoding="utf-8") as new:
            new.write(file.text)
    except FileExistsError:
        return f"kept {name}, which exists"
    except OSError as error:
        raise AortaError(f"{name}: can't be written: {error.strerror or error}") from None
    return f"wrote {name}"


def _settings_of_pytest(root: Path) -> Path | None:
    """Return the file of this folder in which pytest finds its settings, or None."""
    named = (path for name in _SETTINGS if (path := root / name).is_file())
    return next((path for path in named if _has_settings(path, _SETTINGS[path.name])), None)


def _has_settings(path: Path, section: str | None) -> bool:
    if section is None:
        return True
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return section in tomllib.loads(text).get("tool", {})
        parser.read_string(text)
    except (configparser.Error, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AortaError(f"{path.name}: can't be read: {error}") from None
    return parser.has_section(section)


def _write_settings(root: Path, found: Path | None) -> str:
    if found is None:
        return _written(root, _NewFile(root / "pytest.ini", _INI))
    # TOML has no text without quotes.
    launcher, folder = ('"forkserver"', '"results"') if found.suffix == ".toml" else ("forkserver", "results")
    return (
        f"kept {found.name}, which has settings of pytest; add aorta_launcher = {launcher} there to start ranks "
        f"faster, and aorta_results = {folder} to keep logs and results"
    )


def _ignored(root: Path) -> str | None:
    """Return the text of ``.gitignore``, or None.

    Raises:
        AortaError: ``.gitignore`` is not a regular file, or can't be read.
    """
    try:
        return read_regular(root / ".gitignore", _MAX_IGNORED_BYTES).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AortaError(f".gitignore: can't be read: {reason}; put a text file there, or remove it") from None


def _write_ignored(root: Path, there: str | None) -> str:
    """Append the output folders of runs to ``.gitignore``, whose text is ``there``."""
    text = there or ""
    missing = [name for name in _IGNORED if name not in text.splitlines()]
    if not missing:
        return "kept .gitignore, which has results/"
    begin = "" if not text or text.endswith("\n") else "\n"
    try:
        write_text(root / ".gitignore", text + begin + "".join(f"{name}\n" for name in missing))
    except OSError as error:
        raise AortaError(f".gitignore: can't be written: {error.strerror or error}") from None
    return f"{'wrote' if there is None else 'added to'} .gitignore: {', '.join(missing)}"
