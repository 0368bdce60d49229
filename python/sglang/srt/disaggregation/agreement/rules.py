"""The rules that decide whether a decode engine works with a prefill engine.

`decide` turns two descriptions into verdicts. Decode acts on the first refusal,
a tool can print all verdicts before there is traffic, and documentation can be generated
from the same tables. A rule is data: a code, a severity, the value that it is
about, when it applies, and the three sentences that a user reads (`pair`).

Pure standard library.
"""

from __future__ import annotations

from typing import NamedTuple

from .pair import (
    NOTE,
    REFUSE,
    SAME_BUILD,
    SAME_FLAG,
    SEVERITIES,
    WARN,
    Description,
    Pair,
    Rule,
    Verdict,
    equal,
    look_up,
)

# export: from tail-rules
from .tail import CAPTURE, TAIL_RULES, TELL_RING_SIZE

ALLOW_COLD_DRAFT = "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT"

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
    """Names must agree always; widths where draft context is handed over.

    The draft's hidden state is the one buffer whose width follows the algorithm, and
    what other algorithms do with it on one engine alone is not ours to refuse.
    """
    if not (pair.described and pair.differ("aux")) or _checksum_on_one_engine(pair):
        return False
    names = [[entry.partition(":")[0] for entry in aux] for aux in pair.both("aux")]
    ours = "DSPARK" in pair.both("algorithm") or pair.prefill_mode != "none"
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


# -- the rules --------------------------------------------------------------------------

_DECODES_BUILD = "run decode's build of SGLang on prefill"
_DRAFT_ON_PREFILL = (
    "start prefill with --speculative-algorithm DSPARK and the decode engine's draft"
)
_CONTEXT_FROM_PREFILL = (
    # export: from tail-rules
    f"capture the prompt's tail on prefill with {CAPTURE}=1, or "
    "start prefill with --speculative-algorithm DSPARK and the decode engine's draft"
)
_KV_MISREAD = "KV bytes would be misread"


# The first refusal in the order of these tables is the one that decode reports.
ENGINE_RULES: tuple[Rule, ...] = (
    # -- can decode compare at all --------------------------------------------------
    equal(
        "PD-VERSION",
        "version",
        "the engines use different versions of the description that they compare",
        "decode cannot check prefill",
        SAME_BUILD,
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
        "PD-UNDESCRIBED-PREFILL",
        REFUSE,
        "version",
        lambda p: p.undescribed_prefill and p.decode_drafts and not p.cold_allowed,
        "decode runs DSPARK, and the prefill engine does not describe itself (a build of "
        "SGLang without this check)",
        "decode cannot tell whether draft context will arrive; if it does not, accept "
        "length drops while output stays correct",
        f"{_DECODES_BUILD}, or skip the check with {ALLOW_COLD_DRAFT}=1 on decode",
    ),
    Rule(
        "PD-UNDESCRIBED-PREFILL-ALLOWED",
        WARN,
        "version",
        lambda p: p.undescribed_prefill and p.decode_drafts and p.cold_allowed,
        "decode runs DSPARK with a prefill engine that does not describe itself",
        "if no draft context arrives, accept length drops while output stays correct",
        _DECODES_BUILD,
    ),
    Rule(
        "PD-UNDESCRIBED-PREFILL-PLAIN",
        WARN,
        "version",
        lambda p: p.undescribed_prefill and not p.decode_drafts,
        "the prefill engine does not describe itself (a build of SGLang without this check)",
        "if it runs a speculative algorithm, its bootstrap thread dies when this decode "
        "registers, and its requests wait for their timeout",
        _DECODES_BUILD,
    ),
    # -- the target's KV ------------------------------------------------------------
    equal(
        "PD-BACKEND",
        "backend",
        "the engines use different transfer backends",
        "prefill cannot read decode's registration",
        "give both engines the same --disaggregation-transfer-backend",
    ),
    equal(
        "PD-ALLOCATION",
        "allocation_policy",
        "the engines reserve decode's KV at different points of a request",
        "decode rejects every request, and prefill holds it until its timeout",
        "give both engines the same --disaggregation-decode-allocation-policy",
    ),
    equal(
        "PD-TARGET",
        "target",
        "the engines serve different target models",
        "KV of one model would be read as KV of the other",
        "give both engines the same --model-path",
    ),
    equal(
        "PD-PAGE-SIZE",
        "page_size",
        "the engines have different KV page sizes",
        "a page index of one engine means other tokens on the other",
        "give both engines the same --page-size",
    ),
    equal(
        "PD-KV-DTYPE",
        "kv_dtype",
        "the engines store KV in different dtypes",
        _KV_MISREAD,
        "give both engines the same --kv-cache-dtype (and --dtype)",
    ),
    equal(
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
        "run the same build of SGLang on both engines, one that reports layer ids (0.5.23 "
        "and later), or run prefill with --pp-size 1; without any draft, Mooncake also "
        "places stages of equal size",
    ),
    equal(
        "PD-RING",
        "rings",
        "the DeepSeek-V4 compressor rings have different sizes",
        "a ring is transferred whole, so its entries would land in the wrong slots",
        # export: from tail-rules
        f"{TELL_RING_SIZE}, or "
        "run the same speculation on both engines, of the same number of draft tokens",
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
        "decode runs DSPARK, and prefill hands over no context for its draft",
        COLD,
        f"{_CONTEXT_FROM_PREFILL}, or accept a cold draft with {ALLOW_COLD_DRAFT}=1 on "
        "decode",
    ),
    Rule(
        "PD-COLD-DRAFT-ALLOWED",
        WARN,
        "mode",
        lambda p: p.cold and p.cold_allowed and not _draft_hides_values(p),
        f"decode runs DSPARK with a cold draft ({ALLOW_COLD_DRAFT}=1)",
        COLD,
        _CONTEXT_FROM_PREFILL,
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
        "prefill would send what decode has no memory for",
        "start decode with --speculative-algorithm DSPARK, "
        # export: from tail-rules
        f"or prefill without {CAPTURE}, "
        "or prefill without --speculative-algorithm",
    ),
    Rule(
        "PD-ALGORITHM",
        REFUSE,
        "algorithm",
        _algorithms_clash,
        "the engines run different speculative algorithms",
        "one algorithm cannot use draft KV of the other",
        f"{SAME_FLAG} of --speculative-algorithm",
    ),
    equal(
        "PD-DRAFT-GEOMETRY",
        "draft",
        "the engines run drafts of different shape",
        "draft KV of one cannot be read by the other",
        "give both engines the same --speculative-draft-model-path",
        when="native",
    ),
    equal(
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
    equal(
        "PD-DRAFT-KV-DTYPE",
        "draft_kv_dtype",
        "the engines store draft KV in different dtypes",
        "draft KV bytes would be misread",
        f"{SAME_FLAG} of --speculative-draft-kv-cache-dtype, or of --kv-cache-dtype "
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
        # export: from tail-rules
        "hand over a tail of the prompt's hidden states in place of draft KV, or "
        "run both engines with the same --tp-size",
    ),
    Rule(
        "PD-BLOCK-SIZE",
        NOTE,
        "block_size",
        lambda p: p.native and p.differ("block_size"),
        "the engines draft blocks of different length",
        "none for the transfer: draft KV does not depend on it, and decode uses its own "
        "value",
        f"{SAME_FLAG} of --speculative-num-draft-tokens to keep configurations equal",
    ),
)

RULES: tuple[Rule, ...] = (
    *ENGINE_RULES,
    *DRAFT_RULES,
    # export: from tail-rules
    *TAIL_RULES,
)


def decide(decode: Description, prefill: Description) -> list[Verdict]:
    """All verdicts on a pair, refusals first, each group in table order.

    Pure: the same two descriptions give the same verdicts on decode and in a tool.
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
        "prefill's description, or what decode says of itself when it registers, cannot "
        "be read",
        SAME_BUILD,
    ),
    RuntimeCode(
        "PD-TOPOLOGY",
        "decode",
        "one of SGLang's own checks of a prefill failed; its text follows the code",
        "change what that text names; without this agreement such an error ends decode",
    ),
    RuntimeCode(
        "PD-NOT-REGISTERED",
        "prefill",
        "a request came from a decode that this prefill does not know, for example "
        "because prefill was restarted",
        "nothing if it happens once: decode registers again at its next request; restart "
        "a decode of a build that does not",
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
        SAME_BUILD,
    ),
    RuntimeCode(
        "PD-STATUS",
        "decode",
        "a status message of prefill could not be handled; the error follows the code",
        SAME_BUILD,
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
