"""Reads a running engine for the doctor; nothing but ``GET`` is sent.

Best is the description that an engine gives its peers: ``/server_info`` shows it from
SGLang 0.5.22 on, and a prefill's bootstrap server hands it out on every release. Without
it the arguments have to do.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from dspark_pd.messages.errors import refuse

_NO_ANSWER: Final = (OSError, ValueError, RecursionError, http.client.HTTPException)
_LOCKED: Final = (401, 403)
_RANKS: Final = (
    "prefill_dp_rank",
    "prefill_cp_rank",
    "target_tp_rank",
    "target_pp_rank",
)
_HEADER: Final = "X-SGLang-Peer-Description"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoBootstrapServer(Exception):
    """A prefill's bootstrap server gives no answer; ``place`` is its address."""

    def __init__(self, place: str, detail: object) -> None:
        super().__init__(str(detail))
        self.place = place


def server_info(
    role: str, address: str, timeout_s: float, api_key: str | None
) -> dict[str, Any]:
    """Return what the engine says of itself; refuse with T106 where nothing does."""
    request = urllib.request.Request(f"{address.rstrip('/')}/server_info")
    if api_key:
        # Not to where a redirection may lead.
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    try:
        with _opener.open(request, timeout=timeout_s) as response:
            kind = response.headers.get_content_type()
            body = response.read()
    except _NO_ANSWER as error:
        _refuse(role, address, error, api_key)
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        found = f"an answer that is no JSON object ({kind}, {len(body)} bytes)"
        not_an_engine(role, address, found)
    return answer


def not_an_engine(role: str, address: str, found: str) -> NoReturn:
    """Refuse an address at which something else answers."""
    cause = "a router, a proxy or another program at this address"
    hint = f"give the address of the {role} engine itself"
    refuse("T106", role=role, source=address, found=found, cause=cause, hint=hint)


def _refuse(role: str, address: str, error: Exception, key: str | None) -> NoReturn:
    found, cause = str(error) or type(error).__name__, "a mistyped address"
    hint = f"curl {address.rstrip('/')}/server_info"
    if not isinstance(error, urllib.error.HTTPError):
        cause += ", or an engine that has not finished starting"
    elif error.code in _LOCKED:
        found = (
            f"it {'refuses the' if key else 'asks for an'} API key (HTTP {error.code})"
        )
        cause = "the key in the variable is another one" if key else "no key was given"
        hint = "give --api-key-env NAME, where the variable NAME holds the key"
    else:
        cause += ", or no SGLang engine there"
    refuse("T106", role=role, source=address, found=found, cause=cause, hint=hint)


def bootstrap_description(
    address: str, port: int, timeout_s: float
) -> dict[str, Any] | None:
    """Return what a running prefill tells its decodes; None where it tells nothing."""
    host = urlsplit(address).hostname or ""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    query = "&".join(f"{name}=-1" for name in _RANKS)
    try:
        with _opener.open(f"http://{place}/route?{query}", timeout=timeout_s) as answer:
            header = answer.headers.get(_HEADER)
            description = json.loads(header) if header else None
        if description is not None and not isinstance(description, dict):
            raise ValueError("its description is not an object")
    except _NO_ANSWER as error:
        raise NoBootstrapServer(place, error) from None
    return description or None
