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

from dspark_pd.doctor_agreement import REFUSE, WARN, Finding

if TYPE_CHECKING:
    from dspark_pd.doctor_inputs import Engine

# From this release on a patched engine shows its description in /server_info.
SHOWN_SINCE = Version("0.5.22")
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_server(engine: Engine, timeout_s: float) -> dict[str, Any] | None:
    """Arguments of a running engine, and the description it gives its peers."""
    base = engine.source.rstrip("/")
    try:
        info = _get_json(f"{base}/server_info", timeout_s)
    except _NO_ANSWER as error:
        engine.problems.append(
            Finding(
                "DOC-UNREACHABLE",
                REFUSE,
                f"{engine.role} at {base} does not answer: {error}",
                "nothing can be compared",
                "check the address and that the engine has finished starting",
            )
        )
        return None
    engine.args = {
        key: value for key, value in info.items() if key != "internal_states"
    }
    engine.release = info.get("version")
    states = info.get("internal_states") or []
    shown = [s["peer_description"] for s in states if s.get("peer_description")]
    if shown:
        return dict(shown[0])
    if engine.role == "prefill":
        return _ask_bootstrap_server(engine, timeout_s)
    if states and _shows_its_description(engine.release):
        _note_unpatched(engine)
    return None


def _shows_its_description(release: str | None) -> bool:
    try:
        return Version(release or "0") >= SHOWN_SINCE
    except InvalidVersion:
        return False


def _ask_bootstrap_server(engine: Engine, timeout_s: float) -> dict[str, Any] | None:
    """What a running prefill tells its decodes."""
    host = urlsplit(engine.source).hostname
    port = engine.args.get("disaggregation_bootstrap_port")
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
        with _opener.open(
            f"http://{host}:{port}/route?{query}", timeout=timeout_s
        ) as r:
            header = r.headers.get("X-SGLang-Peer-Description")
            if header:
                return dict(json.loads(header))
    except _NO_ANSWER as error:
        engine.problems.append(
            Finding(
                "DOC-BOOTSTRAP",
                WARN,
                f"prefill's bootstrap server at {host}:{port} does not answer: {error}",
                "decodes cannot reach this prefill, or it is behind another address",
                "open the port given by --disaggregation-bootstrap-port",
            )
        )
        return None
    _note_unpatched(engine)
    return None


def _note_unpatched(engine: Engine) -> None:
    engine.unpatched = True
    engine.problems.append(
        Finding(
            "DOC-UNPATCHED",
            WARN,
            f"{engine.role} does not describe itself to its peers",
            "engines that disagree hang or draft cold instead of refusing each other",
            "apply sglang-dspark-pd to it and restart it",
        )
    )


def _get_json(url: str, timeout_s: float) -> dict[str, Any]:
    with _opener.open(url, timeout=timeout_s) as response:
        answer = json.loads(response.read())
    if not isinstance(answer, dict):
        raise ValueError(f"{url} did not answer with an object")
    return answer
