"""Prefill's side of the agreement: its description reaches every decode that asks.

Life cycle: each prefill rank adds its description to its bootstrap registration
(`publish`). The bootstrap server, made in one process of the engine, keeps those of all
ranks and shows one for the engine in the answers that decodes ask for on first contact
(`serve_descriptions`). It also names its own start there and in its health answers, so
that a decode can tell a restarted prefill from the one it knew.

A header carries both, because a decode rejects an answer whose body has keys that it does
not know. What decode makes of it is in ``decode_side``.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from sglang.srt.disaggregation.agreement.description import (
    DESCRIPTION_KEY,
    HEADER,
    INSTANCE,
    INSTANCE_HEADER,
)
from sglang.srt.disaggregation.agreement.engine_facts import own_description
from sglang.srt.disaggregation.agreement.pair import Description

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import (
        CommonKVBootstrapServer,
        CommonKVManager,
    )

logger = logging.getLogger(__name__)

# Of keys for each rank's own permission; not something that ranks must agree on.
_SWITCH = "allow_"
_RANK = ("system_dp_rank", "attn_dp_rank", "attn_cp_rank", "attn_tp_rank", "pp_rank")


def publish(manager: CommonKVManager, payload: dict[str, Any]) -> None:
    """Add this prefill rank's description to its bootstrap registration."""
    description = own_description(manager)
    if description is not None:
        payload[DESCRIPTION_KEY] = description


def serve_descriptions(server: CommonKVBootstrapServer) -> None:
    """Make a bootstrap server show prefill's description and its own instance.

    Called while its routes are set up; middlewares are fixed once it runs.
    """
    served = ServedDescription()

    @web.middleware
    async def show(
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if request.path == "/route" and request.method == "PUT":
            served.keep(await request.json())
        response = await handler(request)
        if request.path == "/health":
            response.headers[INSTANCE_HEADER] = served.instance
        elif request.path == "/route" and request.method == "GET":
            shown = served.shown()
            if shown is not None:
                response.headers[HEADER] = json.dumps(shown)
        return response

    server.app.middlewares.append(show)


class ServedDescription:
    """What one start of a bootstrap server knows about its engine."""

    def __init__(self) -> None:
        self.instance = uuid.uuid4().hex
        self._ranks: dict[tuple, Description] = {}

    def keep(self, payload: Any) -> None:
        """Take a rank's description from its registration, in place of its former."""
        description = (
            payload.get(DESCRIPTION_KEY) if isinstance(payload, dict) else None
        )
        if not isinstance(description, dict):
            return
        self._ranks[tuple(payload.get(key) for key in _RANK)] = description
        conflict = merge_ranks(list(self._ranks.values())).get("conflict")
        if conflict is not None:
            logger.error(f"Prefill ranks describe themselves differently: {conflict}")

    def shown(self) -> Description | None:
        """The engine's description; None for an engine without this agreement."""
        if not self._ranks:
            return None
        return {**merge_ranks(list(self._ranks.values())), INSTANCE: self.instance}


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
        if key.startswith(_SWITCH):
            merged[key] = all(values)
        elif any(value != values[0] for value in values):
            other = next(value for value in values if value != values[0])
            parts.append(f"{key}: {values[0]} and {other}")
    return {**merged, "conflict": "; ".join(sorted(parts))} if parts else merged
