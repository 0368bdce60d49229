"""What an engine of a tail handoff refuses at its start, asked before it is started.

The table is the overlay's own, ``handoff_refusals``; it is pure standard library. It
needs the environment, so a running engine is not asked: it was not refused.
"""

from __future__ import annotations

from typing import Any, Final

from dspark_pd.doctor.agreement import load_file
from dspark_pd.doctor.engine import ERROR, Engine, Finding
from dspark_pd.patchset.patch_set import default_overlay

_TABLE: Final = "srt/speculative/dspark_components/handoff_refusals.py"


def load_refusals() -> Any:
    """Return the module with REFUSALS, ``refusals`` and ``facts_from``."""
    return load_file(default_overlay() / _TABLE)


def tail_findings(engine: Engine) -> list[Finding]:
    """Findings on one engine whose arguments and environment are known."""
    if engine.environ is None:
        return []
    table = load_refusals()
    facts = table.facts_from(
        engine.args,
        engine.environ,
        engine.target_config,
        engine.draft_config,
        engine.args.get("disaggregation_mode") or engine.role,
    )
    role = engine.role
    leads_to = f"with the component handoff {role} refuses to start"
    return [
        Finding(f"DOC-{refusal.code}", ERROR, f"{role}: {says}", leads_to, fix)
        for refusal, says, fix in table.refusals(facts)
    ]
