"""Keeps the KV managers' control threads alive, and says so when one is not.

Life cycle: a control thread is an endless loop over messages (or over time). Its loop
function is wrapped by `survives`; the loop hands each message to `note_message` (or to
`peer_admission.admit`, which does). When the loop raises, the guard blames the message
in flight on its peer or room and enters the loop again, which by construction keeps no
state between messages. A thread that can no longer receive, or that leaves its loop for
good, is reported: the reason goes to the log and to ``/health`` (see
`control_thread_health.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from sglang.srt.disaggregation.common.control_thread_health import (
    clear_flags,
    report_dead_thread,
)
from sglang.srt.disaggregation.common.log_limits import RateLimitedLog

logger = logging.getLogger(__name__)

# A loop that fails this often in a row without receiving anything, each time within
# QUICK_S, cannot receive any more.
MAX_QUICK_FAILURES = 10
QUICK_S = 1.0

_TORN_DOWN = "its sockets are torn down"
_in_flight = threading.local()
_confined = RateLimitedLog()


def note_message(message: list[bytes] | None) -> None:
    """Remember the message this thread works on, for blame if its handling raises.

    None before each receive: an error there is nobody's fault.
    """
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
                clear_flags(manager, name)
                reason = _run_until_hopeless(manager, name, loop, blame) or reason
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}"
                raise
            finally:
                if not stopping(manager) and reason != _TORN_DOWN:
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
            if isinstance(error, zmq.ContextTerminated) or sys.is_finalizing():
                # Nothing but a teardown ends a context; some managers have no flag.
                logger.info("%s: its sockets are torn down", name)
                return _TORN_DOWN
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


@contextlib.contextmanager
def confined(what: str) -> Iterator[None]:
    """Log an error instead of ending the loop around it, for loops over many peers."""
    try:
        yield
    except Exception as error:
        _confined.record(f"An error in {what}; going on with the next", error)
