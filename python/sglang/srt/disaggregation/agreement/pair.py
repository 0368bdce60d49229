"""One decode and one prefill, as the rules see them, and what a rule is.

A description is a plain JSON object (`description.describe`). A missing key means "not
known", and a rule that needs that key does not apply. A prefill without this agreement
is described by `UNDESCRIBED` and by what any SGLang bootstrap server tells.

Pure standard library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Description = dict[str, Any]

# Changes when the meaning of a key changes, or when a key goes.
PROTOCOL_VERSION = 2
UNDESCRIBED: Description = {"version": 0}

REFUSE = "refuse"
WARN = "warn"
NOTE = "note"
SEVERITIES = (REFUSE, WARN, NOTE)

SAME_BUILD = "run the same build of SGLang on both engines"
SAME_FLAG = "start both engines with the same value"


def look_up(description: Description, path: str) -> Any:
    """Value at a dotted path such as ``dspark.layer_ids``; None when not known."""
    value: Any = description
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def differing_parts(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Of two objects the keys that both have and that differ; other values as is."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return ours, theirs
    keys = [key for key in ours if key in theirs and ours[key] != theirs[key]]
    return {k: ours[k] for k in keys}, {k: theirs[k] for k in keys}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One decode and one prefill description, with the questions rules ask of them."""

    decode: Description
    prefill: Description

    def both(self, path: str) -> tuple[Any, Any]:
        """(prefill value, decode value) at a dotted path."""
        return look_up(self.prefill, path), look_up(self.decode, path)

    def differ(self, path: str) -> bool:
        """True when both values are known and unequal.

        Objects are compared key by key: what one engine leaves out is not known.
        """
        ours, theirs = differing_parts(*self.both(path))
        return ours is not None and theirs is not None and ours != theirs

    @property
    def described(self) -> bool:
        return bool(self.prefill.get("version")) and bool(self.decode.get("version"))

    @property
    def undescribed_prefill(self) -> bool:
        return not self.prefill.get("version") and bool(self.decode.get("version"))

    @property
    def prefill_mode(self) -> str:
        return self.prefill.get("mode") or "none"

    @property
    def decode_drafts(self) -> bool:
        """Decode runs DSPARK; other algorithms are SGLang's business."""
        return self.decode.get("algorithm") == "DSPARK"

    @property
    def has_draft(self) -> bool:
        """One of the engines keeps draft KV; drafting from n-grams needs none."""
        return any(name not in (None, "NGRAM") for name in self.both("algorithm"))

    @property
    def native(self) -> bool:
        """Draft KV is transferred."""
        return self.described and self.prefill_mode == "native" and self.decode_drafts

    @property
    def cold(self) -> bool:
        """Decode would draft without any context from this prefill."""
        return (
            self.described
            and self.decode_drafts
            and self.prefill_mode == "none"
            and self.prefill.get("algorithm") is None
        )

    @property
    def cold_allowed(self) -> bool:
        return bool(self.decode.get("allow_cold_draft"))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one rule says about one pair of engines."""

    code: str
    severity: str
    message: str
    consequence: str
    fix: str

    @property
    def text(self) -> str:
        """One line for logs and for the client: statement, consequence, fix."""
        return (
            f"[{self.code}] {self.message}. Consequence: {self.consequence}. "
            f"Fix: {self.fix}."
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of the tables (`rules`).

    `about` is the dotted path of the two values that the message shows, `says` the
    statement, `leads_to` its consequence, `fix` what to change. `absent` is what the
    message shows in place of a value that is not there.
    """

    code: str
    severity: str
    about: str
    applies: Callable[[Pair], bool]
    says: str
    leads_to: str
    fix: str
    absent: str = "unknown"

    def verdict(self, pair: Pair) -> Verdict:
        prefill, decode = (
            self.absent if value is None else _shown(value)
            for value in differing_parts(*pair.both(self.about))
        )
        message = (
            f"{self.says}: prefill has {self.about}={prefill}, "
            f"decode has {self.about}={decode}"
        )
        return Verdict(self.code, self.severity, message, self.leads_to, self.fix)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k}={v}" for k, v in value.items()) + ")"
    return str(value)


def equal(code, path, says, leads_to, fix, *, when="any") -> Rule:
    """Refuse pairs whose values at `path` are known and differ.

    Args:
        when: ``any`` pair, or only those with this property of `Pair`.
    """

    def applies(pair: Pair) -> bool:
        return pair.differ(path) and (when == "any" or getattr(pair, when))

    return Rule(code, REFUSE, path, applies, says, leads_to, fix)
