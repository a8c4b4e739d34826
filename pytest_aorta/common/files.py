"""Strict reading of files that a person or another process has written, atomic writing, and folders of files."""

import errno
import fcntl
import gc
import glob
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.processes import uninterrupted

# What a number that is larger than any float contains, in text that json.loads accepts.
_HUGE = re.compile(r"[eE]\+?0*[0-9]{3}|[0-9]{300}")


class UnreadableFile(AortaError):
    """A file can't be read or does not have the expected format; the message names the file and the reason."""


# A class, since a generator would show frames of contextlib in the tracebacks of tests.
class raised_as:
    """Context that raises an error ``of`` some type, or of an unreadable file, as one of another ``kind``.

    Its message is the reason between ``before`` and ``after``.
    """

    def __init__(
        self,
        kind: type[BaseException],
        before: str = "",
        of: type[Exception] | tuple[type[Exception], ...] = OSError,
        after: str = "",
    ) -> None:
        self._kind, self._before, self._after = kind, before, after
        own: tuple[type[Exception], ...] = (UnreadableFile,)
        self._caught = (*own, of) if isinstance(of, type) else (*own, *of)

    def __enter__(self) -> None:
        """Enter the body."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Raise an error of the other kind if the body has raised one of these types."""
        __tracebackhide__ = True
        if isinstance(error, self._caught):
            reason = getattr(error, "strerror", None) or error
            raise self._kind(f"{self._before}{reason}{self._after}") from None


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage while the body imports modules or reads a large document.

    Neither is garbage, and the collector would visit all of torch's objects again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_bytes(path: Path, *, max_bytes: int, follow_links: bool = False) -> bytes:
    """Return the content of a regular file, of at most ``max_bytes`` bytes, that another process may have left.

    Raises:
        UnreadableFile: The file is absent, is not a regular file, is a symbolic link without ``follow_links``, can't be
            read, or is too large.
    """
    with raised_as(UnreadableFile, f"{path}: can't be read: ", (OSError, ValueError)):
        content = read_regular(path, max_bytes + 1, follow_links=follow_links)
    if len(content) > max_bytes:
        raise UnreadableFile(f"{path}: larger than the {max_bytes:,} bytes allowed")
    return content


def read_json(path: Path, *, max_bytes: int) -> Any:
    """Parse one strict JSON document: UTF-8, no repeated key, every number finite, at most ``max_bytes``.

    Raises:
        UnreadableFile: The file is absent, not a regular file, too large, truncated or not strict JSON.
    """
    return parse_json(read_text(path, max_bytes=max_bytes), str(path))


def parse_json(text: str, name: str) -> Any:
    """Parse text as :func:`read_json` parses a file; ``name`` is the source that an error message names.

    Raises:
        UnreadableFile: The text is not strict JSON.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_finite)
        if _HUGE.search(text):
            # Parse again: a function that is called on every number would take most of the time.
            json.loads(text, parse_float=_finite, parse_int=_finite)
        return document
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{name}: not valid JSON: {conflict(text) or error}") from None


def read_text(path: Path, *, max_bytes: int) -> str:
    """Return the text of a regular file of at most ``max_bytes`` bytes; the path may be a symbolic link to one.

    Raises:
        UnreadableFile: As in :func:`read_bytes`, or the file is empty or not UTF-8.
    """
    return decoded(read_bytes(path, max_bytes=max_bytes, follow_links=True), str(path))


def decoded(content: bytes | str, name: str) -> str:
    """Return the text of a document that is not empty; ``name`` is the source that an error message names.

    Raises:
        UnreadableFile: The content is empty or not UTF-8.
    """
    if not content.strip():
        raise UnreadableFile(f"{name}: empty")
    with raised_as(UnreadableFile, f"{name}: not UTF-8: ", UnicodeDecodeError):
        return content if isinstance(content, str) else content.decode("utf-8")


def conflict(text: str) -> str:
    """Return where a merge has left git's conflict markers and what to do, or an empty text."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines, 1) if line.startswith("<<<<<<< ")), None)
    if begin is None or not any(line.startswith(">>>>>>> ") for line in lines):
        return ""
    return f"conflict markers of git from line {begin} on; keep one side, by git checkout --ours or --theirs"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as ``object_pairs_hook``; raise ValueError if a key is given twice."""
    document = dict(pairs)
    if len(document) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {next(key for key, count in counts.items() if count > 1)!r} is given twice")
    return document


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def open_regular(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    A FIFO would wait forever for a writer, and a symbolic link could lead to any file of the user.

    Raises:
        OSError: The path can't be opened, is a symbolic link, or is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        # A folder is refused by open itself.
        file = open(path, "rb", opener=lambda name, _flags: os.open(name, flags))  # noqa: SIM115 - returned
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.EINVAL, "a symbolic link, not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return at most ``max_bytes`` from the beginning of a regular file.

    Raises:
        OSError: As in :func:`open_regular`.
    """
    with open_regular(path, follow_links=follow_links) as file:
        return file.read(max_bytes)


# The package's folder, computed only here: programs are started from it, and versions compared by its files.
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
# Suffix of files that are being written; a file older than ABANDONED_S was left by a killed writer.
SCRATCH_SUFFIX = ".tmp"
ABANDONED_S = 3600.0
_STANDARD_LIBRARY = Path(os.__file__).resolve().parent
_LOCK_POLL_S = 0.02
_LOCK_FILE = "lock"
_INSTALLED = {"site-packages", "dist-packages"}


def write_json(path: Path, document: Any, *, durable: bool = True) -> None:
    """Write ``document`` in the way of :func:`write_bytes`, with sorted keys and indentation.

    Raises:
        ValueError: A number is NaN or infinite.
        OSError: The file can't be written.
    """
    write_text(path, json.dumps(document, allow_nan=False, indent=2, sort_keys=True) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write ``text`` as UTF-8, in the way of :func:`write_bytes`."""
    # A test's id or output can hold surrogates, which UTF-8 can't encode.
    write_bytes(path, text.encode("utf-8", "backslashreplace"), durable=durable)


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write ``data`` atomically: a reader gets the old file or the whole new file, even if the writer dies.

    Args:
        path: The file to replace.
        data: The file's new content.
        durable: Whether the content must also survive a loss of power, for which the call waits for the disk. Pass
            False for files of a launch that pytest reads at the launch's end: the ranks of a host share its disk.

    Raises:
        OSError: The file can't be written; the old file remains.
    """
    if durable:
        remove_scratch(path.parent, _scratch_prefix(path), ABANDONED_S)
    # The kernel applies the umask, which a process can read only by changing it for a moment, for all of its threads.
    with _replacing(path) as scratch, scratch.open("xb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def write_link(path: Path, target: Path) -> None:
    """Make ``path`` a symbolic link to ``target`` atomically: another process follows the old link or the new one.

    Raises:
        OSError: The link can't be written; an old link remains.
    """
    with _replacing(path) as scratch:
        scratch.symlink_to(target)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path that no other writer uses; what the body puts there replaces ``path``, unless the body fails."""
    scratch = path.parent / f"{_scratch_prefix(path)}{os.urandom(8).hex()}{SCRATCH_SUFFIX}"
    try:
        yield scratch
        scratch.replace(path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def _scratch_prefix(path: Path) -> str:
    return f".{path.name[:40]}."


def create_numbered_folder(base: Path, name: str) -> Path:
    """Create the folder ``<number>-<name>`` in ``base`` with the lowest number from 01 on whose folder is not there.

    No folder is returned twice, even to processes that call at the same time, such as workers of
    ``pytest -n2 --dist=each``, which run one test in one results folder.

    Raises:
        OSError: A folder can't be created, or all numbers up to 99,999 are taken.
    """
    base.mkdir(parents=True, exist_ok=True)
    for number in range(1, 100_000):
        folder = base / f"{number:02d}-{name}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise OSError(f"it has 99,999 folders named *-{name}; empty it")


def remove_scratch(folder: Path, prefix: str = ".", age_s: float = 0.0) -> None:
    """Delete unfinished files that killed writers have left.

    Args:
        folder: The folder that the writers wrote to.
        prefix: The beginning of the files' names.
        age_s: Smallest age of a file to delete, in seconds; 0 only if no writer can be alive.
    """
    limit_s = time.time() - age_s
    for path in folder.glob(f"{glob.escape(prefix)}*{SCRATCH_SUFFIX}"):
        with suppress(OSError):
            if not path.is_symlink() and path.is_file() and path.stat().st_mtime <= limit_s:
                path.unlink()


@contextmanager
def locked(path: Path, *, limit_s: float = 60.0) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``, which exists only while a process holds or awaits the lock.

    The kernel releases the lock of a process that ends, once the programs have ended that the body has run.

    Raises:
        OSError: The file can't be created, or another process has held the lock for ``limit_s`` seconds.
    """
    deadline_s = time.monotonic() + limit_s
    handle: int | None = None
    try:
        while handle is None:
            # A lock that an interruption left held would block this process's own cleanup.
            with uninterrupted():
                handle = acquired(path)
            if handle is None:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"another process has held {path} for {limit_s:g} s; end it, then try again")
                time.sleep(_LOCK_POLL_S)
        os.set_inheritable(handle, True)
        yield
    finally:
        if handle is not None:
            with uninterrupted():
                # Remove the file before releasing its lock, while no other process can hold the lock.
                path.unlink(missing_ok=True)
                os.close(handle)


def acquired(path: Path, mode: int = fcntl.LOCK_EX, permissions: int = 0o666) -> int | None:
    """Return the open file of a lock that this call has acquired, or None if another process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, permissions)
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
        # A former holder, or a cleaner of /tmp, may have removed the file after this call opened it.
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder, and remove those of this user with this ``prefix`` that killed processes have left."""
    oldest_s = time.time() - ABANDONED_S  # a younger folder may not be locked yet
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            about = left.lstat()
            is_old = about.st_uid == os.getuid() and about.st_mtime < oldest_s and stat.S_ISDIR(about.st_mode)
            if is_old and (handle := acquired(left / _LOCK_FILE)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
    # The kernel releases the lock when this process ends.
    with tempfile.TemporaryDirectory(prefix=prefix) as name, (Path(name) / _LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield Path(name)


def slug(text: str, *, max_length: int = 80) -> str:
    """Return a file name for any text: readable, without folders, and distinct even where case is ignored."""
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:max_length].strip("-")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{readable}-{digest}" if readable else digest


def is_source_of(checkout: Path, path: Path) -> bool:
    """Return whether ``path`` belongs to the checkout itself, not to an environment installed inside the checkout."""
    path = path.resolve()
    if not path.is_relative_to(checkout) or path.is_relative_to(_STANDARD_LIBRARY):
        return False
    return not _INSTALLED & set(path.relative_to(checkout).parts)
