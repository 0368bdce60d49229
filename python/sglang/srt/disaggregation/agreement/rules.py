"""The rules that decide whether a decode engine works with a prefill engine.

`decide` turns two descriptions into verdicts. Decode acts on the first refusal,
``dspark-pd doctor`` prints all verdicts before there is traffic, and the documentation
page is generated from the same tables. A rule is data: a code, a severity, the value that
it is about, when it applies, and the three sentences that a user reads.

A description is a plain JSON object (`description.describe`). A missing key means "not
known", and a rule that needs that key does not apply. A prefill without this agreement
is described by `UNPATCHED` and by what any SGLang bootstrap server tells.

Pure standard library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

Description = dict[str, Any]

# Changes when the meaning of a key changes, or when a key goes.
PROTOCOL_VERSION = 2
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

# How a pipeline stage finds its layers in a decode that has all of them, when the engines
# do not exchange layer ids: from where the stage begins; by a guess that is wrong as soon
# as one engine has a draft; not at all.
STAGES_BY_POSITION = "position"
STAGES_GUESSED = "guess"
STAGES_MISSED = "none"

CHECKSUM_BUFFER = "kv_checksum"
COLD = (
    "the draft starts without the prompt's context: output stays correct, accept "
    "length drops, and nothing else reports it"
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
    def unpatched_prefill(self) -> bool:
        return not self.prefill.get("version") and bool(self.decode.get("version"))

    @property
    def prefill_mode(self) -> str:
        return self.prefill.get("mode") or "none"

    @property
    def decode_drafts(self) -> bool:
        """Decode runs DSPARK; other algorithms are upstream's business."""
        return self.decode.get("algorithm") == "DSPARK"

    @property
    def has_draft(self) -> bool:
        """One of the engines keeps draft KV; drafting from n-grams needs none."""
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
        return (
            self.described
            and self.decode_drafts
            and self.prefill_mode == "none"
            and self.prefill.get("algorithm") is None
        )

    @property
    def cold_allowed(self) -> bool:
        return bool(self.decode.get("allow_cold_draft"))

    @property
    def short_tail(self) -> bool:
        """The tail covers less context than the draft reads."""
        dspark = self.decode.get("dspark") or {}
        if not self.tail or "window_need" not in dspark:
            return False
        need = dspark["window_need"]
        have = look_up(self.prefill, "dspark.tail_tokens")
        # No window: the draft attends to the whole prompt.
        return need is None or (have is not None and have < need)

    @property
    def must_cover(self) -> bool:
        return bool(look_up(self.decode, "dspark.must_cover"))

    @property
    def short_tail_allowed(self) -> bool:
        """Both engines accept a short tail, of a length that they can start with.

        A length that is not known is -1, which only a window can resolve. A prefill
        that knows no draft has nothing to accept.
        """
        if look_up(self.prefill, "dspark.tail_tokens") is None:
            return False
        knows_draft = "window_need" in (self.prefill.get("dspark") or {})
        engines = (self.decode, self.prefill) if knows_draft else (self.decode,)
        return all(engine.get("allow_partial_context") for engine in engines)


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
    """One line of the tables below.

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


# -- conditions that compare more than one value ----------------------------------------


def _ranks_do_not_divide(pair: Pair) -> bool:
    prefill, decode = pair.both("tp")
    return None not in (prefill, decode) and bool(
        max(prefill, decode) % min(prefill, decode)
    )


def _stages_do_not_pair(pair: Pair) -> bool:
    prefill, decode = pair.both("pp")
    return None not in (prefill, decode) and decode not in (1, prefill)


def _stages_miss_their_layers(pair: Pair) -> bool:
    stages = [size or 1 for size in pair.both("pp")]
    ids = pair.both("kv_layer_ids")
    if not pair.described or stages[0] <= stages[1] or None in ids or all(ids):
        return False
    pairing = pair.prefill.get("stage_pairing")
    if any(ids):  # one engine reports ids and the other none: both backends raise
        return pairing is not None
    if pairing == STAGES_GUESSED:
        return pair.has_draft
    return pairing == STAGES_MISSED


def _checksum_on_one_engine(pair: Pair) -> bool:
    """One engine has all buffers of the other, then the checksum as its last."""
    shorter, longer = sorted((aux or [] for aux in pair.both("aux")), key=len)
    return (
        pair.described
        and len(longer) == len(shorter) + 1
        and longer[:-1] == shorter
        and longer[-1].partition(":")[0] == CHECKSUM_BUFFER
    )


def _aux_layouts_clash(pair: Pair) -> bool:
    """Names must agree always; widths where DSPARK or a tail takes part.

    The draft's hidden state is the one buffer whose width follows the algorithm, and
    what other algorithms do with it on one engine alone is not ours to refuse.
    """
    if not (pair.described and pair.differ("aux")) or _checksum_on_one_engine(pair):
        return False
    names = [[entry.partition(":")[0] for entry in aux] for aux in pair.both("aux")]
    ours = "DSPARK" in pair.both("algorithm") or pair.prefill_mode == "tail"
    return names[0] != names[1] or ours


def _algorithms_clash(pair: Pair) -> bool:
    return pair.differ("algorithm") and "DSPARK" in pair.both("algorithm")


def _draft_only_on_prefill(pair: Pair) -> bool:
    speculates = pair.decode.get("algorithm") is not None
    return pair.described and pair.prefill_mode != "none" and not speculates


def _draft_heads_unsliceable(pair: Pair) -> bool:
    """With unequal sizes KV is cut for the target, and draft KV along with it.

    An MLA target is not cut at all: each rank's KV is whole, and a dense draft's is not
    unless it has one head.
    """
    if not (pair.native and pair.differ("tp")):
        return False
    draft, target = pair.decode.get("draft_heads"), pair.decode.get("target_heads")
    attention = pair.decode.get("attention")
    if attention == "mha":
        return None not in (draft, target) and draft != target
    is_dense = pair.decode.get("draft_attention") == "mha"
    return attention is not None and is_dense and draft is not None and draft[0] > 1


def _draft_hides_values(pair: Pair) -> bool:
    """Mooncake's guess where values begin, when only decode has a draft.

    Right while the draft has fewer layers than the target.
    """
    target = look_up(pair.decode, "target.layers")
    draft = look_up(pair.decode, "draft.layers")
    return (
        pair.cold
        and pair.decode.get("backend") == "mooncake"
        and pair.decode.get("attention") == "mha"
        and False in pair.both("kv_layer_ids")
        and None not in (target, draft)
        and draft >= target
    )


def _tail_with_context_parallel(pair: Pair) -> bool:
    sizes = [pair.prefill.get("cp"), *pair.both("dcp")]
    return pair.tail and any((size or 1) > 1 for size in sizes)


# -- the rules --------------------------------------------------------------------------

_SAME_RELEASE = "apply the same release of sglang-dspark-pd to both engines"
_PATCH_PREFILL = "apply sglang-dspark-pd to prefill as well"
_SAME_FLAG = "start both engines with the same value"
_DRAFT_ON_PREFILL = (
    "start prefill with --speculative-algorithm DSPARK and the decode engine's draft"
)
_KV_MISREAD = "KV bytes would be misread"
_STATES_MISREAD = "hidden states would be misread"
_SHORT_CONTEXT = (
    "output stays correct, accept length drops on prompts longer than the tail"
)


def _equal(code, path, says, leads_to, fix, *, when="any") -> Rule:
    """Refuse pairs whose values at `path` are known and differ.

    Args:
        when: ``any`` pair, or only those with this property of `Pair`.
    """

    def applies(pair: Pair) -> bool:
        return pair.differ(path) and (when == "any" or getattr(pair, when))

    return Rule(code, REFUSE, path, applies, says, leads_to, fix)


# The first refusal in the order of these tables is the one that decode reports.
ENGINE_RULES: tuple[Rule, ...] = (
    # -- can decode compare at all --------------------------------------------------
    _equal(
        "PD-VERSION",
        "version",
        "the engines use different versions of the description that they compare",
        "decode cannot check prefill",
        _SAME_RELEASE,
        when="described",
    ),
    Rule(
        "PD-RANKS",
        REFUSE,
        "conflict",
        lambda p: bool(p.prefill.get("conflict")),
        "the ranks of the prefill engine describe themselves differently",
        "the result of a request would depend on the rank that serves it",
        "start every rank of the prefill engine with the same flags and environment",
    ),
    Rule(
        "PD-UNPATCHED-PREFILL",
        REFUSE,
        "version",
        lambda p: p.unpatched_prefill and p.decode_drafts and not p.cold_allowed,
        "decode runs DSPARK, and the prefill engine does not describe itself (SGLang "
        "without sglang-dspark-pd)",
        "decode cannot tell whether draft context will arrive; if it does not, accept "
        "length drops while output stays correct",
        f"{_PATCH_PREFILL}, or skip the check with {ALLOW_COLD_DRAFT}=1 on decode",
    ),
    Rule(
        "PD-UNPATCHED-PREFILL-ALLOWED",
        WARN,
        "version",
        lambda p: p.unpatched_prefill and p.decode_drafts and p.cold_allowed,
        "decode runs DSPARK with a prefill engine that does not describe itself",
        "if no draft context arrives, accept length drops while output stays correct",
        _PATCH_PREFILL,
    ),
    Rule(
        "PD-UNPATCHED-PREFILL-PLAIN",
        WARN,
        "version",
        lambda p: p.unpatched_prefill and not p.decode_drafts,
        "the prefill engine does not describe itself (SGLang without sglang-dspark-pd)",
        "if it runs a speculative algorithm, its bootstrap thread dies when this decode "
        "registers, and its requests wait for their timeout",
        _PATCH_PREFILL,
    ),
    # -- the target's KV ------------------------------------------------------------
    _equal(
        "PD-BACKEND",
        "backend",
        "the engines use different transfer backends",
        "prefill cannot read decode's registration",
        "give both engines the same --disaggregation-transfer-backend",
    ),
    _equal(
        "PD-ALLOCATION",
        "allocation_policy",
        "the engines reserve decode's KV at different points of a request",
        "decode rejects every request, and prefill holds it until its timeout",
        "give both engines the same --disaggregation-decode-allocation-policy",
    ),
    _equal(
        "PD-TARGET",
        "target",
        "the engines serve different target models",
        "KV of one model would be read as KV of the other",
        "give both engines the same --model-path",
    ),
    _equal(
        "PD-PAGE-SIZE",
        "page_size",
        "the engines have different KV page sizes",
        "a page index of one engine means other tokens on the other",
        "give both engines the same --page-size",
    ),
    _equal(
        "PD-KV-DTYPE",
        "kv_dtype",
        "the engines store KV in different dtypes",
        _KV_MISREAD,
        "give both engines the same --kv-cache-dtype (and --dtype)",
    ),
    _equal(
        "PD-KV-STORAGE",
        "kv_storage",
        "the engines' KV pools hold different dtypes",
        _KV_MISREAD,
        "give both engines the same --dtype, which --kv-cache-dtype auto follows",
    ),
    Rule(
        "PD-AUX",
        REFUSE,
        "aux",
        _aux_layouts_clash,
        "the engines transfer different metadata buffers",
        "buffers are paired by position and width, so values would land in the wrong "
        "buffers",
        "run the same --speculative-algorithm; enable "
        "SGLANG_ENABLE_DISAGG_SAMPLING_MASK and the DSA top-k buffer on both engines or "
        "on none",
    ),
    Rule(
        "PD-AUX-CHECKSUM",
        WARN,
        "aux",
        _checksum_on_one_engine,
        "one engine transfers a KV checksum and the other does not",
        "transferred KV is not verified",
        "give --disaggregation-enable-kv-checksum to both engines or to none",
    ),
    # -- parallel layouts -----------------------------------------------------------
    Rule(
        "PD-TP",
        REFUSE,
        "tp",
        _ranks_do_not_divide,
        "neither attention tensor-parallel size is a multiple of the other",
        "attention heads cannot be paired between ranks",
        "choose sizes of which one is a multiple of the other",
    ),
    Rule(
        "PD-PP",
        REFUSE,
        "pp",
        _stages_do_not_pair,
        "decode has pipeline stages that prefill does not have",
        "stages cannot be paired",
        "run decode with --pp-size 1 (DSPARK needs that anyway)",
    ),
    Rule(
        "PD-CP",
        REFUSE,
        "cp",
        lambda p: (p.decode.get("cp") or 1) > 1,
        "decode runs attention context parallelism",
        "decode ranks cannot be paired with prefill ranks",
        "run decode without context parallelism",
    ),
    Rule(
        "PD-PP-LAYER-IDS",
        REFUSE,
        "kv_layer_ids",
        _stages_miss_their_layers,
        "prefill has pipeline stages, the engines do not both report the layers of "
        "their KV buffers, and this backend cannot place a stage without them",
        "the transfer fails, or a stage's KV lands in the wrong layers of decode",
        "apply all components of sglang-dspark-pd to both engines (layer ids: SGLang "
        "0.5.23 and later), or run prefill with --pp-size 1; without any draft, "
        "Mooncake also places stages of equal size",
    ),
    _equal(
        "PD-RING",
        "rings",
        "the DeepSeek-V4 compressor rings have different sizes",
        "a ring is transferred whole, so its entries would land in the wrong slots",
        f"set {PEER_DRAFT_TOKENS} on a prefill without a draft to decode's "
        "--speculative-num-draft-tokens, or run the same speculation on both",
        when="described",
    ),
)

DRAFT_RULES: tuple[Rule, ...] = (
    # -- the draft ------------------------------------------------------------------
    Rule(
        "PD-COLD-DRAFT",
        REFUSE,
        "mode",
        lambda p: p.cold and not p.cold_allowed and not _draft_hides_values(p),
        "decode runs DSPARK, and prefill neither runs DSPARK nor captures hidden states",
        COLD,
        f"{_DRAFT_ON_PREFILL}, or capture the prompt's tail on prefill with {CAPTURE}=1, "
        f"or accept a cold draft with {ALLOW_COLD_DRAFT}=1 on decode",
    ),
    Rule(
        "PD-COLD-DRAFT-ALLOWED",
        WARN,
        "mode",
        lambda p: p.cold and p.cold_allowed and not _draft_hides_values(p),
        f"decode runs DSPARK with a cold draft ({ALLOW_COLD_DRAFT}=1)",
        COLD,
        "start prefill with the draft, or capture the prompt's tail there",
    ),
    Rule(
        "PD-COLD-LAYERS",
        REFUSE,
        "kv_layer_ids",
        _draft_hides_values,
        "only decode has a draft, the draft has at least as many layers as the target, "
        "and the engines do not both report the layers of their KV buffers",
        "Mooncake would take draft KV buffers for the target's value buffers, and output "
        "would be wrong",
        _DRAFT_ON_PREFILL,
    ),
    Rule(
        "PD-DRAFT-ONLY-ON-PREFILL",
        REFUSE,
        "mode",
        _draft_only_on_prefill,
        "prefill prepares context for a draft, but decode runs no draft",
        "prefill would send draft KV or hidden states that decode has no memory for",
        "start decode with --speculative-algorithm DSPARK, or prefill without it and "
        f"without {CAPTURE}",
    ),
    Rule(
        "PD-ALGORITHM",
        REFUSE,
        "algorithm",
        _algorithms_clash,
        "the engines run different speculative algorithms",
        "one algorithm cannot use draft KV of the other",
        f"{_SAME_FLAG} of --speculative-algorithm",
    ),
    Rule(
        "PD-MODE",
        REFUSE,
        "dspark.no_tail",
        lambda p: (
            p.described and p.decode_drafts and p.prefill_mode == "tail" and not p.tail
        ),
        "prefill hands over a tail of hidden states that decode cannot take",
        "the draft would start without context",
        "change on decode what is named there, or run DSPARK on prefill",
        absent="nothing",
    ),
    _equal(
        "PD-DRAFT-GEOMETRY",
        "draft",
        "the engines run drafts of different shape",
        "draft KV of one cannot be read by the other",
        "give both engines the same --speculative-draft-model-path",
        when="native",
    ),
    _equal(
        "PD-DRAFT-WEIGHTS",
        "draft_weights",
        "the engines run different draft checkpoints of the same shape",
        "decode would draft from another draft's KV: output stays correct, accept "
        "length drops",
        "give both engines the same draft checkpoint",
        when="native",
    ),
    Rule(
        "PD-DRAFT-WEIGHTS-UNKNOWN",
        WARN,
        "draft_weights",
        lambda p: p.native and None in p.both("draft_weights"),
        "an engine could not read the weights of its draft",
        "decode cannot check that both engines run the same draft weights",
        "give both engines a local --speculative-draft-model-path, or a local "
        "--model-path where the target's checkpoint holds the draft",
    ),
    _equal(
        "PD-DRAFT-KV-DTYPE",
        "draft_kv_dtype",
        "the engines store draft KV in different dtypes",
        "draft KV bytes would be misread",
        f"{_SAME_FLAG} of --speculative-draft-kv-cache-dtype, or of --kv-cache-dtype "
        "and --dtype, which it follows",
        when="native",
    ),
    Rule(
        "PD-DRAFT-HEADS",
        REFUSE,
        "tp",
        _draft_heads_unsliceable,
        "the tensor-parallel sizes differ, and the draft's KV is not laid out like the "
        "target's",
        "draft KV would be split between ranks like the target's, which does not fit it",
        "run both engines with the same --tp-size, or hand over a tail instead",
    ),
    Rule(
        "PD-BLOCK-SIZE",
        NOTE,
        "block_size",
        lambda p: p.native and p.differ("block_size"),
        "the engines draft blocks of different length",
        "none for the transfer: draft KV does not depend on it, and decode uses its own "
        "value",
        f"{_SAME_FLAG} of --speculative-num-draft-tokens to keep configurations equal",
    ),
    # -- the tail -------------------------------------------------------------------
    _equal(
        "PD-TAIL-LAYERS",
        "dspark.layer_ids",
        "prefill captures different target layers from those that the draft reads",
        "the draft would read hidden states of the wrong layers",
        f"set {LAYER_IDS} on prefill to decode's ids",
        when="tail",
    ),
    _equal(
        "PD-TAIL-HIDDEN",
        "dspark.hidden_size",
        "the engines disagree on the size of a hidden state",
        _STATES_MISREAD,
        "give both engines the same target model",
        when="tail",
    ),
    _equal(
        "PD-TAIL-DTYPE",
        "dspark.dtype",
        "the engines disagree on the dtype of hidden states",
        _STATES_MISREAD,
        f"{_SAME_FLAG} of --dtype",
        when="tail",
    ),
    _equal(
        "PD-TAIL-TOKENS",
        "dspark.tail_tokens",
        "decode was told to take tails of another length",
        "none of its requests would get the context that it was started for",
        f"unset {TAIL_TOKENS} on decode, or set prefill's value there",
        when="tail",
    ),
    Rule(
        "PD-TAIL-WINDOW",
        REFUSE,
        "dspark.tail_tokens",
        lambda p: p.short_tail and not p.short_tail_allowed,
        "the tail is shorter than the context that the draft reads",
        _SHORT_CONTEXT,
        "name the draft on prefill (--speculative-draft-model-path without "
        f"--speculative-algorithm reads its config only), or the window in {TAIL_TOKENS}; "
        "run DSPARK on prefill (the only exact way for a full-attention draft); or accept "
        f"it with {ALLOW_PARTIAL_CONTEXT}=1 on both engines and a number of tokens "
        f"(not -1) in {TAIL_TOKENS} on prefill",
        absent="not set",
    ),
    Rule(
        "PD-TAIL-WINDOW-ALLOWED",
        WARN,
        "dspark.tail_tokens",
        lambda p: p.short_tail and p.short_tail_allowed and not p.must_cover,
        f"the tail is shorter than the draft's context ({ALLOW_PARTIAL_CONTEXT}=1)",
        _SHORT_CONTEXT,
        f"raise {TAIL_TOKENS} on prefill",
    ),
    Rule(
        "PD-TAIL-COVER",
        REFUSE,
        "dspark.must_cover",
        lambda p: p.short_tail and p.short_tail_allowed and p.must_cover,
        "the tail is too short, and decode cannot clear draft KV of what is missing",
        "the draft would read KV of other requests",
        f"raise {TAIL_TOKENS} on prefill, or change on decode what is named there",
        absent="nothing",
    ),
    Rule(
        "PD-TAIL-CP",
        REFUSE,
        "cp",
        _tail_with_context_parallel,
        "a tail cannot be handed over with context parallelism",
        "captured hidden states are spread over ranks",
        "run both engines without context parallelism, or run DSPARK on prefill",
    ),
)

RULES: tuple[Rule, ...] = ENGINE_RULES + DRAFT_RULES


def decide(decode: Description, prefill: Description) -> list[Verdict]:
    """All verdicts on a pair, refusals first, each group in table order.

    Pure: the same two descriptions give the same verdicts on decode and in the doctor.
    An empty list means that nothing known is wrong with the pair.

    Raises:
        TypeError, AttributeError, ValueError: a value is not of the type that a rule
            compares, as in a description of a damaged or much later release.
    """
    pair = Pair(decode=decode, prefill=prefill)
    verdicts = [rule.verdict(pair) for rule in RULES if rule.applies(pair)]
    return sorted(verdicts, key=lambda verdict: SEVERITIES.index(verdict.severity))


# -- codes that are not rules -----------------------------------------------------------


class RuntimeCode(NamedTuple):
    """What a code in a client's error or in a log means."""

    code: str
    where: str
    meaning: str
    fix: str


# For the documentation; the code that raises one of them spells it out in its message.
RUNTIME_CODES: tuple[RuntimeCode, ...] = (
    RuntimeCode(
        "PD-MALFORMED",
        "decode or prefill",
        "prefill's description, or the tail layout in decode's registration, cannot be "
        "read",
        _SAME_RELEASE,
    ),
    RuntimeCode(
        "PD-UPSTREAM",
        "decode",
        "one of SGLang's own checks of a prefill failed; its text follows the code",
        "change what that text names; without this set such an error ends decode",
    ),
    RuntimeCode(
        "PD-NOT-REGISTERED",
        "prefill",
        "a request came from a decode that this prefill does not know, for example "
        "because prefill was restarted",
        "nothing if it happens once: a decode with this set registers again at its next "
        "request; restart a decode without the set",
    ),
    RuntimeCode(
        "PD-REGISTRATION",
        "prefill",
        "a decode could not be registered; the error follows the code",
        "give both engines the same model, draft and parallel sizes",
    ),
    RuntimeCode(
        "PD-METADATA",
        "prefill",
        "a request's metadata could not be handled; the error follows the code",
        "run the same release on both engines",
    ),
    RuntimeCode(
        "PD-STATUS",
        "decode",
        "a status message of prefill could not be handled; the error follows the code",
        "run the same release on both engines",
    ),
    RuntimeCode(
        "PD-TRANSFER",
        "prefill",
        "a Mooncake worker could not send the KV of a request; only this request fails",
        "look at prefill's log for the traceback",
    ),
    RuntimeCode(
        "PD-BAD-REQUEST",
        "decode or prefill",
        "the other engine refused the request; its reason follows, the status is 400",
        "change the request, or give both engines the same limits",
    ),
    RuntimeCode(
        "PD-NO-PREFILL",
        "decode",
        "nothing answers at the bootstrap address of the request's prefill",
        "start it, or give the router the port of its --disaggregation-bootstrap-port",
    ),
)
