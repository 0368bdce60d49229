"""File operations that survive a crash: new content first, then one rename.

Everything that changes the disk goes through this module, so that the tests can count
and interrupt each step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

TEMPORARY: Final = ".dspark-pd.tmp"


class Look(NamedTuple):
    """Owner, group and mode of a file or folder."""

    uid: int
    gid: int
    mode: int


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


def look(path: Path) -> Look:
    """Return owner, group and mode of a file or folder; links are followed."""
    status = path.stat()
    return Look(status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))


def look_of_new_file(path: Path) -> Look:
    """Return what a new file gets: what its folder has, without the right to execute.

    Neither the caller's umask nor its user counts: ``sudo dspark-pd apply`` must leave
    files that the engines' user can read.
    """
    folder = look(path.parent)
    return folder._replace(mode=folder.mode & 0o666)


def write_temporary(path: Path, data: bytes, wanted: Look | None = None) -> Path:
    """Write ``data`` beside ``path`` and flush it to the disk."""
    temporary = temporary_of(path)
    remove(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    handle = os.open(temporary, flags, 0o666)
    try:
        _write_all(handle, data)
        if wanted is not None:
            _give(handle, wanted)
        os.fsync(handle)
    except OSError as error:
        # write() on a full disk names no file; the message must.
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
    return temporary


def _give(handle: int, wanted: Look) -> None:
    """Set owner and group as far as the caller may, then the mode.

    Only root may give a file away; anybody may choose among their own groups.
    """
    status = os.fstat(handle)
    for uid, gid in ((wanted.uid, -1), (-1, wanted.gid)):
        if uid not in (-1, status.st_uid) or gid not in (-1, status.st_gid):
            with contextlib.suppress(PermissionError):
                os.fchown(handle, uid, gid)
    if stat.S_IMODE(status.st_mode) != wanted.mode:
        os.fchmod(handle, wanted.mode)


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def write(path: Path, data: bytes, wanted: Look | None = None) -> None:
    """Replace ``path`` with ``data``: readers see the old or the new content."""
    os.replace(write_temporary(path, data, wanted), path)


def make_folder(path: Path) -> None:
    """Make one folder like the one around it; it may exist."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _give(handle, look(path.parent))
    finally:
        os.close(handle)


def link(path: Path, text: str, wanted: Look) -> None:
    """Make the symbolic link ``text`` where new content of ``path`` waits."""
    temporary = temporary_of(path)
    remove(temporary)
    os.symlink(text, temporary)
    if (wanted.uid, wanted.gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.lchown(temporary, wanted.uid, wanted.gid)


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
