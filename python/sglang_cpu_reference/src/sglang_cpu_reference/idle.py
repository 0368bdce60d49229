"""A pause for processes that have nothing to run.

A fully idle scheduler sleeps in SGLang's own idle sleeper, which the platform
turns on. One that only waits (for a KV transfer, a bootstrap, a storage read)
is polled in a loop, and so is the process that shares out requests between the
ranks of attention DP; on a shared CPU such a loop starves the very process it is
waiting for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

REST_SECONDS = 0.001
# Of one look for a request; the controller's watchdog is fed after each.
LOOK_MS = 500


def rest_after_idle_pass(result: object, scheduler: object) -> None:
    """Hook after ``Scheduler.on_idle``: give the core away for a moment."""
    del result, scheduler
    time.sleep(REST_SECONDS)


class PatientSocket:
    """A socket whose look for a message takes a while, and ends when one comes."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket

    def recv(self, flags: int = 0) -> Any:
        self._socket.poll(LOOK_MS)
        return self._socket.recv(flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        self._socket.poll(LOOK_MS)
        return self._socket.recv_pyobj(flags)


def listen_patiently(original: Callable[[Any], None], controller: Any) -> None:
    """Around ``DataParallelController.event_loop``, which asks without a pause."""
    controller.recv_from_tokenizer = PatientSocket(controller.recv_from_tokenizer)
    original(controller)
