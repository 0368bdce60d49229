"""The engines' own decision table, loaded from the overlay without SGLang.

The table is pure standard library on purpose. Its folder is loaded under a package name
of our own: the package it belongs to in SGLang needs torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from dspark_pd.patchset.patch_set import default_overlay

if TYPE_CHECKING:
    from dspark_pd.doctor_inputs import Engine

REFUSE = "refuse"
WARN = "warn"
NOTE = "note"

_PACKAGE = "dspark_pd_agreement"
_FOLDER = "srt/disaggregation/common"
_SWITCHES = ("allow_cold_draft", "allow_partial_context")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know about a pair of engines."""

    code: str
    severity: str
    message: str
    consequence: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def load(module: str) -> Any:
    """A pure module of the agreement, by name, from this tool's overlay."""
    folder = default_overlay() / _FOLDER
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(folder)]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{module}")


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
        Finding(v.code, v.severity, v.message, v.consequence, v.fix)
        for v in reversed(found.values())
    ]


def _decide(prefill: Engine, decode: Engine) -> list[Any]:
    rules = load("peer_agreement_rules")
    decide = rules.decide
    verdicts = list(decide(decode.description, prefill.description))
    if decode.unpatched != prefill.unpatched:
        sides = (_as_seen(engine) for engine in (decode, prefill))
        verdicts = [*decide(*sides), *verdicts]
    unknown = prefill.unknown | decode.unknown
    about = {row.code: row.about for row in rules.ENGINE_RULES + rules.DRAFT_RULES}
    verdicts = [v for v in verdicts if about[v.code].partition(".")[0] not in unknown]
    for switch in _SWITCHES:
        if switch in decode.unknown:
            # With the switch on it would not be refused, and nobody knows.
            other = decide({**decode.description, switch: True}, prefill.description)
            codes = {verdict.code for verdict in other}
            verdicts = [v for v in verdicts if v.severity != REFUSE or v.code in codes]
    return verdicts


def _malformed(error: Exception) -> Finding:
    (row,) = (
        code
        for code in load("peer_agreement_codes").RUNTIME_CODES
        if code.code == "PD-MALFORMED"
    )
    detail = f"{type(error).__name__}: {error}"
    leads_to = "the engines would refuse each other"
    return Finding(row.code, REFUSE, f"{row.meaning}: {detail}", leads_to, row.fix)


def _as_seen(engine: Engine) -> dict[str, Any]:
    """Its description as its peer gets it: without a version there is none."""
    if not engine.unpatched:
        return engine.description
    return {k: v for k, v in engine.description.items() if k != "version"}
