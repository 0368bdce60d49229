"""What a prefill and a decode engine must agree on, as one table.

Life cycle: both engines describe themselves once (`peer_description.py`), the two
descriptions meet at the bootstrap server and in the registration message
(`peer_agreement.py`), and `decide` turns the pair into verdicts. The engines act on
the first refusal, `dspark-pd doctor` prints all verdicts before there is traffic, and
the documentation page is generated from the same rows.

Pure standard library on purpose: the doctor loads this file by path on a machine that
has neither torch nor SGLang. A description is a plain JSON object; a missing key means
"not known", and no rule fires on what is not known. An engine without this agreement
is described by `UNPATCHED` plus whatever facts it shows anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Description = dict[str, Any]

PROTOCOL_VERSION = 1
UNPATCHED: Description = {"version": 0}

REFUSE = "refuse"
WARN = "warn"
NOTE = "note"
SEVERITIES = (REFUSE, WARN, NOTE)

ALLOW_COLD_DRAFT = "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT"
ALLOW_PARTIAL_CONTEXT = "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT"
TAIL_TOKENS = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
LAYER_IDS = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"
PEER_DRAFT_TOKENS = "SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS"

# How a pipeline stage finds its layers in a whole decode when no layer ids are there:
# where the stage begins; by a guess that a draft on either engine misleads; not at all.
STAGES_BY_POSITION = "position"
STAGES_GUESSED = "guess"
STAGES_MISSED = "none"

COLD = (
    "the draft starts without the prompt's context: output stays correct, accept "
    "length falls and nothing else reports it"
)


def look_up(description: Description, path: str) -> Any:
    """Value at a dotted path such as ``dspark.layer_ids``; None when not known."""
    value: Any = description
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def differing_parts(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Of two objects the keys that both know and that differ; other values as is."""
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
    def prefill_mode(self) -> str:
        return self.prefill.get("mode") or "none"

    @property
    def decode_drafts(self) -> bool:
        """Decode runs DSPARK (other algorithms are upstream's business)."""
        return self.decode.get("algorithm") == "DSPARK"

    @property
    def has_draft(self) -> bool:
        """An engine keeps draft KV; drafting from n-grams needs none."""
        return any(name not in (None, "NGRAM") for name in self.both("algorithm"))

    @property
    def native(self) -> bool:
        """Draft KV is transferred; a decode that can take a tail takes this too."""
        return self.described and self.prefill_mode == "native" and self.decode_drafts

    @property
    def tail(self) -> bool:
        return (
            self.described
            and self.prefill_mode == "tail"
            and self.decode.get("mode") == "tail"
        )

    @property
    def cold(self) -> bool:
        """Decode would draft without any context from this prefill."""
        return self.described and self.decode_drafts and self.prefill_mode == "none"

    @property
    def cold_allowed(self) -> bool:
        """The opt-out, set on the engine that would have to refuse."""
        engine = self.decode if self.decode.get("version") else self.prefill
        return bool(engine.get("allow_cold_draft"))

    @property
    def extra_decode_entries(self) -> int | None:
        """KV regions decode registered beyond prefill's; None when not comparable.

        A pipeline stage registers its own layers only, so its count says nothing.
        """
        src, dst = self.both("kv_entries")
        if src is None or dst is None or (self.prefill.get("pp") or 1) > 1:
            return None
        return dst - src

    @property
    def short_tail(self) -> bool:
        """The tail covers less context than the draft reads."""
        if not self.tail:
            return False
        dspark = self.decode.get("dspark") or {}
        if "window_need" not in dspark:
            return False
        need = dspark["window_need"]
        have = look_up(self.prefill, "dspark.tail_tokens")
        # No window: the draft attends to the whole prompt.
        return need is None or (have is not None and have < need)

    @property
    def short_tail_allowed(self) -> bool:
        """Both engines consent to a short tail, of a length that they can start with.

        A length that is not known is -1, which only a window can resolve. A prefill
        that knows no draft has nothing to consent to.
        """
        if look_up(self.prefill, "dspark.tail_tokens") is None:
            return False
        knows_draft = "window_need" in (self.prefill.get("dspark") or {})
        engines = (self.decode, self.prefill) if knows_draft else (self.decode,)
        return all(engine.get("allow_partial_context") for engine in engines)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    `about` is the dotted path whose two values the message shows; `says` is the
    statement, `leads_to` its consequence, `fix` what to change. `absent` is what the
    message shows for a value that is not there.
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
        return Verdict(
            self.code,
            self.severity,
            f"{self.says}: prefill has {self.about}={prefill}, "
            f"decode has {self.about}={decode}",
            self.leads_to,
            self.fix,
        )


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


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k}={v}" for k, v in value.items()) + ")"
    return str(value)


def differs(path: str, *, when: str = "described") -> Callable[[Pair], bool]:
    """Condition of a row: both values known and unequal, on pairs that are `when`."""
    return lambda pair: bool(getattr(pair, when)) and pair.differ(path)
