"""File operations that survive a crash: new content first, then one rename.

Everything that changes the disk goes through this module, so that the tests can count
and interrupt each step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

TEMPORARY: Final = ".dspark-pd.tmp"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_or_none(path: Path) -> bytes | None:
    """Return the content of ``path``; None if there is no file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def temporary_of(path: Path) -> Path:
    """Return the name under which new content of ``path`` waits for its rename.

    It is fixed, so that what a killed run left behind is found and overwritten.
    """
    return path.with_name(f".{path.name}{TEMPORARY}")


def write_temporary(path: Path, data: bytes, mode: int | None = None) -> Path:
    """Write ``data`` beside ``path`` and flush it to the disk."""
    temporary = temporary_of(path)
    remove(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    handle = os.open(temporary, flags, 0o666)
    try:
        _write_all(handle, data)
        if mode is not None:
            os.fchmod(handle, mode)
        os.fsync(handle)
    except OSError as error:
        # write() on a full disk names no file; the message must.
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
    return temporary


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def write(path: Path, data: bytes) -> None:
    """Replace ``path`` with ``data``: readers see the old or the new content."""
    os.replace(write_temporary(path, data), path)


def make_folder(path: Path) -> None:
    """Make one folder; it may exist."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_empty_folder(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)


def flush_folders(folders: Iterable[Path]) -> None:
    """Make renames durable; file systems that cannot flush a folder are left alone."""
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
