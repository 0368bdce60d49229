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
import time
from typing import Any, NamedTuple

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.log_limits import may_say
from sglang.srt.disaggregation.common.peer_agreement import (
    HEADER,
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
from sglang.srt.disaggregation.common.prefill_refusal import MAX_RANKS, Refusal, tell
from sglang.srt.disaggregation.common.prefill_restart import (
    FRESH_S,
    INSTANCE,
    INSTANCE_HEADER,
    is_due,
    known_instance,
    note_doubt,
    saw,
    take_doubted,
)

logger = logging.getLogger(__name__)

# How long the scheduler waits for a prefill that it asks for the first time.
_PATIENCE_S = 0.5
# Longer than the longest time between two looks at a refused prefill.
_ANSWER_MAX_AGE_S = 35.0
_FRESH_ANSWER_S = 5.0
_WAIT_AGAIN_S = 5.0
_MAX_LOOKS = 1024
_MAX_DESCRIPTION_CHARS = 16384


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
    max_age_s = _FRESH_ANSWER_S if refused is None else _ANSWER_MAX_AGE_S
    prefill = prefill or _look(manager, bootstrap_addr, max_age_s)
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
            accepted = table.get(bootstrap_addr)
            if accepted is not None:
                accepted.peer_seen = time.monotonic()
                # Decode asks it per request whether draft KV comes with the target's.
                accepted.peer_description = theirs
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
    manager: Any,
    bootstrap_addr: str,
    max_age_s: float = _FRESH_ANSWER_S,
    *,
    again: bool = False,
) -> Prefill | None:
    """What a prefill says of itself; None while it is not known.

    A question is waited for a moment, because a prefill that is up answers in
    milliseconds; not again while one stays without an answer. A later call takes the
    answer that came in the meantime.

    Args:
        max_age_s: an older answer does not count.
        again: the prefill answered before. No earlier failure counts, and it is waited
            for unless any prefill was waited for in vain a moment ago.
    """
    looks = manager.__dict__.setdefault("peer_looks", {})
    slow = manager.__dict__.setdefault("peer_slow", set())
    future = looks.pop(bootstrap_addr, None)
    if future is not None and _is_outdated(future, max_age_s, again):
        slow.discard(bootstrap_addr)
        future = None
    patience = 0.0
    if future is None:
        hurried = _hurried(manager) if again else bootstrap_addr in slow
        patience = 0.0 if hurried else _PATIENCE_S
        call = functools.partial(_ask_for_all, bootstrap_addr)
        future = background.submit(("look", bootstrap_addr), call)
    if future is None:
        return None
    concurrent.futures.wait([future], timeout=patience)
    if not future.done():
        for memory in (looks, slow):
            if len(memory) >= _MAX_LOOKS:
                memory.clear()
        looks[bootstrap_addr] = future
        slow.add(bootstrap_addr)
        if patience:
            manager.peer_waited_in_vain = time.monotonic()
        return None
    try:
        prefill = _prefill_from(future.result())
        slow.discard(bootstrap_addr)
        return prefill
    except Exception as error:
        if may_say(manager, f"look {bootstrap_addr}"):
            logger.error("Prefill %s is not ready: %r", bootstrap_addr, error)
        return None


def _ask_for_all(bootstrap_addr: str) -> tuple[float, Answer]:
    """An answer and when it came."""
    answer = ask(bootstrap_addr, header=HEADER)
    return time.monotonic(), answer


def _is_outdated(
    future: concurrent.futures.Future, max_age_s: float, again: bool
) -> bool:
    """Whether there is an answer, or a failure, that does not count any more."""
    if not future.done():
        return False
    if future.exception() is not None:
        return again
    return time.monotonic() - future.result()[0] > max_age_s


def _hurried(manager: Any) -> bool:
    """Many prefills may be mute at once, and the scheduler serves the others."""
    waited = manager.__dict__.get("peer_waited_in_vain")
    return waited is not None and time.monotonic() - waited < _WAIT_AGAIN_S


def _prefill_from(timed: tuple[float, Answer]) -> Prefill:
    """Raises what a wrong type in a topology raises."""
    _, answer = timed
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
        _look_again(receiver, prefill_dp_rank, before)
    except Exception as error:
        if may_say(manager, f"look {bootstrap_addr}"):
            logger.error("Prefill %s was not looked at: %r", bootstrap_addr, error)
    now = manager.prefill_info_table.get(bootstrap_addr)
    refused = getattr(now, "peer_refusal", None)
    moved = None not in (before, now) and before.dp_size != now.dp_size
    if refused is None and moved:
        theirs = getattr(now, "peer_description", None) or {}
        what = f"has dp_size {now.dp_size} now"
        refused = _restarted(bootstrap_addr, Prefill(now, theirs), what)
    if refused is None:
        return False
    manager.record_failure(receiver.bootstrap_room, refused.reason)
    manager.update_status(receiver.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    receiver.abort_notified = True
    dp_ranks = _ranks_now(receiver, prefill_dp_rank, before or now, now)
    tell(refused, now, [(receiver, dp_rank) for dp_rank in dp_ranks])
    return True


def _look_again(receiver: Any, dp_rank: int, info: Any) -> None:
    """Make contact anew with a prefill that was refused, or restarted, a while ago."""
    manager, bootstrap_addr = receiver.kv_mgr, receiver.bootstrap_addr
    refused = getattr(info, "peer_refusal", None)
    if refused is not None and refused.is_stale:
        ensure_prefill(manager, bootstrap_addr)
    elif is_due(info):
        prefill = _look(manager, bootstrap_addr, again=True)
        if prefill is None:
            note_doubt(info, (receiver, dp_rank))
            _compare_later(manager, bootstrap_addr, info)
        elif _is_another(manager, bootstrap_addr, info, prefill):
            _contact_anew(manager, bootstrap_addr, prefill)
    else:
        note_doubt(info, (receiver, dp_rank))


def _contact_anew(manager: Any, bootstrap_addr: str, prefill: Prefill) -> None:
    ensure_prefill(manager, bootstrap_addr, prefill)
    if bootstrap_addr not in manager.prefill_info_table:
        refused = _restarted(bootstrap_addr, prefill, "does not answer any more")
        _refuse(manager, bootstrap_addr, prefill.info, refused.reason, refused.admits)


def _restarted(bootstrap_addr: str, prefill: Prefill, what: str) -> Refusal:
    reason = (
        f"[PD-RESTARTED] prefill {bootstrap_addr} was restarted and {what}; send the "
        "request again"
    )
    admits = bool(prefill.description.get("admits"))
    return Refusal(reason, time.monotonic(), admits)


def _is_another(manager, bootstrap_addr, info, prefill: Prefill) -> bool:
    """Whether another instance answers; then those that went on in doubt are told."""
    instance = prefill.description.get(INSTANCE)
    if not saw(manager, bootstrap_addr, info, instance, spare_waiting=True):
        return False
    _tell_doubted(bootstrap_addr, info, prefill)
    return True


def _tell_doubted(bootstrap_addr: str, info: Any, prefill: Prefill) -> None:
    refused = _restarted(bootstrap_addr, prefill, "did not get this request's metadata")
    requests = [
        (receiver, rank)
        for receiver, dp_rank in take_doubted(info)
        for rank in _ranks_now(receiver, dp_rank, info, prefill.info)
    ]
    tell(refused, prefill.info, requests)


def _ranks_now(receiver: Any, dp_rank: int, before: Any, now: Any) -> list[int]:
    """DP ranks of a prefill that may hold a request, which `before` had as `dp_rank`."""
    if before.dp_size == now.dp_size:
        return [dp_rank]
    ranks = range(min(now.dp_size, MAX_RANKS))
    if now.follow_bootstrap_room and ranks:
        return [receiver.bootstrap_room % len(ranks)]
    return list(ranks)


def _compare_later(manager: Any, bootstrap_addr: str, info: Any) -> None:
    """Requests go on for now; an answer that comes late still counts for them."""

    def compare(future: concurrent.futures.Future) -> None:
        try:
            _is_another(manager, bootstrap_addr, info, _prefill_from(future.result()))
        except Exception as error:
            logger.debug("Prefill %s gave no answer: %r", bootstrap_addr, error)

    future = manager.peer_looks.get(bootstrap_addr)
    if future is not None:
        future.add_done_callback(compare)


def heed_heartbeat(manager: Any, bootstrap_addr: str, response: Any) -> None:
    """Compare the instance in a health answer with the one decode works with.

    Args:
        manager: decode's KV manager.
        response: a successful answer (``requests.Response``) of the bootstrap server;
            one that names no instance says nothing.
    """
    info = manager.prefill_info_table.get(bootstrap_addr)
    instance = response.headers.get(INSTANCE_HEADER)
    if instance is None or not known_instance(info):
        return
    # Seen lately, its engine is still loading: what waits was sent to the old one, too.
    unseen = time.monotonic() - info.peer_seen > 2 * FRESH_S
    if saw(manager, bootstrap_addr, info, instance, spare_waiting=unseen):
        _tell_doubted(bootstrap_addr, info, Prefill(info, info.peer_description))
