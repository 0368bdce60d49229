"""Agreement between a prefill and a decode engine, before and during traffic.

Life cycle:
1. Each engine describes itself when it builds its KV manager (`describe_engine`).
2. Prefill publishes its description at the bootstrap server; the server hands it on in
   a response header, which a decode without this agreement ignores (`publish`,
   `serve_descriptions`).
3. Decode compares on first contact (`ensure_prefill`). A refused prefill is never
   registered with: each of its requests fails at once with the reason
   (`refuse_request`), and prefill is told, so that both logs and the client name both
   values. A refusal is looked at again when it is older than a second, so a prefill
   restarted with other flags works without restarting decode.
4. Decode's description travels in its registration message (`add_description`); what
   prefill does with it is in `peer_admission.py`.

Nothing here raises into a scheduler loop.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from typing import Any

import requests
import zmq
from aiohttp import web

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.peer_agreement_rules import decide
from sglang.srt.disaggregation.common.peer_agreement_table import (
    REFUSE,
    UNPATCHED,
    Description,
    Verdict,
)
from sglang.srt.disaggregation.common.peer_description import describe, read_config

logger = logging.getLogger(__name__)

HEADER = "X-SGLang-Peer-Description"
PAYLOAD_KEY = "peer_description"
FRAME_MAGIC = b"sglang-peer/1:"
REFUSED_TAG = b"PEER_REFUSED"
BACKENDS_WITH_ADMISSION = ("nixl", "mooncake")
# Facts of one rank, meaningless to the ranks of the other engine.
_RANK_FACTS = ("kv_entries", "draft_entries")
_REFUSAL_MAX_AGE_S = 1.0
_HTTP_TIMEOUT_S = 2.0
_MAX_REASON_BYTES = 2048
_MAX_SAID = 4096
# A prefill without this agreement drops an abort that comes before its request.
_ABORT_AGAIN_S = (0.3, 1.0)
_MAX_TIMERS = 512


@dataclasses.dataclass
class Refusal:
    """Why decode will not work with one prefill, and whom to tell."""

    reason: str
    since: float
    prefill_is_patched: bool
    contacts: dict[int, list[dict]] = dataclasses.field(default_factory=dict)

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self.since > _REFUSAL_MAX_AGE_S


# -- describing the running engine ----------------------------------------------------


def describe_engine(scheduler: Any, role: str, kv_args: Any, buffers: Any) -> None:
    """Attach this rank's description to `kv_args`, before its KV manager is built.

    An engine that cannot describe itself starts all the same and is treated as one
    without this agreement.
    """
    try:
        kv_args.peer_description = _describe_rank(scheduler, role, kv_args, buffers)
    except Exception:
        logger.exception("This engine cannot describe itself to its peers")
        kv_args.peer_description = None


def _describe_rank(scheduler, role, kv_args, buffers) -> Description:
    args = _resolved_args(scheduler.server_args)
    model_config = scheduler.model_config
    target_config = model_config.hf_config.to_dict()
    description = describe(
        args,
        role=role,
        target_config=target_config,
        draft_config=read_config(args.get("speculative_draft_model_path")),
        environ=os.environ,
    )
    handoff = _describe_handoff(role, scheduler.server_args, model_config)
    description.update(
        page_size=int(kv_args.page_size),
        kv_dtype=kv_args.kv_cache_dtype_str,
        kv_storage=_storage_dtype(kv_args, scheduler),
        aux=aux_layout(buffers),
        kv_layer_ids=bool(getattr(kv_args, "kv_layer_ids", None)),
        kv_entries=len(kv_args.kv_item_lens),
        draft_entries=int(getattr(kv_args, "num_draft_entries", 0)),
    )
    if handoff is not None:
        description["mode"] = handoff["mode"]
        description["dspark"] = handoff
    return json.loads(json.dumps(description, default=str))


def _resolved_args(server_args: Any) -> dict[str, Any]:
    try:
        from sglang.srt.arg_groups.overrides import resolved_view

        view = resolved_view(server_args)
    except ImportError:  # releases without deferred resolution
        view = server_args
    names = [
        "disaggregation_transfer_backend",
        "speculative_algorithm",
        "page_size",
        "tp_size",
        "speculative_num_draft_tokens",
        "speculative_draft_model_path",
        "model_path",
        "dp_size",
        "speculative_draft_kv_cache_dtype",
        "kv_cache_dtype",
        "pp_size",
        "attn_cp_size",
        "dcp_size",
        "enable_dp_attention",
    ]
    return {name: getattr(view, name, None) for name in names}


def _describe_handoff(role: str, server_args: Any, model_config: Any) -> dict | None:
    """The hand-over's own part of the description; None where it is not installed."""
    try:
        from sglang.srt.speculative.dspark_components import dspark_handoff
    except ImportError:
        return None
    describe_role = getattr(dspark_handoff, f"describe_{role}", None)
    return describe_role(server_args, model_config) if describe_role else None


def _storage_dtype(kv_args: Any, scheduler: Any) -> str | None:
    """dtype of the KV pool itself; ``--kv-cache-dtype auto`` follows ``--dtype``."""
    allocator = getattr(scheduler, "token_to_kv_pool_allocator", None)
    pool = allocator.get_kvcache() if hasattr(allocator, "get_kvcache") else None
    dtype = getattr(pool, "dtype", None)
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def aux_layout(buffers: Any) -> list[str]:
    """``name:bytes per slot`` of the metadata buffers, in the order of allocation.

    The sender addresses a slot with its own width, so widths must agree like names.
    The hand-over's tail is left out: it is the last buffer and its mode covers it.
    """
    return [
        f"{name}:{value[0].nbytes}"
        for name, value in vars(buffers).items()
        if hasattr(value, "data_ptr") and "tail" not in name
    ]


def own_description(manager: Any) -> Description | None:
    """What `describe_engine` attached; None for an engine that has none."""
    return getattr(getattr(manager, "kv_args", None), "peer_description", None)


def show_description(scheduler: Any, state: dict[str, Any]) -> None:
    """Add this engine's description to what ``/server_info`` says of its scheduler."""
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        queue = getattr(scheduler, name, None)
        description = own_description(getattr(queue, "kv_manager", None))
        if description is not None:
            state[PAYLOAD_KEY] = _of_the_engine(description)


def _of_the_engine(description: Description) -> Description:
    return {k: value for k, value in description.items() if k not in _RANK_FACTS}


# -- exchange 1: prefill -> bootstrap server -> decode --------------------------------


def publish(manager: Any, payload: dict) -> None:
    """Add this prefill rank's description to its bootstrap registration."""
    description = own_description(manager)
    if description is not None:
        payload[PAYLOAD_KEY] = _of_the_engine(description)


def serve_descriptions(server: Any) -> None:
    """Make a bootstrap server keep prefill's description and hand it to decodes.

    A response header carries it because a decode without this agreement rejects bodies
    with keys that it does not know.
    """

    @web.middleware
    async def exchange(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/route":
            return await handler(request)
        if request.method == "PUT":
            _keep(server, (await request.json()).get(PAYLOAD_KEY))
        response = await handler(request)
        kept = getattr(server, "peer_description", None)
        if request.method == "GET" and kept is not None:
            response.headers[HEADER] = json.dumps(kept)
        return response

    server.app.middlewares.append(exchange)


def _keep(server: Any, description: Description | None) -> None:
    if description is None:
        return
    kept = getattr(server, "peer_description", None)
    if kept is None or "conflict" in kept:
        server.peer_description = kept or description
        return
    keys = sorted(
        key for key in kept | description if kept.get(key) != description.get(key)
    )
    if keys:
        parts = [f"{key}: {kept.get(key)} and {description.get(key)}" for key in keys]
        server.peer_description = {**kept, "conflict": "; ".join(parts)}
        logger.error("Prefill ranks describe themselves differently: %s", parts)


# -- decode side ----------------------------------------------------------------------


def ensure_prefill(manager: Any, bootstrap_addr: str) -> bool | None:
    """Fetch and check a prefill; False when to try again later, None to go on.

    The first statement of ``try_ensure_parallel_info``. A disagreement, ours or one that
    upstream raises for, becomes a refusal kept on the cached info instead of an
    exception that ends the engine. To catch the latter this enters the method once more
    and steps aside there (None).
    """
    if own_description(manager) is None or manager.__dict__.get("peer_check_is_on"):
        return None
    table = manager.prefill_info_table
    refused = refusal_of(manager, bootstrap_addr)
    if bootstrap_addr in table and (refused is None or not refused.is_stale):
        return True
    fetched = _fetch_prefill(bootstrap_addr)
    if fetched is None:
        return False
    info, theirs = fetched
    reason = _disagreement(manager, bootstrap_addr, info, theirs)
    if reason is None:
        table.pop(bootstrap_addr, None)
        manager.peer_check_is_on = True
        try:
            return manager.try_ensure_parallel_info(bootstrap_addr)
        except Exception as error:
            reason = f"[PD-UPSTREAM] {error}"
            logger.exception("Refusing prefill %s", bootstrap_addr)
        finally:
            manager.peer_check_is_on = False
    info.peer_refusal = Refusal(reason, time.monotonic(), bool(theirs.get("version")))
    table[bootstrap_addr] = info
    return True


def refusal_of(manager: Any, bootstrap_addr: str) -> Refusal | None:
    """The refusal cached for a prefill, or None."""
    return getattr(manager.prefill_info_table.get(bootstrap_addr), "peer_refusal", None)


def _fetch_prefill(bootstrap_addr: str):
    """(PrefillServerInfo, description) of a prefill, or None while it is not up."""
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    query = "&".join(
        f"{name}=-1"
        for name in (
            "prefill_dp_rank",
            "prefill_cp_rank",
            "target_tp_rank",
            "target_pp_rank",
        )
    )
    try:
        response = requests.get(
            f"http://{bootstrap_addr}/route?{query}", timeout=_HTTP_TIMEOUT_S
        )
        response.raise_for_status()
        body = response.json()
        known = {field.name for field in dataclasses.fields(PrefillServerInfo)}
        info = PrefillServerInfo(**{k: v for k, v in body.items() if k in known})
    except (requests.RequestException, TypeError, ValueError) as error:
        logger.error("Prefill %s is not ready: %s", bootstrap_addr, error)
        return None
    return info, _description_from(response.headers.get(HEADER), info)


def _description_from(header: str | None, info: Any) -> Description:
    """Prefill's own description, or what an unpatched one shows in its topology."""
    try:
        if header is not None:
            return dict(json.loads(header))
    except (TypeError, ValueError):
        logger.error("A prefill sent a malformed description: %.200s", header)
    return {
        **UNPATCHED,
        "page_size": info.page_size,
        "kv_dtype": info.kv_cache_dtype,
        "tp": info.attn_tp_size,
        "pp": info.pp_size,
        "cp": info.attn_cp_size,
    }


def _disagreement(manager, bootstrap_addr, info, theirs) -> str | None:
    verdicts = judge(decode=own_description(manager), prefill=theirs)
    say_once(manager, f"prefill {bootstrap_addr}", verdicts)
    if verdicts and verdicts[0].severity == REFUSE:
        return verdicts[0].text
    return None


def judge(*, decode: Description, prefill: Description) -> list[Verdict]:
    """`decide`, with a description that cannot be compared refused as such."""
    try:
        return decide(decode, prefill)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return [
            Verdict(
                "PD-MALFORMED",
                REFUSE,
                f"a description cannot be compared ({error})",
                "neither engine can check the other",
                "apply the same release of sglang-dspark-pd to both engines",
            )
        ]


def say_once(manager: Any, peer: str, verdicts: list[Verdict]) -> None:
    """Log each verdict once per peer: refusals as errors, the rest as warnings."""
    said = manager.__dict__.setdefault("peer_verdicts_said", {})
    for verdict in verdicts:
        if said.get((peer, verdict.code)) == verdict.message:
            continue
        if len(said) >= _MAX_SAID:
            said.clear()
        said[(peer, verdict.code)] = verdict.message
        if verdict.severity == REFUSE:
            logger.error("Refusing %s: %s", peer, verdict.text)
        else:
            logger.warning("About %s: %s", peer, verdict.text)


def refuse_request(receiver: Any, prefill_dp_rank: int) -> bool:
    """Fail a request whose prefill is refused; False when it may go on.

    The client gets the reason through the ordinary failure path; prefill is told so
    that it does not hold the request until its bootstrap timeout.
    """
    manager = receiver.kv_mgr
    refused = refusal_of(manager, receiver.bootstrap_addr)
    if refused is not None and refused.is_stale:
        ensure_prefill(manager, receiver.bootstrap_addr)
        refused = refusal_of(manager, receiver.bootstrap_addr)
    if refused is None:
        return False
    manager.record_failure(receiver.bootstrap_room, refused.reason)
    manager.update_status(receiver.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    try:
        _tell_prefill(receiver, refused, prefill_dp_rank)
    except Exception:
        logger.exception("Could not tell prefill about a refused request")
    return True


def _tell_prefill(receiver: Any, refused: Refusal, dp_rank: int) -> None:
    if dp_rank not in refused.contacts:
        refused.contacts[dp_rank] = _contacts(receiver, dp_rank)
    contacts = refused.contacts[dp_rank]
    room = str(receiver.bootstrap_room).encode("ascii")
    receiver.abort_notified = True
    if refused.prefill_is_patched:
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


def _contacts(receiver: Any, dp_rank: int) -> list[dict]:
    """Every rank of the prefill that may hold the request."""
    info = receiver.kv_mgr.prefill_info_table[receiver.bootstrap_addr]
    found = [
        receiver._get_bootstrap_info_from_server(dp_rank, cp, tp, pp)
        for cp in range(info.attn_cp_size)
        for tp in range(info.attn_tp_size)
        for pp in range(info.pp_size)
    ]
    return [contact for contact in found if contact is not None]


# -- exchange 2: decode -> prefill ----------------------------------------------------


def add_description(manager: Any, message: list[bytes]) -> list[bytes]:
    """Append decode's description to a registration message, as its last frame.

    The frame is recognised by its first bytes, never by its index. Only backends whose
    prefill side looks for it get it.
    """
    description = own_description(manager)
    if description and description.get("backend") in BACKENDS_WITH_ADMISSION:
        message.append(FRAME_MAGIC + json.dumps(description).encode("utf-8"))
    return message


class DescribingSocket:
    """A socket whose registration messages end with decode's description.

    For releases that build and send the message in one expression.
    """

    def __init__(self, manager: Any, socket: Any) -> None:
        self._manager = manager
        self._socket = socket

    def send_multipart(self, parts: list[bytes]) -> None:
        self._socket.send_multipart(add_description(self._manager, list(parts)))
