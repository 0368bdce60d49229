"""Work for a peer that must not hold up the scheduler: asking it, telling it.

A prefill's address comes with a request, so what answers there may be slow, endless or
no prefill at all. `ask` bounds one question in time and size; `Background` runs calls in
daemon threads, one queue per key so that a mute peer delays its own calls only, and
refuses what is beyond its bounds instead of piling up.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple
from urllib.parse import urlencode

ANSWER_S = 2.0
MAX_ANSWER_BYTES = 1 << 16
# What the bootstrap server takes for "not one rank but the whole engine".
WHOLE_ENGINE = (-1, -1, -1, -1)
_RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class Answer(NamedTuple):
    """A bootstrap server's answer: one header's value, and its JSON object."""

    header: str | None
    body: dict[str, Any]


def ask(
    address: str, ranks: tuple[int, int, int, int] = WHOLE_ENGINE, header: str = ""
) -> Answer:
    """Ask the bootstrap server at ``host:port`` for its route to `ranks`.

    Ends within `ANSWER_S` seconds after connecting, whatever the peer sends.

    Raises:
        OSError, http.client.HTTPException: no connection, no whole answer in time.
        ValueError, RecursionError: an answer that is not a JSON object of bounded size.
    """
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    try:
        connection.connect()
        # A peer that sends a byte now and then renews every socket timeout.
        cut = threading.Timer(ANSWER_S, _hang_up, (connection.sock,))
        cut.daemon = True
        cut.start()
        try:
            query = urlencode(dict(zip(_RANKS, ranks, strict=True)))
            connection.request("GET", f"/route?{query}")
            response = connection.getresponse()
            text = response.read(MAX_ANSWER_BYTES + 1)
        finally:
            cut.cancel()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {text[:200]!r}")
        if len(text) > MAX_ANSWER_BYTES:
            raise ValueError("an answer that does not end")
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError(f"{type(body).__name__} in place of an object")
        return Answer(response.headers.get(header) if header else None, body)
    finally:
        connection.close()


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed in the meantime
        sock.shutdown(socket.SHUT_RDWR)


class Background:
    """Runs calls in daemon threads, those of one key in their order.

    Args:
        max_keys: keys that may have work at a time, one thread each.
        max_waiting: calls that may wait for one key.
    """

    def __init__(self, max_keys: int = 32, max_waiting: int = 256) -> None:
        self._max_keys = max_keys
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._queues: dict[Hashable, deque] = {}

    def submit(self, key: Hashable, call: Callable[[], Any]) -> Future | None:
        """The call's future; None when there is too much to do already."""
        future: Future = Future()
        with self._lock:
            queue = self._queues.get(key)
            if queue is not None:
                if len(queue) >= self._max_waiting:
                    return None
                queue.append((future, call))
                return future
            if len(self._queues) >= self._max_keys:
                return None
            self._queues[key] = deque([(future, call)])
        try:
            threading.Thread(
                target=self._work, args=(key,), name=f"peer-{key}", daemon=True
            ).start()
        except RuntimeError:  # no thread to be had
            with self._lock:
                del self._queues[key]
            return None
        return future

    def _work(self, key: Hashable) -> None:
        while True:
            with self._lock:
                queue = self._queues[key]
                if not queue:
                    del self._queues[key]
                    return
                future, call = queue.popleft()
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


background = Background()
