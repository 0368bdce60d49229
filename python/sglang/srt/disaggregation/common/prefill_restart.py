"""Notices a prefill that was restarted between two heartbeats.

A bootstrap server answers long before its engine has loaded, so a prefill that comes back
on its old address within two heartbeats is never missed. Decode would keep sending to
ports that nobody listens on, and each request would wait for its timeout.

Life cycle: a bootstrap server draws an instance when it is made, and names it in its
health answers and in prefill's description. Decode keeps the description of an accepted
prefill. Each heartbeat compares (`prefill_check.heed_heartbeat`). An engine takes longer
to start than a heartbeat to come round; where heartbeats are rarer, or were missed, a
request to a prefill that was not seen for `FRESH_S` seconds asks before it goes on
(`is_due`, `saw`). Another instance is a lost prefill: upstream's own handling fails the
requests it held.

A prefill without a description is left to upstream.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll

logger = logging.getLogger(__name__)

INSTANCE = "instance"
INSTANCE_HEADER = "X-SGLang-Bootstrap-Instance"
# A little more than upstream's interval of heartbeats, less than an engine's start.
FRESH_S = 6.0
_ASK_AGAIN_S = 1.0
_ASK_AGAIN_MAX_S = 30.0
_MAX_DOUBTED = 1024

# The heartbeat and the scheduler may notice the same restart.
_forgetting = threading.Lock()


def new_instance() -> str:
    """An id that no other start of a bootstrap server has."""
    return uuid.uuid4().hex


def is_due(info: Any) -> bool:
    """Whether an accepted prefill is to be asked before the next request goes on.

    One that gives no answer is asked ever less often: the asker waits for it.
    """
    if not known_instance(info):
        return False
    now = time.monotonic()
    if now - info.peer_seen <= FRESH_S or now < getattr(info, "peer_asked_next", 0.0):
        return False
    wait_s = getattr(info, "peer_ask_again_s", _ASK_AGAIN_S)
    info.peer_asked_next = now + wait_s
    info.peer_ask_again_s = min(2 * wait_s, _ASK_AGAIN_MAX_S)
    return True


def note_doubt(info: Any, request: Any) -> None:
    """Remember a request that goes on although its prefill was asked and was mute."""
    if getattr(info, "peer_asked_next", 0.0):
        requests = info.__dict__.setdefault("peer_doubted", deque(maxlen=_MAX_DOUBTED))
        requests.append(request)


def take_doubted(info: Any) -> list[Any]:
    """The requests that went on in doubt and have not turned out well since, once."""
    return list(info.__dict__.pop("peer_doubted", ()))


def saw(
    manager: Any,
    bootstrap_addr: str,
    info: Any,
    instance: str | None,
    *,
    spare_waiting: bool,
) -> bool:
    """Note which instance answers now; True when `info` was another's and is forgotten.

    Args:
        info: what ``prefill_info_table`` held for this prefill before it was asked.
        spare_waiting: leave requests alone that have not begun; they may be for the new
            one.
    """
    if instance == known_instance(info):
        info.peer_seen = time.monotonic()
        info.peer_asked_next, info.peer_ask_again_s = 0.0, _ASK_AGAIN_S
        info.__dict__.pop("peer_doubted", None)
        return False
    with _forgetting:
        if manager.prefill_info_table.get(bootstrap_addr) is info:
            logger.error("Prefill %s was restarted; its requests fail", bootstrap_addr)
            _forget(manager, bootstrap_addr, spare_waiting)
    return True


def known_instance(info: Any) -> str | None:
    """The instance of an accepted prefill; None of one without a description."""
    return (getattr(info, "peer_description", None) or {}).get(INSTANCE)


def _forget(manager: Any, bootstrap_addr: str, spare_waiting: bool) -> None:
    """Upstream's handling of a lost prefill, for the requests that it held."""
    rooms = manager.addr_to_rooms_tracker[bootstrap_addr]
    spared = {
        room for room in tuple(rooms) if spare_waiting and not _has_begun(manager, room)
    }
    rooms -= spared
    try:
        manager._handle_node_failure(bootstrap_addr)
    except Exception:
        logger.exception("Requests of a restarted prefill may wait for their timeout")
    for room in spared & manager.request_status.keys():
        if _has_begun(manager, room):  # with what is forgotten now
            manager.record_failure(room, f"Prefill {bootstrap_addr} was restarted")
            manager.update_status(room, KVPoll.Failed)
        else:
            manager.addr_to_rooms_tracker[bootstrap_addr].add(room)


def _has_begun(manager: Any, room: int) -> bool:
    """Whether a request has turned to its prefill already."""
    if room in manager.required_prefill_response_num_table:
        return True
    return manager.request_status.get(room) != KVPoll.Bootstrapping
