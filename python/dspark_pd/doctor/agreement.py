"""The engines' own decision table, loaded from the overlay without SGLang.

The table is pure standard library on purpose. Its folder is loaded under a package name
of our own: the package it belongs to in SGLang needs torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, Final

from dspark_pd.doctor.engine import ERROR, NOTE, WARNING, Engine, Finding
from dspark_pd.patchset.patch_set import default_overlay

_PACKAGE: Final = "dspark_pd_agreement"
_FOLDER: Final = "srt/disaggregation/agreement"
_SEVERITIES: Final = {"refuse": ERROR, "warn": WARNING, "note": NOTE}


def load(module: str) -> Any:
    """Return ``rules`` or ``description`` of the agreement from this tool's overlay."""
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(default_overlay() / _FOLDER)]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{module}")


def load_file(path: Path) -> Any:
    """Return a module of the overlay that imports nothing but the standard library."""
    name = f"dspark_pd_overlay_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


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
