"""Decode's side of the agreement: which prefill it works with, and how it refuses one.

Life cycle: a prefill is asked for its description on first contact (`ensure_prefill`).
A refused prefill is never registered with: each of its requests fails at once with the
reason (`refuse_request`), and prefill is told, so that both logs and the client name
both values. A refusal is looked at again when it is older than a second, so a prefill
restarted with other flags works without restarting decode; one that no longer answers
is asked ever less often. An accepted one is watched for restarts (`prefill_restart.py`).

Both entry points run in the scheduler loop: neither raises, and what waits for the peer
is done by `peer_background`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import logging
import threading
import time
from typing import Any, NamedTuple

import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.log_limits import may_say
from sglang.srt.disaggregation.common.peer_agreement import (
    HEADER,
    REFUSED_TAG,
    judge,
    own_description,
    say_once,
)
from sglang.srt.disaggregation.common.peer_agreement_table import (
    REFUSE,
    UNPATCHED,
    Description,
)
from sglang.srt.disaggregation.common.peer_background import Answer, ask, background
from sglang.srt.disaggregation.common.prefill_restart import INSTANCE, is_due, saw

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_LOOK_AGAIN_MAX_S = 30.0
# How long the scheduler waits for a prefill that it asks for the first time.
_PATIENCE_S = 0.5
_ANSWER_MAX_AGE_S = 5.0
_MAX_LOOKS = 1024
_MAX_DESCRIPTION_CHARS = 16384
_CONTACTS_MAX_AGE_S = 5.0
_MAX_RANKS = 256
_MAX_REASON_BYTES = 2048
# A prefill without this agreement drops an abort that comes before its request.
_ABORT_AGAIN_S = (0.3, 1.0)
_MAX_TIMERS = 512


@dataclasses.dataclass
class Refusal:
    """Why decode will not work with one prefill, and whom to tell.

    `admits` says that prefill understands a refusal; any other gets an abort.
    `contacts` maps a DP rank to (when they were asked for, its ranks' addresses).
    """

    reason: str
    since: float
    admits: bool
    look_again_s: float = _LOOK_AGAIN_S
    contacts: dict[int, tuple[float, list[dict]]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self.since > self.look_again_s

    def postpone(self) -> None:
        """Nobody answered: keep the refusal, and ask less often."""
        self.since = time.monotonic()
        self.look_again_s = min(2 * self.look_again_s, _LOOK_AGAIN_MAX_S)


class Prefill(NamedTuple):
    """What a bootstrap server said: topology, and a description in any case."""

    info: Any
    description: Description


# -- first contact --------------------------------------------------------------------


def ensure_prefill(
    manager: Any, bootstrap_addr: str, prefill: Prefill | None = None
) -> bool | None:
    """Fetch and check a prefill; False when to try again later, None to go on.

    The first statement of ``try_ensure_parallel_info``. A disagreement, ours or one that
    upstream raises for, becomes a refusal kept on the cached info instead of an
    exception that ends the engine. To catch the latter this enters the method once more
    and steps aside there (None).

    Args:
        prefill: what it said a moment ago, if it was asked already.
    """
    if own_description(manager) is None or manager.__dict__.get("peer_check_is_on"):
        return None
    try:
        return _ensure_prefill(manager, bootstrap_addr, prefill)
    except Exception as error:
        reason = f"[PD-INTERNAL] {type(error).__name__}: {error}"
        if may_say(manager, reason, in_full=1):
            logger.exception("Prefill %s could not be checked", bootstrap_addr)
        known = manager.prefill_info_table.get(bootstrap_addr)
        _refuse(manager, bootstrap_addr, known or _placeholder(), reason, admits=False)
        return True


def _ensure_prefill(manager: Any, bootstrap_addr: str, prefill: Prefill | None) -> bool:
    table = manager.prefill_info_table
    refused = refusal_of(manager, bootstrap_addr)
    if bootstrap_addr in table and (refused is None or not refused.is_stale):
        return True
    prefill = prefill or _look(manager, bootstrap_addr)
    if prefill is None:
        if refused is not None:
            refused.postpone()
        return refused is not None
    info, theirs = prefill
    reason = _disagreement(manager, bootstrap_addr, theirs)
    if reason is None:
        table.pop(bootstrap_addr, None)
        manager.peer_check_is_on = True
        try:
            known = manager.try_ensure_parallel_info(bootstrap_addr)
            if bootstrap_addr in table:
                table[bootstrap_addr].peer_seen = time.monotonic()
                # Decode asks it per request whether draft KV comes with the target's.
                table[bootstrap_addr].peer_description = theirs
            return known
        except Exception as error:
            reason = f"[PD-UPSTREAM] {error}"
            if may_say(manager, reason, in_full=1):
                logger.exception("Refusing prefill %s", bootstrap_addr)
        finally:
            manager.peer_check_is_on = False
    admits = bool(theirs.get("admits"))
    _refuse(manager, bootstrap_addr, info, reason, admits, refused)
    return True


def _refuse(manager, bootstrap_addr, info, reason, admits, before=None) -> None:
    contacts = before.contacts if before is not None else {}
    info.peer_refusal = Refusal(reason, time.monotonic(), admits, contacts=contacts)
    manager.prefill_info_table[bootstrap_addr] = info


def _placeholder() -> Any:
    """Topology of a prefill of which nothing is known but that it is refused."""
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    return PrefillServerInfo(1, 1, 1, 1, None, None, True)


def refusal_of(manager: Any, bootstrap_addr: str) -> Refusal | None:
    """The refusal cached for a prefill, or None."""
    return getattr(manager.prefill_info_table.get(bootstrap_addr), "peer_refusal", None)


def _disagreement(manager, bootstrap_addr, theirs) -> str | None:
    verdicts = judge(decode=own_description(manager), prefill=theirs)
    say_once(manager, f"prefill {bootstrap_addr}", verdicts)
    if verdicts and verdicts[0].severity == REFUSE:
        return verdicts[0].text
    return None


# -- asking ---------------------------------------------------------------------------


def _look(
    manager: Any, bootstrap_addr: str, *, patient: bool = False
) -> Prefill | None:
    """What a prefill says of itself; None while it is not known.

    A question is waited for a moment, because a prefill that is up answers in
    milliseconds; not again after one that was not answered in time, unless `patient`.
    A later call takes the answer that came in the meantime.
    """
    looks = manager.__dict__.setdefault("peer_looks", {})
    slow = manager.__dict__.setdefault("peer_slow", set())
    when, future = looks.pop(bootstrap_addr, (0.0, None))
    patience = 0.0
    if future is None or time.monotonic() - when > _ANSWER_MAX_AGE_S:
        when = time.monotonic()
        hurries = bootstrap_addr in slow and not patient
        patience = 0.0 if hurries else _PATIENCE_S
        key = ("look", bootstrap_addr)
        future = background.submit(
            key, functools.partial(ask, bootstrap_addr, header=HEADER)
        )
    if future is None:
        return None
    concurrent.futures.wait([future], timeout=patience)
    if not future.done():
        for memory in (looks, slow):
            if len(memory) >= _MAX_LOOKS:
                memory.clear()
        looks[bootstrap_addr] = (when, future)
        slow.add(bootstrap_addr)
        return None
    try:
        prefill = _prefill_from(future.result())
        slow.discard(bootstrap_addr)
        return prefill
    except Exception as error:
        if may_say(manager, f"look {bootstrap_addr}"):
            logger.error("Prefill %s is not ready: %r", bootstrap_addr, error)
        return None


def _prefill_from(answer: Answer) -> Prefill:
    """Raises what a wrong type in a topology raises."""
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    known = {field.name for field in dataclasses.fields(PrefillServerInfo)}
    info = PrefillServerInfo(**{k: v for k, v in answer.body.items() if k in known})
    return Prefill(info, _description_from(answer.header, info))


def _description_from(header: str | None, info: Any) -> Description:
    """Prefill's own description, or what an unpatched one shows in its topology."""
    try:
        if header is not None and len(header) <= _MAX_DESCRIPTION_CHARS:
            described = json.loads(header)
            if isinstance(described, dict):
                return described
    except (ValueError, RecursionError):
        pass
    if header is not None:
        logger.error("A prefill sent a malformed description: %.200s", header)
    return {
        **UNPATCHED,
        "page_size": info.page_size,
        "allocation_policy": getattr(info, "decode_allocation_policy", None),
        "kv_dtype": info.kv_cache_dtype,
        "tp": info.attn_tp_size,
        "pp": info.pp_size,
        "cp": info.attn_cp_size,
    }


# -- refusing -------------------------------------------------------------------------


def refuse_request(receiver: Any, prefill_dp_rank: int) -> bool:
    """Fail a request whose prefill is refused; False when it may go on.

    The client gets the reason through the ordinary failure path; prefill is told so
    that it does not hold the request until its bootstrap timeout.
    """
    manager, bootstrap_addr = receiver.kv_mgr, receiver.bootstrap_addr
    before = manager.prefill_info_table.get(bootstrap_addr)
    try:
        _look_again(manager, bootstrap_addr, before)
    except Exception as error:
        if may_say(manager, f"look {bootstrap_addr}"):
            logger.error("Prefill %s was not looked at: %r", bootstrap_addr, error)
    refused, dp_ranks = refusal_of(manager, bootstrap_addr), [prefill_dp_rank]
    now = manager.prefill_info_table.get(bootstrap_addr)
    if None not in (before, now) and before.dp_size != now.dp_size:
        refused, dp_ranks = _moved(receiver, now)
    if refused is None:
        return False
    manager.record_failure(receiver.bootstrap_room, refused.reason)
    manager.update_status(receiver.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    receiver.abort_notified = True
    telling = background.submit(
        ("tell", bootstrap_addr),
        functools.partial(_tell_prefill, receiver, refused, dp_ranks),
    )
    if telling is None and may_say(manager, "not told"):
        logger.warning(
            "Prefill %s is not told about a refused request: too much to do",
            bootstrap_addr,
        )
    return True


def _look_again(manager: Any, bootstrap_addr: str, info: Any) -> None:
    """Make contact anew with a prefill that was refused, or restarted, a while ago."""
    refused = getattr(info, "peer_refusal", None)
    if refused is not None and refused.is_stale:
        ensure_prefill(manager, bootstrap_addr)
    elif is_due(info):
        prefill = _look(manager, bootstrap_addr, patient=True)
        if prefill is None:
            _compare_later(manager, bootstrap_addr, info)
        elif _is_another(manager, bootstrap_addr, info, prefill):
            ensure_prefill(manager, bootstrap_addr, prefill)
            if bootstrap_addr not in manager.prefill_info_table:
                reason = (
                    f"[PD-RESTARTED] prefill {bootstrap_addr} was restarted and does "
                    "not answer any more; send the request again"
                )
                admits = bool(prefill.description.get("admits"))
                _refuse(manager, bootstrap_addr, prefill.info, reason, admits)


def _is_another(manager, bootstrap_addr, info, prefill: Prefill) -> bool:
    instance = prefill.description.get(INSTANCE)
    return saw(manager, bootstrap_addr, info, instance)


def _compare_later(manager: Any, bootstrap_addr: str, info: Any) -> None:
    """Requests go on for now; an answer that comes late still counts for them."""

    def compare(future: concurrent.futures.Future) -> None:
        try:
            _is_another(manager, bootstrap_addr, info, _prefill_from(future.result()))
        except Exception as error:
            logger.debug("Prefill %s gave no answer: %r", bootstrap_addr, error)

    _, future = manager.peer_looks.get(bootstrap_addr, (0.0, None))
    if future is not None:
        future.add_done_callback(compare)


def _moved(receiver: Any, info: Any) -> tuple[Refusal, list[int]]:
    """The caller chose one of the DP ranks that were; refuse, and whom to tell."""
    refused = refusal_of(receiver.kv_mgr, receiver.bootstrap_addr)
    if refused is None:
        reason = (
            f"[PD-RESTARTED] prefill {receiver.bootstrap_addr} came back with dp_size "
            f"{info.dp_size}; send the request again"
        )
        theirs = getattr(info, "peer_description", None) or {}
        refused = Refusal(reason, time.monotonic(), admits=bool(theirs.get("admits")))
    ranks = range(min(info.dp_size, _MAX_RANKS))
    if info.follow_bootstrap_room and ranks:
        return refused, [receiver.bootstrap_room % len(ranks)]
    return refused, list(ranks)


def _tell_prefill(receiver: Any, refused: Refusal, dp_ranks: list[int]) -> None:
    try:
        for dp_rank in dp_ranks:
            contacts = _contacts(receiver, refused, dp_rank)
            _send_refusal(receiver, refused, contacts)
    except Exception as error:
        if may_say(receiver.kv_mgr, f"tell {receiver.bootstrap_addr}"):
            logger.warning(
                "Prefill %s was not told about a refused request: %r",
                receiver.bootstrap_addr,
                error,
            )


def _contacts(receiver: Any, refused: Refusal, dp_rank: int) -> list[dict]:
    """Every rank of the prefill that may hold the request.

    Asked for again after a while: a restarted prefill has other ports.

    Raises:
        ValueError: more ranks than an engine has, or an answer that names no rank.
    """
    when, contacts = refused.contacts.get(dp_rank, (0.0, []))
    if when and time.monotonic() - when <= _CONTACTS_MAX_AGE_S:
        if not contacts:
            raise ValueError("it did not answer a moment ago")
        return contacts
    refused.contacts[dp_rank] = (time.monotonic(), [])
    info = receiver.kv_mgr.prefill_info_table[receiver.bootstrap_addr]
    sizes = (info.attn_cp_size, info.attn_tp_size, info.pp_size)
    if not 0 < sizes[0] * sizes[1] * sizes[2] <= _MAX_RANKS:
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
