"""Safe opening of files that another process has left, such as a rank, and that may not be regular files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    A FIFO would wait forever for a writer, and a symbolic link could lead to any file of the user.

    Raises:
        OSError: The path can't be opened, is a symbolic link, or is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.EINVAL, "a symbolic link, not a regular file", str(path)) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return at most ``max_bytes`` from the beginning of a regular file.

    Raises:
        OSError: As in :func:`open_regular`.
    """
    with open_regular(path, follow_links=follow_links) as file:
        return file.read(max_bytes)
