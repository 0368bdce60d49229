"""One writer per target."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dspark_pd.messages.errors import Refused, from_os_error, refuse

_NO_FOLDER_LOCKS: Final = (errno.EBADF, errno.EINVAL, errno.EISDIR)
_LOCK_FILE: Final = ".dspark_pd.lock"


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the target for writing; refuse with F504 while another process does.

    The lock is on the folder itself: it needs no file, leaves none behind and goes with
    the process. Network file systems that lock only files get one.
    """
    try:
        handle = _open_and_lock(root)
    except BlockingIOError:
        refuse("F504", path=root)
    except OSError as error:
        raise Refused([from_os_error(error)]) from error
    try:
        yield
    finally:
        # Nothing waits for this lock, so removing its file strands nobody.
        (root / _LOCK_FILE).unlink(missing_ok=True)
        os.close(handle)


def _open_and_lock(root: Path) -> int:
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except OSError as error:
        os.close(handle)
        if error.errno not in _NO_FOLDER_LOCKS:
            raise
    handle = os.open(root / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.stat(root / _LOCK_FILE)):
            raise BlockingIOError("the file was replaced by another writer")
    except OSError:
        os.close(handle)
        raise
    return handle
