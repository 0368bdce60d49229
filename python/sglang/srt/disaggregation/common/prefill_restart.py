"""Notices a prefill that was restarted between two heartbeats.

A bootstrap server answers long before its engine has loaded, so a prefill that comes back
on its old address within two heartbeats is never missed. Decode then keeps sending to
ports that nobody listens on, and each request waits for its timeout.

Life cycle: a bootstrap server draws an instance when it is made, and hands it on with
prefill's description. Decode keeps it with the topology of an accepted prefill. After
each request decode asks again, in the background and at most once in `EVERY_S` seconds.
Another instance is a lost prefill: upstream's own handling fails its requests at once,
and the next request makes first contact with the new one.
"""

from __future__ import annotations

import functools
import json
import logging
import time
import uuid
from typing import Any

from sglang.srt.disaggregation.common.peer_background import Background, ask

logger = logging.getLogger(__name__)

INSTANCE = "instance"
# As often as a heartbeat.
EVERY_S = 5.0

_watching = Background(max_keys=1024, max_waiting=1)


def new_instance() -> str:
    """An id that no other start of a bootstrap server has."""
    return uuid.uuid4().hex


def watch(manager: Any, bootstrap_addr: str, header: str) -> None:
    """See to it that this prefill is looked at once more after this moment.

    Args:
        manager: decode's KV manager; `bootstrap_addr` is in its ``prefill_info_table``.
        header: the response header that holds prefill's description.
    """
    info = manager.prefill_info_table.get(bootstrap_addr)
    known = getattr(info, "peer_description", None) or {}
    if INSTANCE not in known or getattr(info, "peer_watched", False):
        return
    due = getattr(info, "peer_looked_at", 0.0) + EVERY_S
    look = functools.partial(_look, manager, bootstrap_addr, info, header, due)
    # Before the look begins: it takes the mark back, perhaps at once.
    info.peer_watched = True
    if _watching.submit(bootstrap_addr, look) is None:
        info.peer_watched = False


def _look(manager, bootstrap_addr, info, header, due) -> None:
    time.sleep(max(0.0, due - time.monotonic()))
    table, instance = manager.prefill_info_table, None
    # One that does not answer is the heartbeat's business; one that answers before its
    # ranks have registered is looked at until they have.
    while table.get(bootstrap_addr) is info and instance is None:
        info.peer_looked_at = time.monotonic()
        info.peer_watched = False
        instance = _instance_of(bootstrap_addr, header)
        if instance is None:
            info.peer_watched = True
            time.sleep(EVERY_S)
    if table.get(bootstrap_addr) is not info:
        return
    if instance == info.peer_description[INSTANCE]:
        return
    logger.error("Prefill %s was restarted; its requests fail", bootstrap_addr)
    try:
        manager._handle_node_failure(bootstrap_addr)
    except Exception:
        logger.exception("Requests of a restarted prefill may wait for their timeout")


def _instance_of(bootstrap_addr: str, header: str) -> str | None:
    """None while nobody answers for a registered engine; empty for one of stock SGLang."""
    try:
        described = ask(bootstrap_addr, header=header).header
        return str(json.loads(described).get(INSTANCE, "")) if described else ""
    except Exception as error:
        logger.debug("Prefill %s was not looked at: %r", bootstrap_addr, error)
        return None
