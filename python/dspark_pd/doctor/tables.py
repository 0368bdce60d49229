"""The engines' own decision tables, loaded from the overlay without SGLang.

The tables are pure standard library on purpose. Their folders are loaded under package
names of our own: the packages they belong to in SGLang need torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, Final

from dspark_pd.doctor.engine import ERROR, NOTE, WARNING, Engine, Finding
from dspark_pd.patchset.patch_set import default_overlay

_AGREEMENT: Final = "srt/disaggregation/agreement"
_FOLDERS: Final = {
    "rules": _AGREEMENT,
    "description": _AGREEMENT,
    "handoff_refusals": "srt/speculative/dspark_components",
}
_SEVERITIES: Final = {"refuse": ERROR, "warn": WARNING, "note": NOTE}


def load(name: str) -> Any:
    """Return the module ``name``, one of ``_FOLDERS``, of this tool's overlay."""
    folder = default_overlay() / _FOLDERS[name]
    package = f"dspark_pd_overlay_{folder.name}"
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
    return importlib.import_module(f"{package}.{name}")


def agreement_findings(prefill: Engine, decode: Engine) -> list[Finding]:
    """What the engines would say of each other, and what nobody would say.

    An engine that describes itself sees whether the other one does. What it cannot see
    is compared here all the same, and so are two engines of which neither does.
    """
    try:
        verdicts = _decide(prefill, decode)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return [_malformed(error)]
    found = {verdict.code: verdict for verdict in reversed(verdicts)}
    return [
        Finding(v.code, _SEVERITIES[v.severity], v.message, v.consequence, v.fix)
        for v in reversed(found.values())
    ]


def tail_findings(engine: Engine) -> list[Finding]:
    """What the engine would refuse at its start, if it is to hand over a tail.

    That needs the environment, so a running engine is not asked: it was not refused.
    """
    if engine.environ is None:
        return []
    table = load("handoff_refusals")
    role = engine.role
    leads_to = f"with the component handoff {role} refuses to start"
    return [
        Finding(f"DOC-{refusal.code}", ERROR, f"{role}: {says}", leads_to, fix)
        for refusal, says, fix in table.refusals(_facts(engine))
    ]


def why_no_tail(engine: Engine) -> str | None:
    """Why an engine that drafts on decode can take no tail; None where it can."""
    if engine.role != "decode" or not engine.drafts:
        return None
    reason: str | None = load("handoff_refusals").no_tail(_facts(engine))
    return reason


def _facts(engine: Engine) -> dict[str, Any]:
    facts: dict[str, Any] = load("handoff_refusals").facts_from(
        engine.args,
        engine.environ,
        engine.target_config,
        engine.draft_config,
        engine.args.get("disaggregation_mode") or engine.role,
    )
    return facts


def severity_of(rule: Any) -> str:
    """Return the doctor's word for the severity of a rule or verdict."""
    return _SEVERITIES[rule.severity]


def _decide(prefill: Engine, decode: Engine) -> list[Any]:
    decide = load("rules").decide
    verdicts = list(decide(decode.description, prefill.description))
    if decode.unpatched != prefill.unpatched:
        sides = (_as_seen(engine) for engine in (decode, prefill))
        verdicts = [*decide(*sides), *verdicts]
    return verdicts


def _malformed(error: Exception) -> Finding:
    (code,) = (c for c in load("rules").RUNTIME_CODES if c.code == "PD-MALFORMED")
    detail = f"{type(error).__name__}: {error}"
    leads_to = "the engines would refuse each other"
    return Finding(code.code, ERROR, f"{code.meaning}: {detail}", leads_to, code.fix)


def _as_seen(engine: Engine) -> dict[str, Any]:
    """Its description as its peer gets it: without a version there is none."""
    if not engine.unpatched:
        return engine.description
    return {k: v for k, v in engine.description.items() if k != "version"}
