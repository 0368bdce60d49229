"""Decode's side of the agreement: which prefill it works with, and how it refuses one.

Life cycle of a prefill, as decode sees it:
1. First contact: SGLang fetches the prefill's topology and checks it. That runs in a
   background thread (`checks_prefill`), and the answer's header holds the prefill's
   description, which the rules judge there (`disagrees`).
2. Accepted: the topology is in SGLang's ``prefill_info_table`` and everything goes
   SGLang's way, until a heartbeat meets another instance of the bootstrap server
   (`compare_instance`). That is a lost prefill, handled by SGLang's own code.
3. Refused: each of its requests fails with the reason before anything is registered
   (`refuse_request`), and prefill is told once, so that it does not hold the request
   until its bootstrap timeout. Once a refusal is older than a second, the next request
   makes contact again; the refusal stands until that is answered.

A single request that decode refuses at its intake is told to prefill in the same way
(`tells_refusals`).

What SGLang calls here runs in the scheduler loop or in the heartbeat thread and does not
raise there. All state is in `PrefillPeers`, one object of the KV manager.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import zmq

from sglang.srt.disaggregation.agreement.description import (
    HEADER,
    INSTANCE,
    INSTANCE_HEADER,
)
from sglang.srt.disaggregation.agreement.engine_facts import own_description
from sglang.srt.disaggregation.agreement.pair import (
    REFUSE,
    UNDESCRIBED,
    Description,
    Verdict,
)
from sglang.srt.disaggregation.agreement.rules import decide
from sglang.srt.disaggregation.base.conn import KVPoll

if TYPE_CHECKING:
    import requests

    from sglang.srt.disaggregation.common.conn import (
        CommonKVManager,
        CommonKVReceiver,
        PrefillServerInfo,
    )
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

# How long the scheduler waits for a prefill that it asks for the first time.
_PATIENCE_S = 0.5
_REFUSAL_AGE_S = 1.0
# A prefill without this agreement drops an abort that comes before its request, which
# the router sends to both engines at the same time. So it gets two: an early one, with
# which a quick prefill answers its client soon, and a later one for a busy prefill.
_ABORT_AFTER_S = (0.1, 0.5)
_MAX_REASON_BYTES = 2048
# Backends whose prefill reads a refusal, if it has this agreement; others get an abort.
_READ_REFUSALS = ("nixl", "mooncake")


@dataclasses.dataclass
class Refusal:
    """Why decode does not work with a prefill.

    `contacts` are the addresses of the prefill's ranks by DP rank, filled on first use.
    """

    reason: str
    checked_at: float
    info: PrefillServerInfo
    description: Description
    contacts: dict[int, list[dict]] = dataclasses.field(default_factory=dict)

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.checked_at <= _REFUSAL_AGE_S


@dataclasses.dataclass
class Contact:
    """One fetch of a prefill's topology: pending, then with the verdict of the rules."""

    fetch: Future[bool] | None = None
    info: PrefillServerInfo | None = None
    description: Description | None = None
    reason: str | None = None


@dataclasses.dataclass
class PrefillPeer:
    """What decode knows about the prefill at one bootstrap address.

    `is_slow`: the scheduler waited once and got no answer; it does not wait again until
    there is one. `logged`: the verdicts that are in the log already.
    """

    description: Description | None = None
    refusal: Refusal | None = None
    contact: Contact | None = None
    is_slow: bool = False
    logged: list[Verdict] = dataclasses.field(default_factory=list)

    @property
    def instance(self) -> str | None:
        return (self.description or {}).get(INSTANCE)


class PrefillPeers(dict[str, PrefillPeer]):
    """All prefills that requests of this decode have named, by bootstrap address.

    SGLang keeps as many topologies: one for each bootstrap address it has met.
    """

    def __init__(self) -> None:
        super().__init__()
        # So many prefills can be slow to answer without delaying another. Telling has a
        # pool of its own, so that a prefill that is slow to be told delays no fetch.
        self.fetching = ThreadPoolExecutor(16, thread_name_prefix="agreement-fetch")
        self.telling = ThreadPoolExecutor(2, thread_name_prefix="agreement-tell")


def peers_of(manager: CommonKVManager) -> PrefillPeers:
    """The manager's prefills; made here, on first use."""
    peers = manager.__dict__.get("prefill_peers")
    if peers is None:
        peers = manager.__dict__.setdefault("prefill_peers", PrefillPeers())
    return peers


def prefill_description(
    manager: CommonKVManager, bootstrap_addr: str
) -> Description | None:
    """A prefill's description of itself; None for one without this agreement."""
    peer = peers_of(manager).get(bootstrap_addr)
    return peer.description if peer is not None else None


# -- first contact ----------------------------------------------------------------------

_Fetch = Callable[["CommonKVManager", str], bool]


def checks_prefill(fetch: _Fetch) -> _Fetch:
    """Decorate SGLang's fetch and check of a prefill, called by decode's scheduler.

    SGLang's method blocks for up to five seconds and raises for a prefill that does
    not fit, which ends the engine. Here it runs in a background thread, is waited for
    half a second, and what it raises is this prefill's refusal.
    """

    @functools.wraps(fetch)
    def try_ensure_parallel_info(manager: CommonKVManager, bootstrap_addr: str) -> bool:
        if own_description(manager) is None:
            return fetch(manager, bootstrap_addr)
        peers = peers_of(manager)
        peer = peers.setdefault(bootstrap_addr, PrefillPeer())
        _settle(peer, bootstrap_addr)
        if bootstrap_addr in manager.prefill_info_table:
            return True
        if peer.contact is None and not (peer.refusal and peer.refusal.is_fresh):
            peer.description, peer.contact = None, Contact()
            pending = peers.fetching.submit(fetch, manager, bootstrap_addr)
            peer.contact.fetch = pending
            wait([pending], timeout=0.0 if peer.is_slow else _PATIENCE_S)
            peer.is_slow = peer.is_slow or not pending.done()
        _settle(peer, bootstrap_addr)
        if peer.refusal is not None:
            # SGLang finds the request's DP rank there, on its way to `refuse_request`.
            manager.prefill_info_table.setdefault(bootstrap_addr, peer.refusal.info)
        return bootstrap_addr in manager.prefill_info_table

    return try_ensure_parallel_info


def disagrees(
    manager: CommonKVManager,
    bootstrap_addr: str,
    info: PrefillServerInfo,
    response: requests.Response,
) -> bool:
    """Judge a prefill by its description; True when SGLang need not go on with it.

    Called in the background thread, before SGLang's own checks.

    Args:
        info: prefill's topology, just parsed.
        response: the bootstrap server's answer that it came with.
    """
    ours = own_description(manager)
    peer = peers_of(manager).get(bootstrap_addr)
    if ours is None or peer is None or peer.contact is None:
        return False
    contact = peer.contact
    contact.info = info
    contact.description = _description_from(response)
    theirs = contact.description or _shown_by(info)
    verdicts = judge(decode=ours, prefill=theirs)
    for verdict in verdicts:
        if verdict not in peer.logged:
            if verdict.severity == REFUSE:
                logger.error(f"Refusing prefill {bootstrap_addr}: {verdict.text}")
            else:
                logger.warning(f"Prefill {bootstrap_addr}: {verdict.text}")
    peer.logged = verdicts
    if verdicts and verdicts[0].severity == REFUSE:
        contact.reason = verdicts[0].text
    return contact.reason is not None


def judge(*, decode: Description, prefill: Description) -> list[Verdict]:
    """`decide`; a description that cannot be compared is refused as PD-MALFORMED."""
    try:
        return decide(decode, prefill)
    except Exception as error:
        return [
            Verdict(
                "PD-MALFORMED",
                REFUSE,
                "prefill's description cannot be compared "
                f"({type(error).__name__}: {error})",
                "decode cannot check prefill",
                "run the same build of SGLang on both engines",
            )
        ]


def _description_from(response: requests.Response) -> Description | None:
    """Prefill's own description; None from a bootstrap server that shows none."""
    header = response.headers.get(HEADER)
    if header is None:
        return None
    try:
        described = json.loads(header)
        if isinstance(described, dict):
            return described
    except (ValueError, RecursionError):
        pass
    logger.error(
        "A prefill sent a description that cannot be read; it is treated as a prefill "
        f"without a description: {header[:200]}"
    )
    return None


def _shown_by(info: PrefillServerInfo) -> Description:
    """The description of a prefill without this agreement, from its topology."""
    return {
        **UNDESCRIBED,
        "page_size": info.page_size,
        "allocation_policy": getattr(info, "decode_allocation_policy", None),
        "kv_dtype": info.kv_cache_dtype,
        "tp": info.attn_tp_size,
        "pp": info.pp_size,
        "cp": info.attn_cp_size,
    }


def _settle(peer: PrefillPeer, bootstrap_addr: str) -> None:
    """Use the result of a finished contact; a pending one changes nothing."""
    contact = peer.contact
    if contact is None or not contact.fetch.done():
        return
    former, peer.contact, error = peer.refusal, None, contact.fetch.exception()
    if contact.info is None and error is None and contact.fetch.result():
        return  # it began so late that it met the refused topology in the table
    peer.refusal = None
    if contact.info is None:
        return  # no answer; SGLang has logged why, and asks again
    peer.is_slow, peer.description, reason = False, contact.description, contact.reason
    if error is not None:
        reason = f"[PD-TOPOLOGY] {error}"
        if former is None or former.reason != reason:
            logger.error(
                f"Refusing prefill {bootstrap_addr}: {reason}. This is one of SGLang's own "
                "checks of a prefill; change what it names.",
                exc_info=error,
            )
    if reason is not None:
        theirs = contact.description or UNDESCRIBED
        peer.refusal = Refusal(reason, time.monotonic(), contact.info, theirs)


# -- refusing ---------------------------------------------------------------------------


def refuse_request(receiver: CommonKVReceiver, prefill_dp_rank: int) -> bool:
    """Fail a request whose prefill is refused; False when it may go on.

    The client gets the reason through the ordinary failure path. The refusal's topology
    leaves SGLang's table, so that the next request asks `checks_prefill` again.
    """
    manager, bootstrap_addr = receiver.kv_mgr, receiver.bootstrap_addr
    peer = peers_of(manager).get(bootstrap_addr)
    if peer is None:
        return False
    _settle(peer, bootstrap_addr)
    refusal = peer.refusal
    if refusal is None:
        return False
    manager.prefill_info_table.pop(bootstrap_addr, None)
    manager.record_failure(receiver.bootstrap_room, refusal.reason)
    manager.update_status(receiver.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    receiver.abort_notified = True  # by the message below, in place of SGLang's
    now = time.monotonic()
    peers_of(manager).telling.submit(_tell, receiver, refusal, prefill_dp_rank, now)
    return True


def tells_refusals(add: Callable[..., None]) -> Callable[..., None]:
    """Decorate decode's intake of a request: prefill is told of one that it refuses.

    Without it prefill holds the request until its bootstrap timeout, and the client with
    it: the router answers when both engines have.
    """

    @functools.wraps(add)
    def add_or_tell(
        queue: DecodePreallocQueue, req: Req, *args: object, **kwargs: object
    ) -> None:
        from sglang.srt.disaggregation.common.admission import refusal_of

        add(queue, req, *args, **kwargs)
        refusal = refusal_of(req)
        if refusal is not None:
            _tell_refused_request(queue, req, refusal)

    return add_or_tell


def _tell_refused_request(queue: DecodePreallocQueue, req: Req, reason: str) -> None:
    from sglang.srt.disaggregation.utils import KVClassType, get_kv_class

    manager, address = queue.kv_manager, f"{req.bootstrap_host}:{req.bootstrap_port}"
    if req.bootstrap_room in manager.request_status:
        return  # the room is another request's, with which both engines go on
    if not manager.try_ensure_parallel_info(address):
        return  # it does not answer, and its part of the request has failed for that
    info, now = manager.prefill_info_table[address], time.monotonic()
    description = prefill_description(manager, address) or UNDESCRIBED
    refusal = Refusal(reason, now, info, description)
    # It knows the way to prefill. Cleared, because nothing will arrive for it.
    receiver = get_kv_class(queue.transfer_backend, KVClassType.RECEIVER)(
        mgr=manager, bootstrap_addr=address, bootstrap_room=req.bootstrap_room
    )
    receiver.clear()
    rank = queue._resolve_prefill_dp_rank(req)
    for dp_rank in range(info.dp_size) if rank is None else [rank]:
        peers_of(manager).telling.submit(_tell, receiver, refusal, dp_rank, now)


def explain_missing_prefill(
    queue: DecodePreallocQueue, decode_req: DecodeRequest, error: str
) -> None:
    """Say in a request's failure that its prefill did not answer.

    Args:
        error: SGLang's text, which it only logs; the client got "Aborted by AbortReq."
            A request that had failed for another reason keeps that.
    """
    manager, room = queue.kv_manager, decode_req.req.bootstrap_room
    if manager.failure_records.get(room) != "Aborted by AbortReq.":
        return
    reason = (
        f"[PD-NO-PREFILL] {error}, one a second. Nothing answers at this bootstrap address: "
        "check that prefill is running, and that the port matches its "
        "--disaggregation-bootstrap-port."
    )
    manager.record_failure(room, reason)


def _tell(
    receiver: CommonKVReceiver, refusal: Refusal, dp_rank: int, refused_at: float
) -> None:
    """Send the reason to every rank of prefill that may hold the request, once.

    A prefill without this agreement gets aborts. One that is not reached holds the
    request until its bootstrap timeout.
    """
    # Not at the top: that package imports conn.py, which imports this module.
    from sglang.srt.disaggregation.common.admission import ROOM_REFUSED
    from sglang.srt.disaggregation.common.control_threads import should_log

    room = str(receiver.bootstrap_room).encode("ascii")
    theirs = refusal.description
    reads = theirs.get("version") and theirs.get("backend") in _READ_REFUSALS
    reason = refusal.reason.encode()[:_MAX_REASON_BYTES]
    message = [ROOM_REFUSED, room, reason] if reads else [b"ABORT", room]
    try:
        for delay_s in (0.0,) if reads else _ABORT_AFTER_S:
            time.sleep(max(0.0, refused_at + delay_s - time.monotonic()))
            for contact in _contacts(receiver, refusal, dp_rank):
                sock, lock = receiver._connect_to_bootstrap_server(contact)
                with lock:
                    sock.send_multipart(message, zmq.NOBLOCK)
    except Exception as error:
        if should_log(f"tell {receiver.bootstrap_addr}"):
            logger.warning(
                f"Prefill {receiver.bootstrap_addr} was not told that decode refuses "
                f"request {receiver.bootstrap_room}, and holds it until its bootstrap "
                f"timeout: {error!r}"
            )


def _contacts(receiver, refusal: Refusal, dp_rank: int) -> list[dict]:
    """Addresses of the ranks of one DP rank. Raises LookupError if one has none."""
    if dp_rank not in refusal.contacts:
        info = refusal.info
        ranks = itertools.product(
            range(info.attn_cp_size), range(info.attn_tp_size), range(info.pp_size)
        )
        found = [receiver._get_bootstrap_info_from_server(dp_rank, *r) for r in ranks]
        if None in found:
            raise LookupError(f"DP rank {dp_rank} has ranks without an address")
        refusal.contacts[dp_rank] = found
    return refusal.contacts[dp_rank]


# -- restart ----------------------------------------------------------------------------


def compare_instance(
    manager: CommonKVManager, bootstrap_addr: str, response: requests.Response
) -> None:
    """Treat a prefill that came back on its address as a lost one.

    A bootstrap server answers health checks long before its engine has loaded, so a
    prefill that is back within two heartbeats is never missed. Decode would go on
    sending to ports that nobody listens on, and each request would wait for its timeout.

    Args:
        response: a successful health answer, in the heartbeat thread. A prefill without
            this agreement names no instance and is left to SGLang.
    """
    peer = peers_of(manager).get(bootstrap_addr)
    known = peer.instance if peer is not None else None
    if known is None or response.headers.get(INSTANCE_HEADER, known) == known:
        return
    logger.error(
        f"Prefill {bootstrap_addr} was restarted: requests sent to it before that fail, "
        "the next one makes contact again"
    )
    # The peer stays: the scheduler may be asking it again, and judges the answer by it.
    peer.logged = []
    manager._handle_node_failure(bootstrap_addr)
