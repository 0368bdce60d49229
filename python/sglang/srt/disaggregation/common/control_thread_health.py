"""How ``/health`` learns that a control thread is dead.

Scheduler and HTTP server are different processes, so the reason travels in a small
file: one per dead thread, named by the server's port and the identity of the process
(its id and when it started, because ids are used again). A flag whose process is gone
says nothing and is removed: a dead scheduler ends its server by other means.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import stat
import tempfile
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_PREFIX = "sglang-dead-control-thread"
_MAX_FLAG_BYTES = 4096
_REMAINS = ("Z", "X", "x")  # states of a process that ended and was not reaped
_MAX_REASON = 1024
# A flag of a process that could not learn its server's port.
_NO_PORT = 0


class Process(NamedTuple):
    """A process on this machine; `start` tells it from a later one of the same id."""

    pid: int
    start: int
    parent: int


def report_dead_thread(manager: Any, name: str, reason: str) -> None:
    """Log that a control thread is gone and turn this server's ``/health`` red."""
    logger.critical(
        "Control thread '%s' is dead: %s. This engine cannot serve disaggregated "
        "requests any more; restart it.",
        name,
        reason,
    )
    path = flag_path(server_port(manager), find_process(os.getpid()), name)
    try:
        _write(path, {"thread": name, "reason": str(reason)[:_MAX_REASON]})
    except OSError:
        logger.exception("Could not write %s; /health will stay green", path)


def clear_flags(manager: Any, name: str) -> None:
    """Forget that this process's thread `name` was dead, and all processes that are gone.

    For a thread that starts: an engine may change its role without a new process.
    """
    own = flag_path(server_port(manager), find_process(os.getpid()), name)
    # Nothing here raises: a thread must not end because of an old file.
    for path in glob.glob(os.path.join(flag_folder(), f"{_PREFIX}-*.json")):
        if path == own or not _is_of_living(path):
            _remove(path)


def server_port(manager: Any) -> int:
    """HTTP port of the server a manager or bootstrap server belongs to, or 0."""
    port = getattr(getattr(manager, "server_args", None), "port", None)
    return int(
        port or getattr(manager, "prefill_http_port", None) or _serving_port() or 0
    )


def _serving_port() -> int | None:
    """The port of this process's serving arguments, if they are there by now."""
    try:
        from sglang.srt.runtime_context import get_serving

        return get_serving().port
    except Exception:  # releases without it, or nothing published in this process
        return None


def health_failure(port: int) -> str | None:
    """Why the server on `port` must not be called healthy; None when nothing is known."""
    for path in glob.glob(os.path.join(flag_folder(), f"{_PREFIX}-*.json")):
        flagged, pid, _ = _owner(path)
        if flagged not in (port, _NO_PORT):
            continue
        if not _is_of_living(path):
            _remove(path)
        elif flagged == port or _belongs_to_this_server(find_process(pid)):
            flag = _read(path)
            if flag is not None:
                return f"control thread '{flag.get('thread')}' is dead: {flag.get('reason')}"
    return None


def health_response(port: int) -> Any:
    """A 503 response that says why, or None while no control thread is known dead."""
    reason = health_failure(port)
    if reason is None:
        return None
    from fastapi import Response

    return Response(status_code=503, content=reason, media_type="text/plain")


def _belongs_to_this_server(process: Process | None) -> bool:
    """This process, a child of it (a scheduler), or its parent (which has workers)."""
    if process is None:
        return False
    return process.pid in (os.getpid(), os.getppid()) or process.parent == os.getpid()


# -- files ----------------------------------------------------------------------------


def flag_folder() -> str:
    return tempfile.gettempdir()


def flag_path(port: int, process: Process | None, name: str) -> str:
    """Path of the flag of one thread."""
    pid, start = (process.pid, process.start) if process else (os.getpid(), 0)
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return os.path.join(flag_folder(), f"{_PREFIX}-{port}-{pid}-{start}-{slug}.json")


def _owner(path: str) -> tuple[int, int, int]:
    """(port, process id, start) of a flag; (-1, -1, -1) for a file that is none."""
    pattern = rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-\w*\.json"
    found = re.fullmatch(pattern, os.path.basename(path), re.ASCII)
    return tuple(int(part) for part in found.groups()) if found else (-1, -1, -1)


def _is_of_living(path: str) -> bool:
    _, pid, start = _owner(path)
    process = find_process(pid)
    return process is not None and process.start == start


def _write(path: str, flag: dict[str, str]) -> None:
    """A file of our own under a name of its own, then renamed: never through a link."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".sglang-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(flag, file)
        os.replace(temporary, path)
    except OSError:
        _remove(temporary)
        raise


def _read(path: str) -> dict[str, Any] | None:
    """A flag that this user wrote; None for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle) as file:
            status = os.fstat(handle)
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                return None
            flag = json.loads(file.read(_MAX_FLAG_BYTES))
    except (OSError, ValueError):
        return None
    return flag if isinstance(flag, dict) else None


def _remove(path: str) -> None:
    try:
        if os.lstat(path).st_uid == os.getuid():
            os.unlink(path)
    except OSError as error:
        logger.debug("Could not remove %s: %s", path, error)


def find_process(pid: int) -> Process | None:
    """The process with this id; None when there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The second field is the program's name, which may hold anything.
            fields = file.read().rpartition(")")[2].split()
        if fields[0] in _REMAINS:
            return None
        return Process(pid, int(fields[19]), int(fields[1]))
    except (OSError, IndexError, ValueError):
        return None if os.path.exists("/proc/self/stat") else _ask_psutil(pid)


def _ask_psutil(pid: int) -> Process | None:
    """For systems without ``/proc``."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return Process(pid, int(process.create_time()), process.ppid())
    except psutil.Error:
        return None
