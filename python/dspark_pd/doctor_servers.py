"""Reads a running engine for the doctor; nothing but ``GET`` is sent.

Best is the description that an engine gives its peers: ``/server_info`` shows it from
SGLang 0.5.22 on, and a prefill's bootstrap server hands it out on every release. Without
it the arguments have to do, and whether the engine would describe itself is a finding.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from dspark_pd.doctor_releases import released, served_by, serves
from dspark_pd.doctor_remarks import remark

if TYPE_CHECKING:
    from dspark_pd.doctor_inputs import Engine

# From this release on a patched engine shows its description in /server_info.
SHOWN_SINCE = Version("0.5.22")
_NO_ANSWER = (OSError, ValueError, RecursionError, http.client.HTTPException)
_LOCKED = (401, 403)
_RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_server(
    engine: Engine, timeout_s: float, api_key: str | None = None
) -> dict[str, Any] | None:
    """Arguments of a running engine, and the description it gives its peers."""
    base = engine.source.rstrip("/")
    try:
        info = _get_json(f"{base}/server_info", timeout_s, api_key)
    except _NO_ANSWER as error:
        _note_silence(engine, error, api_key)
        return None
    states = info.pop("internal_states", None)
    states = [s for s in states if isinstance(s, dict)] if _is_list(states) else []
    engine.args = info
    release = info.get("version")
    engine.release = release if isinstance(release, str) else None
    for state in states:
        shown = state.get("peer_description")
        if isinstance(shown, dict) and shown:
            return shown
    if engine.role == "prefill":
        return _ask_bootstrap_server(engine, timeout_s)
    if states and _shows_its_description(engine.release):
        _note_unpatched(engine)
    return None


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _note_silence(engine: Engine, error: Exception, api_key: str | None) -> None:
    fields = {"role": engine.role, "source": engine.source.rstrip("/")}
    if isinstance(error, urllib.error.HTTPError) and error.code in _LOCKED:
        name = "wrong key" if api_key else "locked"
        row = remark(name, status=error.code, **fields)
    else:
        row = remark("unreachable", detail=error, **fields)
    engine.problems.append(row)


def _shows_its_description(release: str | None) -> bool:
    try:
        return Version(release or "0") >= SHOWN_SINCE
    except InvalidVersion:
        return False


def _ask_bootstrap_server(engine: Engine, timeout_s: float) -> dict[str, Any] | None:
    """What a running prefill tells its decodes."""
    host = urlsplit(engine.source).hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = engine.args.get("disaggregation_bootstrap_port")
    if not isinstance(port, int):
        engine.problems.append(remark("no bootstrap", source=engine.source))
        return None
    query = "&".join(f"{name}=-1" for name in _RANKS)
    address = f"http://{host}:{port}/route?{query}"
    try:
        with _opener.open(address, timeout=timeout_s) as answer:
            header = answer.headers.get("X-SGLang-Peer-Description")
            description = json.loads(header) if header else None
        if description is not None and not isinstance(description, dict):
            raise ValueError("its description is not an object")
    except _NO_ANSWER as error:
        row = remark("bootstrap", place=f"{host}:{port}", detail=error)
        engine.problems.append(row)
        return None
    if description:
        return dict(description)
    _note_unpatched(engine)
    return None


def _note_unpatched(engine: Engine) -> None:
    engine.unpatched = True
    release = released(engine.release)
    if release is None or serves("handshake", release):
        row = remark("unpatched", role=engine.role)
    else:
        served = served_by("handshake")
        row = remark("no handshake", role=engine.role, release=release, served=served)
    engine.problems.append(row)


def _get_json(url: str, timeout_s: float, api_key: str | None) -> dict[str, Any]:
    request = urllib.request.Request(url)
    if api_key:
        # Not to where a redirection may lead.
        request.add_unredirected_header("Authorization", f"Bearer {api_key}")
    with _opener.open(request, timeout=timeout_s) as response:
        answer = json.loads(response.read())
    if not isinstance(answer, dict):
        raise ValueError(f"{url} did not answer with an object")
    return answer
