"""Keeps a KV manager's control threads running, and ends the engine when one dies.

Life cycle: a control thread is an endless loop over messages (or over time) whose
function is wrapped by `survives`. Loops over messages receive from a `GuardedSocket`,
which shows each message to the manager's `MessageHandler` and remembers it as the one
in flight. When the loop raises, the handler is told which message did it, and the loop,
which keeps no state between messages, is entered again. A thread that can no longer
receive, or leaves its loop for good, ends the engine: an engine that never answers its
peers is worse than one whose port refuses connections.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.runtime_context import get_disagg

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVManager

logger = logging.getLogger(__name__)

# A loop that fails this often in a row without a message, each time within QUICK_S,
# cannot receive any more.
MAX_QUICK_FAILURES = 10
QUICK_S = 1.0
PAUSE_S = 0.1

# Lines about one subject: this many, then one per interval.
LOGGED_IN_FULL = 20
LOG_INTERVAL_S = 10.0

_in_flight = threading.local()
_lines: dict[str, tuple[int, float]] = {}  # subject -> (lines, time of the last one)
_said: set[str] = set()


class MessageHandler(Protocol):
    """What a manager does with its peers' messages around SGLang's own handling."""

    def admits(self, message: list[bytes]) -> bool:
        """True when SGLang is to work on `message`; may take frames off it."""

    def on_error(self, message: list[bytes], error: Exception) -> None:
        """Fail the room, or undo the registration, whose message raised."""


class GuardedSocket(zmq.Socket):
    """A manager's PULL socket, from which one control thread receives."""

    # Declared, because pyzmq takes any other attribute for a socket option.
    manager: CommonKVManager
    handler: MessageHandler

    @classmethod
    def guard(cls, manager: CommonKVManager, handler: MessageHandler) -> None:
        """Turn the manager's socket into a guarded one.

        The object stays the same, so that pollers, its context and its closing know it:
        the helper that makes it does not take a class.
        """
        socket = manager.server_socket
        socket.__class__ = cls
        socket.manager, socket.handler = manager, handler

    def recv_multipart(self, *args, **kwargs) -> list[bytes]:
        """The next message that the handler admits.

        Raises:
            zmq.Again: the manager is torn down while others are waited for.
        """
        _in_flight.message = None
        message = super().recv_multipart(*args, **kwargs)
        while not self._admits(message):
            # Whoever polled for the message above must not be blocked here for good.
            while not self.poll(500):
                if stopping(self.manager):
                    raise zmq.Again
            message = super().recv_multipart(*args, **kwargs)
        return message

    def _admits(self, message: list[bytes]) -> bool:
        _in_flight.message, _in_flight.handler = message, self.handler
        admitted = self.handler.admits(message)
        if not admitted:
            _in_flight.message = None
        return admitted


def survives(
    manager: CommonKVManager,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator for a control thread's loop: an error costs a message, not the thread."""

    def decorate(loop: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(loop)
        def run() -> None:
            try:
                reason = _run_with_restarts(manager, loop)
            except BaseException as error:  # an exit, which is no error of a message
                reason = f"{type(error).__name__}: {error}"
            if reason is not None:
                end_engine(f"Control thread '{loop.__name__}' is dead: {reason}")

        return run

    return decorate


def one_at_a_time(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate SGLang's change of a room's status, which several threads ask for.

    It reads the old status and writes the new one in two steps. Of two threads, the
    second to write undid what the first had written: a request that was opened at the
    moment its metadata arrived waited for that metadata until its timeout.
    """
    lock = threading.RLock()

    @functools.wraps(method)
    def run(manager: CommonKVManager, bootstrap_room: int, status: KVPoll) -> None:
        # A deferred room that fails is announced to decode, which can block the sender.
        waits = getattr(manager, "deferred_bootstrap", None) is not None
        with contextlib.nullcontext() if waits and status == KVPoll.Failed else lock:
            method(manager, bootstrap_room, status)

    return run


def _run_with_restarts(
    manager: CommonKVManager, loop: Callable[[], None]
) -> str | None:
    """Enter `loop` until it cannot go on; why it cannot, or None for a teardown."""
    quick_failures = 0
    while not stopping(manager):
        _in_flight.message = None
        entered = time.monotonic()
        try:
            loop()
            return None if stopping(manager) else "its loop ended"
        except Exception as error:
            # Only a teardown ends a context; some managers have no flag for it.
            torn_down = isinstance(error, zmq.ContextTerminated) or sys.is_finalizing()
            if torn_down or stopping(manager):
                return None
            if should_log(loop.__name__):
                text = "Error in control thread '%s'; the thread keeps running"
                logger.error(text, loop.__name__, exc_info=error)
            if _in_flight.message is not None:
                quick_failures = 0
                _hand_to_handler(error)
                continue
            is_quick = time.monotonic() - entered < QUICK_S
            quick_failures = quick_failures + 1 if is_quick else 0
            if quick_failures >= MAX_QUICK_FAILURES:
                return f"it cannot receive any more ({type(error).__name__}: {error})"
            time.sleep(PAUSE_S)
    return None


def _hand_to_handler(error: Exception) -> None:
    try:
        _in_flight.handler.on_error(_in_flight.message, error)
    except Exception:
        logger.exception("Could not handle a message that raised %r", error)


def stopping(manager: CommonKVManager) -> bool:
    """True while the manager is torn down on purpose, as for a switch of its role."""
    shutdown = getattr(manager, "_heartbeat_shutdown", None)
    return bool(getattr(manager, "_stopped", False)) or (
        shutdown is not None and shutdown.is_set()
    )


def end_engine(reason: str, *, in_front_end: bool = False) -> None:
    """Log why this engine cannot go on, and end it as SGLang does for a dead scheduler.

    Args:
        in_front_end: this process is the engine's front end, which ends all others when
            it gets the signal. By default it is a scheduler, whose parent does, and
            which ends at once: the front end waits a minute for dumps of a living one.
    """
    logger.critical(
        "%s. This engine exits because it cannot serve its peers; start it again.",
        reason,
    )
    if in_front_end:
        os.kill(os.getpid(), signal.SIGQUIT)
    else:
        os.kill(os.getppid(), signal.SIGQUIT)
        os._exit(1)


def end_without_bootstrap_server(error: Exception) -> None:
    """End a prefill whose bootstrap server is dead, from the front end that runs it.

    A decode has such a server for a later switch of its role only
    (``--enable-pd-role-switch``), and serves without it.
    """
    if get_disagg().disaggregation_mode != "decode":
        end_engine(f"The bootstrap server is dead: {error}", in_front_end=True)


def should_log(subject: str, in_full: int = LOGGED_IN_FULL) -> bool:
    """Whether one more line about `subject` is worth its place in the log.

    True for the first `in_full` lines, then once per LOG_INTERVAL_S.
    """
    count, last = _lines.get(subject, (0, 0.0))
    now = time.monotonic()
    if count >= in_full and now - last < LOG_INTERVAL_S:
        return False
    _lines[subject] = (count + 1, now)
    return True


def log_once(log: Callable[[str], None], text: str) -> None:
    """Pass `text` to `log`, a logger's method, unless this process logged it before."""
    if text not in _said:
        _said.add(text)
        log(text)
