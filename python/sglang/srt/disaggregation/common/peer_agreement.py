"""Agreement between a prefill and a decode engine, before and during traffic.

Life cycle:
1. Each engine describes itself when it builds its KV manager (`engine_facts.py`).
2. Prefill publishes its description at the bootstrap server; the server hands it on in
   a response header, which a decode without this agreement ignores (`publish`,
   `serve_descriptions`).
3. Decode compares on first contact and refuses a prefill that does not fit
   (`prefill_check.py`).
4. Decode's description travels in its registration message (`add_description`); what
   prefill does with it is in `peer_admission.py`.

Nothing here raises into a scheduler loop.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from aiohttp import web

from sglang.srt.disaggregation.common.log_limits import may_say
from sglang.srt.disaggregation.common.peer_agreement_rules import decide
from sglang.srt.disaggregation.common.peer_agreement_table import (
    REFUSE,
    UNPATCHED,
    Description,
    Verdict,
)
from sglang.srt.disaggregation.common.prefill_restart import (
    INSTANCE,
    INSTANCE_HEADER,
    new_instance,
)

logger = logging.getLogger(__name__)

HEADER = "X-SGLang-Peer-Description"
PAYLOAD_KEY = "peer_description"
FRAME_MAGIC = b"sglang-peer/1:"
REFUSED_TAG = b"PEER_REFUSED"
BACKENDS_WITH_ADMISSION = ("nixl", "mooncake")
# Facts of one rank, meaningless to the ranks of the other engine.
_RANK_FACTS = ("kv_entries", "draft_entries")
# Each rank's own permission; not something that ranks must agree on.
_SWITCHES = ("allow_cold_draft", "allow_partial_context")
_RANK_KEYS = ("system_dp_rank", "attn_dp_rank", "attn_cp_rank", "attn_tp_rank")
_MAX_RANKS = 4096
_MAX_SAID = 4096
_MAX_FRAME_BYTES = 65536


def own_description(manager: Any) -> Description | None:
    """What `engine_facts` attached; None for an engine that has none."""
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
        if request.path == "/route" and request.method == "PUT":
            _keep(server, await request.json())
        response = await handler(request)
        kept = getattr(server, "peer_description", None)
        if request.path == "/health":
            response.headers[INSTANCE_HEADER] = server.peer_instance
        elif request.path == "/route" and request.method == "GET" and kept is not None:
            shown = {**kept, INSTANCE: server.peer_instance}
            response.headers[HEADER] = json.dumps(shown)
        return response

    server.peer_instance = new_instance()
    server.app.middlewares.append(exchange)


def _keep(server: Any, payload: Any) -> None:
    """Keep a rank's description in place of its former one; renew the engine's."""
    if not isinstance(payload, dict) or not isinstance(payload.get(PAYLOAD_KEY), dict):
        return
    ranks = server.__dict__.setdefault("peer_descriptions", {})
    rank = tuple(str(payload.get(key)) for key in (*_RANK_KEYS, "pp_rank"))
    if rank not in ranks and len(ranks) >= _MAX_RANKS:
        return
    ranks[rank] = payload[PAYLOAD_KEY]
    before = (getattr(server, "peer_description", None) or {}).get("conflict")
    server.peer_description = merge_ranks(list(ranks.values()))
    conflict = server.peer_description.get("conflict")
    if conflict not in (None, before):
        logger.error("Prefill ranks describe themselves differently: %s", conflict)


def merge_ranks(ranks: list[Description]) -> Description:
    """One description of an engine from those of its ranks.

    What a rank does not know is not known of the engine; a permission holds if every
    rank has it; other keys must be equal, or they are named under ``conflict``.
    """
    shared = set.intersection(*(set(rank) for rank in ranks))
    merged = {key: value for key, value in ranks[0].items() if key in shared}
    parts = []
    for key in merged:
        values = [rank[key] for rank in ranks]
        if key in _SWITCHES:
            merged[key] = all(values)
        elif any(value != values[0] for value in values):
            other = next(value for value in values if value != values[0])
            parts.append(f"{key}: {values[0]} and {other}")
    return {**merged, "conflict": "; ".join(sorted(parts))} if parts else merged


# -- verdicts -------------------------------------------------------------------------


def judge(*, decode: Description, prefill: Description) -> list[Verdict]:
    """`decide`, with a description that cannot be compared refused as such."""
    try:
        return decide(decode, prefill)
    except Exception as error:
        return [
            Verdict(
                "PD-MALFORMED",
                REFUSE,
                f"a description cannot be compared ({type(error).__name__}: {error})",
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
        if not may_say(manager, verdict.code):
            continue
        if verdict.severity == REFUSE:
            logger.error("Refusing %s: %s", peer, verdict.text)
        else:
            logger.warning("About %s: %s", peer, verdict.text)


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


def take_description(message: list[bytes]) -> Description | None:
    """Remove decode's description from a registration; None when there is none.

    Raises ValueError or RecursionError for a frame that claims to be one and is not.
    """
    for index in range(len(message) - 1, 3, -1):
        if message[index].startswith(FRAME_MAGIC):
            frame = message.pop(index)
            if len(frame) > _MAX_FRAME_BYTES:
                raise ValueError(f"a description of {len(frame)} bytes")
            description = json.loads(frame[len(FRAME_MAGIC) :])
            if not isinstance(description, dict):
                raise ValueError("a description that is not an object")
            return description
    return None


def refuse_decode(
    manager: Any, agent: str, theirs: Description | None, kv_regions: int
) -> str | None:
    """Why prefill does not register a decode; None when it does.

    Args:
        theirs: decode's description, None when it sent none.
        kv_regions: how many KV regions it registers, which any decode shows.
    """
    ours = own_description(manager)
    if ours is None:
        return None
    if theirs is None:
        theirs = {**UNPATCHED, "kv_entries": kv_regions}
    verdicts = judge(decode=theirs, prefill=ours)
    say_once(manager, f"decode {agent}", verdicts)
    if verdicts and verdicts[0].severity == REFUSE:
        return verdicts[0].text
    return None
