"""Rows of the agreement that are about the draft and the hidden-row tail.

See `peer_agreement_rules.py` for how rows are used; relative imports for the same
reason as there.
"""

from __future__ import annotations

from .peer_agreement_table import (
    ALLOW_COLD_DRAFT,
    ALLOW_PARTIAL_CONTEXT,
    CAPTURE,
    COLD,
    LAYER_IDS,
    NOTE,
    REFUSE,
    TAIL_TOKENS,
    WARN,
    Pair,
    Rule,
    differs,
    look_up,
)


def _algorithms_clash(pair: Pair) -> bool:
    prefill, decode = pair.both("algorithm")
    return pair.differ("algorithm") and "DSPARK" in (prefill, decode)


def _mode_clash(pair: Pair) -> bool:
    modes = (pair.prefill_mode, pair.decode.get("mode"))
    return pair.described and pair.decode_drafts and modes == ("tail", "native")


def _weights_unknown(pair: Pair) -> bool:
    return pair.native and None in pair.both("draft_weights")


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
    """Mooncake's guess where values begin, for decodes with a draft on one side only.

    Right while the draft has fewer layers than the target.
    """
    target = look_up(pair.decode, "target.layers")
    draft = look_up(pair.decode, "draft.layers")
    return (
        pair.cold
        and pair.prefill.get("algorithm") is None
        and pair.decode.get("backend") == "mooncake"
        and pair.decode.get("attention") == "mha"
        and False in pair.both("kv_layer_ids")
        and None not in (target, draft)
        and draft >= target
    )


def _tail_with_context_parallel(pair: Pair) -> bool:
    sizes = [pair.prefill.get("cp"), *pair.both("dcp")]
    return pair.tail and any((size or 1) > 1 for size in sizes)


_THREE_WAYS_OUT = (
    "start prefill with --speculative-algorithm DSPARK and the decode engine's draft, "
    f"or capture the prompt's tail on prefill with {CAPTURE}=1 (and {TAIL_TOKENS} on "
    f"both engines), or accept a cold draft with {ALLOW_COLD_DRAFT}=1 on decode"
)
# A running engine says a number; one that is judged by its environment may have left
# it to the draft's window.
_AUTOMATIC = "-1"
_SAME_FLAG = "start both engines with the same value"


DRAFT_RULES: tuple[Rule, ...] = (
    # -- the draft ------------------------------------------------------------------
    Rule(
        "PD-COLD-DRAFT",
        REFUSE,
        "mode",
        lambda p: (
            p.cold
            and p.prefill.get("algorithm") is None
            and not p.cold_allowed
            and not _draft_hides_values(p)
        ),
        "decode runs DSPARK but prefill neither runs DSPARK nor captures hidden rows",
        COLD,
        _THREE_WAYS_OUT,
    ),
    Rule(
        "PD-COLD-DRAFT-ALLOWED",
        WARN,
        "mode",
        lambda p: (
            p.cold
            and p.prefill.get("algorithm") is None
            and p.cold_allowed
            and not _draft_hides_values(p)
        ),
        f"decode runs DSPARK with a cold draft ({ALLOW_COLD_DRAFT}=1)",
        COLD,
        "start prefill with the draft, or capture the prompt's tail there",
    ),
    Rule(
        "PD-COLD-LAYERS",
        REFUSE,
        "kv_layer_ids",
        _draft_hides_values,
        "only decode has a draft, it has as many layers as the target or more, and the "
        "engines do not both report the layers of their KV buffers",
        "Mooncake then takes draft buffers for the target's values, and output is wrong",
        "start prefill with --speculative-algorithm DSPARK and the decode engine's draft",
    ),
    Rule(
        "PD-DRAFT-ONLY-ON-PREFILL",
        REFUSE,
        "mode",
        lambda p: (
            p.described
            and p.prefill_mode != "none"
            and p.decode.get("algorithm") is None
        ),
        "prefill prepares draft context but decode does not speculate",
        "prefill ships what decode has no memory for",
        "start decode with --speculative-algorithm DSPARK, or prefill without it and "
        f"without {CAPTURE}",
    ),
    Rule(
        "PD-ALGORITHM",
        REFUSE,
        "algorithm",
        _algorithms_clash,
        "the engines run different speculative algorithms",
        "draft KV of one algorithm means nothing to the other",
        _SAME_FLAG + " of --speculative-algorithm",
    ),
    Rule(
        "PD-MODE",
        REFUSE,
        "mode",
        _mode_clash,
        "prefill hands over a tail of hidden rows that decode does not expect",
        "decode would ignore the tail and draft cold",
        f"set {TAIL_TOKENS} on decode to prefill's value, or run DSPARK on prefill "
        f"without {CAPTURE}",
    ),
    Rule(
        "PD-DRAFT-GEOMETRY",
        REFUSE,
        "draft",
        differs("draft", when="native"),
        "the engines run drafts of different shape",
        "draft KV of one cannot be read by the other",
        "give both engines the same --speculative-draft-model-path",
    ),
    Rule(
        "PD-DRAFT-WEIGHTS",
        REFUSE,
        "draft_weights",
        differs("draft_weights", when="native"),
        "the engines run different draft checkpoints of the same shape",
        "decode would draft from another draft's KV: output stays correct, accept "
        "length falls",
        "give both engines the same draft checkpoint",
    ),
    Rule(
        "PD-DRAFT-WEIGHTS-UNKNOWN",
        WARN,
        "draft_weights",
        _weights_unknown,
        "an engine could not read its draft checkpoint's files",
        "that both run the same draft weights is not checked",
        "give both engines a local --speculative-draft-model-path, or a local "
        "--model-path where the target bundles its draft",
    ),
    Rule(
        "PD-DRAFT-KV-DTYPE",
        REFUSE,
        "draft_kv_dtype",
        differs("draft_kv_dtype", when="native"),
        "the engines store draft KV in different dtypes",
        "draft KV bytes would be misread",
        _SAME_FLAG
        + " of --speculative-draft-kv-cache-dtype, or of --kv-cache-dtype and "
        "--dtype, which it follows",
    ),
    Rule(
        "PD-DRAFT-HEADS",
        REFUSE,
        "tp",
        _draft_heads_unsliceable,
        "the tensor-parallel sizes differ and the draft's KV is not laid out like the "
        "target's",
        "draft KV would be cut as the target's is",
        "run both engines with the same --tp-size, or hand over a tail instead",
    ),
    Rule(
        "PD-BLOCK-SIZE",
        NOTE,
        "block_size",
        differs("block_size", when="native"),
        "the engines draft blocks of different length",
        "none for the transfer: draft KV does not depend on it; decode's value counts",
        _SAME_FLAG + " of --speculative-num-draft-tokens to keep configurations equal",
    ),
    # -- the tail -------------------------------------------------------------------
    Rule(
        "PD-TAIL-LAYERS",
        REFUSE,
        "dspark.layer_ids",
        differs("dspark.layer_ids", when="tail"),
        "prefill captures other target layers than the draft reads",
        "the draft would read rows of the wrong layers",
        f"set {LAYER_IDS} on prefill to decode's ids",
    ),
    Rule(
        "PD-TAIL-HIDDEN",
        REFUSE,
        "dspark.hidden_size",
        differs("dspark.hidden_size", when="tail"),
        "the engines disagree on the width of a hidden row",
        "rows would be misread",
        "give both engines the same target model",
    ),
    Rule(
        "PD-TAIL-DTYPE",
        REFUSE,
        "dspark.dtype",
        differs("dspark.dtype", when="tail"),
        "the engines disagree on the dtype of a hidden row",
        "rows would be misread",
        _SAME_FLAG + " of --dtype",
    ),
    Rule(
        "PD-TAIL-TOKENS",
        REFUSE,
        "dspark.tail_tokens",
        differs("dspark.tail_tokens", when="tail"),
        "the engines disagree on the length of the tail",
        "metadata slots are addressed with prefill's length, so rows would land in "
        "another request's slot",
        f"set the same {TAIL_TOKENS} on both engines",
    ),
    Rule(
        "PD-TAIL-ROW-BYTES",
        REFUSE,
        "dspark.row_bytes",
        differs("dspark.row_bytes", when="tail"),
        "the engines disagree on the bytes of a hidden row",
        "rows would land in another request's slot",
        f"give both engines the same --dtype, target model and {LAYER_IDS}",
    ),
    Rule(
        "PD-TAIL-WINDOW",
        REFUSE,
        "dspark.tail_tokens",
        lambda p: p.short_tail and not p.short_tail_allowed,
        "the tail is shorter than the context the draft reads",
        "output stays correct, accept length falls on prompts longer than the tail",
        f"raise {TAIL_TOKENS} on both engines (-1 = what the draft's window needs), run "
        "DSPARK on prefill (the only exact way for a full-attention draft), or accept "
        f"it with {ALLOW_PARTIAL_CONTEXT}=1 and a number of rows (not -1) in "
        f"{TAIL_TOKENS}, both on both engines",
        absent=_AUTOMATIC,
    ),
    Rule(
        "PD-TAIL-WINDOW-ALLOWED",
        WARN,
        "dspark.tail_tokens",
        lambda p: p.short_tail and p.short_tail_allowed,
        f"the tail is shorter than the draft's context ({ALLOW_PARTIAL_CONTEXT}=1)",
        "output stays correct, accept length falls on prompts longer than the tail",
        f"raise {TAIL_TOKENS} on both engines",
    ),
    Rule(
        "PD-TAIL-CP",
        REFUSE,
        "cp",
        _tail_with_context_parallel,
        "a tail cannot be handed over with context parallelism",
        "captured rows are spread over ranks",
        "run both engines without context parallelism, or transfer draft KV instead",
    ),
)
