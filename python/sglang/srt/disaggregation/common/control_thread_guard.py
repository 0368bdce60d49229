"""Keeps the KV managers' control threads alive, and says so when one is not.

Life cycle: a control thread is an endless loop over messages (or over time). Its loop
function is wrapped by `survives`; the loop hands each message to `note_message` (or to
`peer_admission.admit`, which does). When the loop raises, the guard blames the message
in flight on its peer or room and enters the loop again, which by construction keeps no
state between messages. A thread that can no longer receive, or that leaves its loop for
good, is reported: the reason goes to the log and to a small file that the HTTP server's
``/health`` reads, because scheduler and HTTP server are different processes.
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# A loop that fails this often in a row without receiving anything, each time within
# QUICK_S, cannot receive any more.
MAX_QUICK_FAILURES = 10
QUICK_S = 1.0
# Log every error up to here, then one per LOG_INTERVAL_S: a peer that keeps sending
# garbage must not fill the disk.
LOGGED_IN_FULL = 20
LOG_INTERVAL_S = 10.0

_in_flight = threading.local()


def note_message(message: list[bytes] | None) -> None:
    """Remember the message this thread works on, for blame if its handling raises."""
    _in_flight.message = message


def message_in_flight() -> list[bytes] | None:
    """The message noted last by this thread since its loop was entered."""
    return getattr(_in_flight, "message", None)


def survives(
    manager: Any,
    name: str,
    blame: Callable[[Any, list[bytes], Exception], None] | None = None,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator for a control thread's loop function: errors cost a message, not it.

    Args:
        manager: the KV manager; a true ``_stopped`` ends the loop without a report.
        name: what to call the thread in messages.
        blame: called with (manager, message, error) for the message in flight. Its own
            errors are logged and dropped.
    """

    def decorate(loop: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(loop)
        def run() -> None:
            reason = "its loop ended"
            try:
                reason = _run_until_hopeless(manager, name, loop, blame) or reason
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}"
                raise
            finally:
                if not stopping(manager):
                    report_dead_thread(manager, name, reason)

        return run

    return decorate


def _run_until_hopeless(manager, name, loop, blame) -> str | None:
    quick_failures, log = 0, RateLimitedLog()
    while not stopping(manager):
        note_message(None)
        entered = time.monotonic()
        try:
            loop()
            return None
        except Exception as error:
            if stopping(manager):
                return None
            message = message_in_flight()
            log.record(f"{name}: an error in one message, thread goes on", error)
            if message is not None:
                quick_failures = 0
                _blame_safely(blame, manager, message, error)
                continue
            if time.monotonic() - entered >= QUICK_S:
                quick_failures = 0
            quick_failures += 1
            if quick_failures >= MAX_QUICK_FAILURES:
                return f"it cannot receive any more ({type(error).__name__}: {error})"
            time.sleep(min(0.01 * 2**quick_failures, 0.5))
    return None


def _blame_safely(blame, manager, message, error) -> None:
    if blame is None:
        return
    try:
        blame(manager, message, error)
    except Exception:
        logger.exception("Could not blame a message that raised %r", error)


def stopping(manager: Any) -> bool:
    """True while the manager is torn down on purpose (role switch, shutdown)."""
    shutdown = getattr(manager, "_heartbeat_shutdown", None)
    return bool(getattr(manager, "_stopped", False)) or (
        shutdown is not None and shutdown.is_set()
    )


class RateLimitedLog:
    """Logs the first errors in full, then one line per interval with a count."""

    def __init__(self) -> None:
        self._count = 0
        self._skipped = 0
        self._last = 0.0

    def record(self, text: str, error: Exception) -> None:
        """Log `text` with the error's traceback, or count it."""
        self._count += 1
        now = time.monotonic()
        if self._count <= LOGGED_IN_FULL:
            logger.error(text, exc_info=error)
        elif now - self._last >= LOG_INTERVAL_S:
            logger.error("%s: %s (%d more not shown)", text, error, self._skipped)
            self._last, self._skipped = now, 0
        else:
            self._skipped += 1


# -- health ---------------------------------------------------------------------------


def report_dead_thread(manager: Any, name: str, reason: str) -> None:
    """Log that a control thread is gone and turn this server's ``/health`` red."""
    logger.critical(
        "Control thread '%s' is dead: %s. This engine cannot serve disaggregated "
        "requests any more; restart it.",
        name,
        reason,
    )
    port = server_port(manager)
    path = _flag_path(port, os.getpid())
    try:
        with open(path, "w") as file:
            json.dump({"thread": name, "reason": reason}, file)
    except OSError:
        logger.exception("Could not write %s; /health will stay green", path)


def server_port(manager: Any) -> int:
    """HTTP port of the server a manager or bootstrap server belongs to, or 0."""
    port = getattr(getattr(manager, "server_args", None), "port", None)
    return int(port or getattr(manager, "prefill_http_port", None) or 0)


def health_failure(port: int) -> str | None:
    """Why the server on `port` must not be called healthy; None when nothing is known.

    Flags are per server port and scheduler process. Flags of processes that are gone
    are removed: a dead scheduler ends its server by other means.
    """
    for path in glob.glob(_flag_path(port, "*")):
        try:
            if os.stat(path).st_uid != os.getuid():
                continue
            if not _is_alive(int(path.rsplit("-", 1)[1].split(".")[0])):
                os.unlink(path)
                continue
            with open(path) as file:
                flag = json.load(file)
        except (OSError, ValueError):
            continue
        return f"control thread '{flag.get('thread')}' is dead: {flag.get('reason')}"
    return None


def health_response(port: int) -> Any:
    """A 503 response that says why, or None while no control thread is known dead."""
    reason = health_failure(port)
    if reason is None:
        return None
    from fastapi import Response

    return Response(status_code=503, content=reason, media_type="text/plain")


def _flag_path(port: int, pid: int | str) -> str:
    folder = tempfile.gettempdir()
    return os.path.join(folder, f"sglang-dead-control-thread-{port}-{pid}.json")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
