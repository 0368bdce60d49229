"""What could not be compared, because only one engine's value of it is known.

A rule does not apply to what is not known, so a pair of which little is known would pass
without a word. What neither engine tells is left out: both then have SGLang's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dspark_pd.doctor.engine import Engine, Finding
from dspark_pd.doctor.remarks import remark

_VALUES: Final = {
    "page_size": "page size",
    "kv_dtype": "KV dtype",
    "backend": "transfer backend",
    "target": "model",
}
# Of two engines that draft.
_DRAFT_VALUES: Final = {
    "block_size": "block size",
    "draft": "draft",
    "draft_weights": "draft weights",
}


def gap_findings(prefill: Engine, decode: Engine) -> list[Finding]:
    """Return one finding that names all of it, or none."""
    values = [*_one_sided(prefill, decode), *_paths(prefill, decode)]
    return [remark("not compared", values="; ".join(values))] if values else []


def _one_sided(prefill: Engine, decode: Engine) -> Iterator[str]:
    draft = _DRAFT_VALUES if prefill.drafts and decode.drafts else {}
    for key, name in {**_VALUES, **draft}.items():
        known = [e.role for e in (prefill, decode) if e.description.get(key)]
        if len(known) == 1:
            yield f"{name} (known of {known[0]} only)"


def _paths(prefill: Engine, decode: Engine) -> Iterator[str]:
    """Paths that differ, of models that are not compared: they may be the same ones."""
    places = [("model_path", "target", "model")]
    if prefill.drafts and decode.drafts:
        places.append(("speculative_draft_model_path", "draft_weights", "draft"))
    for field, key, name in places:
        first, second = (engine.args.get(field) for engine in (prefill, decode))
        compared = all(engine.description.get(key) for engine in (prefill, decode))
        if first and second and first != second and not compared:
            yield f"{name} paths that differ ({first} and {second})"
