"""A libibverbs for Mooncake's wheel, on a machine that has none.

Mooncake's engine is linked with `libibverbs.so.1` and its wheel leaves that to the
system; the NIXL wheel brings one under a name of its own. A folder with a link of the
expected name, before the wheel's folder of libraries, serves both: the two names are
one file, which a process loads once. The loader reads its path when a process starts,
so this must be in the environment of every engine and of what engines are forked from.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SONAME = "libibverbs.so.1"
# Prints the wheel's library, unless the loader finds the system's.
_LOOK = f"""
import ctypes, glob, importlib.util as u
try:
    ctypes.CDLL("{SONAME}")
except OSError:
    for name in ("nixl_cu13", "nixl_cu12"):
        spec = u.find_spec(name)
        for folder in spec.submodule_search_locations if spec else ():
            print(*glob.glob(f"{{folder}}.libs/libibverbs-*.so*"), sep="\\n")
"""


@functools.cache
def library_folders(python: str) -> tuple[str, ...]:
    """Folders for `LD_LIBRARY_PATH` of this interpreter's engines; mostly none."""
    try:
        said = subprocess.run(
            [python, "-c", _LOOK], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()  # what is wrong with the interpreter is told where it is started
    if not said.strip():
        return ()
    library = Path(said.splitlines()[0])
    folder = Path(tempfile.mkdtemp(prefix="dspark-pd-verbs-"))
    atexit.register(_remove, folder, os.getpid())
    (folder / SONAME).symlink_to(library)
    return str(folder), str(library.parent)


def _remove(folder: Path, owner: int) -> None:
    """At exit, but not of a fork: the owner's engines still need it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
