"""The folder of this package in the user's cache: worktrees and environments, each prepared once for all sessions."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import locked, write_text
from pytest_aorta.common.processes import run_program

# A compiled dependency can take an hour to build.
SETUP_S = 7200.0
UNUSED_S = 14 * 86400.0
# The folder of worktrees and environments in the user's cache; each has a folder of its own.
ENVIRONMENTS = "environments"
# Entries of such a folder besides its content: links to packages, the output of the commands that prepare it, and a
# file that exists once it is complete, and that each use touches.
PACKAGES, LOG_FILE, READY_FILE = "packages", "setup.log", "ready"
_MAX_SHOWN = 600


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this package in the user's cache."""
    given = environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "pytest-aorta"


def name_of(kind: str, *parts: object) -> str:
    """Return the name of a folder by what it is made of."""
    return f"{kind}-{sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def prepared(
    name: str, make: Callable[[Path], None], say: Callable[[str], None], problem: Callable[[], str] = str
) -> Path:
    """Return the folder of a worktree or an environment; ``make`` it unless an earlier session has.

    A folder that can't be used again, such as one whose maker was killed, is made again. Folders that no session has
    used for ``UNUSED_S`` are deleted.

    Args:
        name: Name of the folder, by its content.
        make: Makes the folder, which does not exist then.
        say: Shows a line to the user if the folder is made again.
        problem: Returns why a complete folder can't be used; empty if it can, as it always can by default.

    Raises:
        SpecError: ``make`` fails, or the folder can't be written.
    """
    own = (cache_folder() / ENVIRONMENTS).resolve() / name
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        _remove_unused(own.parent)
        with locked(own.with_suffix(".lock"), limit_s=SETUP_S):
            why = problem() if (own / READY_FILE).is_file() else "it was not finished"
            if why:
                if own.exists():
                    say(f"{own} is made again: {why}")
                _delete(own)
                make(own)
            write_text(own / READY_FILE, "")
    except OSError as error:
        raise SpecError(f"{error.filename or own}: {error.strerror or error}") from None
    return own


def _delete(folder: Path) -> None:
    """Delete a folder if it exists, also one with folders that a setup command has made read-only."""
    for base, names, _ in os.walk(folder):
        for path in (Path(base, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _remove_unused(kept: Path) -> None:
    """Delete folders that no session has used for ``UNUSED_S``; git forgets its worktrees when it next prunes."""
    oldest_s = time.time() - UNUSED_S
    for ready in kept.glob(f"*/{READY_FILE}"):
        with suppress(OSError):  # another session deletes it at the same time
            if ready.stat().st_mtime < oldest_s:
                _delete(ready.parent)


def run_logged(what: str, argv: Sequence[str], own: Path, root: Path) -> None:
    """Run a program that prepares the folder ``own``, in ``root``; its output is kept in the folder.

    Raises:
        SpecError: The program fails; the message starts with ``what``.
    """
    status, output, complaint = run_program(argv, command_environment(), SETUP_S, cwd=root)
    log_file = own / LOG_FILE
    with log_file.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(argv)}\n{output}{complaint}")
    if status:
        words = " ".join((complaint.strip() or output.strip()).split())[-_MAX_SHOWN:]
        raise SpecError(f"{what}: {Path(argv[0]).name} ended with exit code {status}: {words} ({log_file})")


def command_environment() -> dict[str, str]:
    """Return the environment of such programs, in which ``python`` and ``uv`` are those of this interpreter."""
    own = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
