"""Tells a prefill that decode refuses it, so that it does not hold the requests.

Life cycle: a refusal is kept with what decode knows of the prefill (`prefill_check.py`).
Each refused request is noted in it and told in the background (`tell`): by the reason,
if prefill understands one, else by an abort. A prefill that does not answer is asked
again for a moment, for all of its requests at once.
"""

from __future__ import annotations

import dataclasses
import functools
import http.client
import logging
import threading
import time
from collections import deque
from typing import Any

import zmq

from sglang.srt.disaggregation.common.log_limits import may_say
from sglang.srt.disaggregation.common.peer_agreement import REFUSED_TAG
from sglang.srt.disaggregation.common.peer_background import ask, background

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_LOOK_AGAIN_MAX_S = 30.0
_CONTACTS_MAX_AGE_S = 5.0
_TELL_AGAIN_S = (0.5, 2.0)
_MAX_UNTOLD = 1024
MAX_RANKS = 256
_MAX_REASON_BYTES = 2048
# A prefill without this agreement drops an abort that comes before its request.
_ABORT_AGAIN_S = (0.3, 1.0)
_MAX_TIMERS = 512


@dataclasses.dataclass
class Refusal:
    """Why decode will not work with one prefill, and whom to tell.

    `admits` says that prefill understands a refusal; any other gets an abort.
    `contacts` maps a DP rank to (when they were asked for, its ranks' addresses).
    `untold` are the requests, as (receiver, DP rank), that prefill does not know of yet.
    """

    reason: str
    since: float
    admits: bool
    look_again_s: float = _LOOK_AGAIN_S
    contacts: dict[int, tuple[float, list[dict]]] = dataclasses.field(
        default_factory=dict
    )
    untold: deque[tuple[Any, int]] = dataclasses.field(
        default_factory=lambda: deque(maxlen=_MAX_UNTOLD)
    )

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self.since > self.look_again_s

    def postpone(self) -> None:
        """Nobody answered: keep the refusal, and ask less often."""
        self.since = time.monotonic()
        self.look_again_s = min(2 * self.look_again_s, _LOOK_AGAIN_MAX_S)


def tell(refused: Refusal, info: Any, requests: list[tuple[Any, int]]) -> None:
    """Have prefill told of refused requests; does not wait, does not raise.

    Args:
        info: topology of the prefill.
        requests: (receiver, DP rank of prefill that may hold it), of one prefill.
    """
    if not requests:
        return
    refused.untold.extend(requests)
    receiver = requests[0][0]
    address = receiver.bootstrap_addr
    job = functools.partial(_tell_all, refused, info)
    submitted = background.submit(("tell", address), job)
    if submitted is None and may_say(receiver.kv_mgr, "not told"):
        logger.warning(
            "Prefill %s is not told about a refused request: too much to do", address
        )


def _tell_all(refused: Refusal, info: Any) -> None:
    """What is noted until now; later requests have a job of their own."""
    batch = [refused.untold.popleft() for _ in range(len(refused.untold))]
    for pause_s in (0.0, *_TELL_AGAIN_S):
        time.sleep(pause_s)
        try:
            while batch:
                _tell_one(refused, info, *batch[0])
                batch.pop(0)
            return
        except (OSError, http.client.HTTPException) as error:
            mute = error
    _say_untold(batch[0][0], f"{len(batch)} refused request(s)", mute)


def _tell_one(refused: Refusal, info: Any, receiver: Any, dp_rank: int) -> None:
    """Raises what a prefill without an answer raises; for another error it is no use."""
    try:
        _send_refusal(receiver, refused, _contacts(receiver, refused, dp_rank, info))
    except (OSError, http.client.HTTPException):
        raise
    except Exception as error:
        _say_untold(receiver, f"a refused request of DP rank {dp_rank}", error)


def _say_untold(receiver: Any, what: str, error: Exception) -> None:
    address = receiver.bootstrap_addr
    if may_say(receiver.kv_mgr, f"tell {address}"):
        logger.warning("Prefill %s was not told about %s: %r", address, what, error)


def _contacts(receiver: Any, refused: Refusal, dp_rank: int, info: Any) -> list[dict]:
    """Every rank of the prefill that may hold the request.

    Asked for again after a while: a restarted prefill has other ports.

    Raises:
        ValueError: more ranks than an engine has, or an answer that names no rank.
    """
    when, contacts = refused.contacts.get(dp_rank, (0.0, []))
    if contacts and time.monotonic() - when <= _CONTACTS_MAX_AGE_S:
        return contacts
    sizes = (info.attn_cp_size, info.attn_tp_size, info.pp_size)
    if not 0 < sizes[0] * sizes[1] * sizes[2] <= MAX_RANKS:
        raise ValueError(f"a prefill of {sizes} ranks")
    contacts = []
    for cp in range(sizes[0]):
        for tp in range(sizes[1]):
            for pp in range(sizes[2]):
                body = ask(receiver.bootstrap_addr, (dp_rank, cp, tp, pp)).body
                address = {k: body.get(k) for k in ("rank_ip", "rank_port")}
                if None in address.values():
                    raise ValueError(f"no address in {body}")
                contacts.append(address)
    refused.contacts[dp_rank] = (time.monotonic(), contacts)
    return contacts


def _send_refusal(receiver: Any, refused: Refusal, contacts: list[dict]) -> None:
    room = str(receiver.bootstrap_room).encode("ascii")
    if refused.admits:
        reason = refused.reason.encode("utf-8")[:_MAX_REASON_BYTES]
        _send_to(receiver, contacts, [REFUSED_TAG, room, reason])
        return
    _send_to(receiver, contacts, [b"ABORT", room])
    if sum(isinstance(t, threading.Timer) for t in threading.enumerate()) < _MAX_TIMERS:
        for delay in _ABORT_AGAIN_S:
            timer = threading.Timer(
                delay, _send_to, (receiver, contacts, [b"ABORT", room])
            )
            timer.daemon = True
            timer.start()


def _send_to(receiver: Any, contacts: list[dict], message: list[bytes]) -> None:
    for contact in contacts:
        sock, lock = receiver._connect_to_bootstrap_server(contact)
        try:
            with lock:
                sock.send_multipart(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("Prefill rank %s was not told: %s", contact, error)
