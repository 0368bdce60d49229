"""What engines compare of a tail: the last hidden states of a prompt, handed over.

A prefill without a draft captures them, and decode writes its draft KV from them. What
arguments and environment say of it is added here to a description (`add_tail`), and
`TAIL_RULES` decide on it.

Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .model_configs import (
    BLOCK_SIZE,
    attention_kind,
    draft_value,
    integers,
    is_on,
    ring_sizes,
    text_config,
)
from .pair import REFUSE, SAME_FLAG, WARN, Description, Pair, Rule, look_up

ALLOW_PARTIAL_CONTEXT = "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT"
TAIL_TOKENS = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
LAYER_IDS = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"
PEER_DRAFT_TOKENS = "SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS"

DEFAULT_TAIL_TOKENS = 8
DEEPSEEK_V4_WINDOW = 128  # of a config that names none
_RADIX_FLAG = "--disaggregation-decode-enable-radix-cache"

# What hands draft context over says here how: each gets (role, server arguments, model
# config) and returns its part of the description with its ``mode``, or None.
describers: list[Callable[[str, Any, Any], dict[str, Any] | None]] = []


def handed_over(role: str, server_args: Any, model_config: Any) -> Description:
    """What a running engine hands over or takes: its ``mode`` and its ``dspark``."""
    found: Description = {}
    for describer in describers:
        handoff = describer(role, server_args, model_config)
        if handoff is not None:
            found = {"mode": handoff["mode"], "dspark": handoff}
    return found


def add_tail(
    description: Description,
    args: Mapping[str, Any],
    target_config: Mapping[str, Any] | None,
    draft_config: Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> None:
    """Add to a description what arguments and environment say of a tail."""
    role, drafts = description["role"], description["mode"] == "native"
    description["allow_partial_context"] = is_on(environ, ALLOW_PARTIAL_CONTEXT)
    captures = role == "prefill" and _captures(args, environ)
    if captures:
        tokens = _peer_ring_tokens(target_config or {}, environ)
        description["rings"] = ring_sizes(target_config, tokens)
    if captures or (role == "decode" and drafts):
        description["mode"] = "tail"  # a decode of this mode takes draft KV as well
        description["dspark"] = describe_tail(role, args, draft_config, environ)


def _captures(args: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    named = bool(environ.get(LAYER_IDS)) and CAPTURE not in environ
    without_draft = not args.get("speculative_algorithm")
    return without_draft and (named or is_on(environ, CAPTURE))


def describe_tail(
    role: str,
    args: Mapping[str, Any],
    draft_config: Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """The tail as flags and environment give it; the running engine knows more.

    `window_need` is the number of tokens whose hidden states the draft reads before its
    block: None for a draft that attends to everything, absent when its config is unknown.
    `must_cover` says why decode takes no tail that is shorter.
    """
    dspark: dict[str, Any] = {}
    if role == "prefill" and environ.get(LAYER_IDS):
        dspark["layer_ids"] = integers(environ[LAYER_IDS])
    if draft_config:
        ids = draft_value(draft_config, text_config(draft_config), "target_layer_ids")
        ids = ids or draft_config.get("dspark_target_layer_ids")
        if ids and "layer_ids" not in dspark:
            dspark["layer_ids"] = sorted(ids)
        dspark["window_need"] = window_need(draft_config)
    # -1 is what the window needs, and so is the default of a prefill that knows it.
    tokens = int(environ.get(TAIL_TOKENS) or -1)
    if tokens == -1:
        tokens = dspark.get("window_need") or 0
    if not tokens and role == "prefill" and not environ.get(TAIL_TOKENS):
        tokens = DEFAULT_TAIL_TOKENS
    if tokens and (role == "prefill" or environ.get(TAIL_TOKENS)):
        dspark["tail_tokens"] = tokens
    if role == "decode" and args.get("disaggregation_decode_enable_radix_cache"):
        dspark["must_cover"] = f"{_RADIX_FLAG} shares it between requests"
    return dspark


def window_need(config: Mapping[str, Any]) -> int | None:
    """Tokens before the block that an all-sliding draft reads; None for all of them."""
    text = text_config(config)
    if attention_kind(config) == "compressed_mla":
        window = text.get("sliding_window") or text.get("window_size")
        return int(window or DEEPSEEK_V4_WINDOW)
    types, window = text.get("layer_types"), text.get("sliding_window")
    if types and window and set(types) == {"sliding_attention"}:
        return int(window) - 1
    return None


def _peer_ring_tokens(config: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Draft tokens for which a capturing prefill makes room, as its decode does.

    The number it is told, or the block size of the draft that its checkpoint carries.
    With neither it does not start; 0, as of a model without a draft, shows what is wrong.
    """
    block = config.get(BLOCK_SIZE)
    return int(environ.get(PEER_DRAFT_TOKENS) or 0) or (int(block) + 1 if block else 0)


# -- the rules --------------------------------------------------------------------------


def is_tail(pair: Pair) -> bool:
    """Prefill hands over a tail, and decode takes it."""
    modes = (pair.prefill_mode, pair.decode.get("mode"))
    return pair.described and modes == ("tail", "tail")


def is_short(pair: Pair) -> bool:
    """The tail covers less context than the draft reads."""
    dspark = pair.decode.get("dspark") or {}
    if not is_tail(pair) or "window_need" not in dspark:
        return False
    need = dspark["window_need"]
    have = look_up(pair.prefill, "dspark.tail_tokens")
    # No window: the draft attends to the whole prompt.
    return need is None or (have is not None and have < need)


def must_cover(pair: Pair) -> bool:
    return bool(look_up(pair.decode, "dspark.must_cover"))


def short_tail_allowed(pair: Pair) -> bool:
    """Both engines accept a short tail, of a length that they can start with.

    A length that is not known is -1, which only a window can resolve. A prefill
    that knows no draft has nothing to accept.
    """
    if look_up(pair.prefill, "dspark.tail_tokens") is None:
        return False
    knows_draft = "window_need" in (pair.prefill.get("dspark") or {})
    engines = (pair.decode, pair.prefill) if knows_draft else (pair.decode,)
    return all(engine.get("allow_partial_context") for engine in engines)


def _tail_with_context_parallel(pair: Pair) -> bool:
    sizes = [pair.prefill.get("cp"), *pair.both("dcp")]
    return is_tail(pair) and any((size or 1) > 1 for size in sizes)


def _equal(code: str, path: str, says: str, leads_to: str, fix: str) -> Rule:
    """Refuse pairs with a tail whose values at `path` are known and differ."""

    def applies(pair: Pair) -> bool:
        return is_tail(pair) and pair.differ(path)

    return Rule(code, REFUSE, path, applies, says, leads_to, fix)


_STATES_MISREAD = "hidden states would be misread"
_SHORT_CONTEXT = (
    "output stays correct, accept length drops on prompts longer than the tail"
)
# Of a rule that engines without a tail have too.
TELL_RING_SIZE = (
    f"set {PEER_DRAFT_TOKENS} on a prefill without a draft to decode's "
    "--speculative-num-draft-tokens"
)

TAIL_RULES: tuple[Rule, ...] = (
    Rule(
        "PD-MODE",
        REFUSE,
        "dspark.no_tail",
        lambda p: (
            p.described
            and p.decode_drafts
            and p.prefill_mode == "tail"
            and not is_tail(p)
        ),
        "prefill hands over a tail of hidden states that decode cannot take",
        "the draft would start without context",
        "change on decode what is named there, or run DSPARK on prefill",
        absent="nothing",
    ),
    _equal(
        "PD-TAIL-LAYERS",
        "dspark.layer_ids",
        "prefill captures different target layers from those that the draft reads",
        "the draft would read hidden states of the wrong layers",
        f"set {LAYER_IDS} on prefill to decode's ids",
    ),
    _equal(
        "PD-TAIL-HIDDEN",
        "dspark.hidden_size",
        "the engines disagree on the size of a hidden state",
        _STATES_MISREAD,
        "give both engines the same target model",
    ),
    _equal(
        "PD-TAIL-DTYPE",
        "dspark.dtype",
        "the engines disagree on the dtype of hidden states",
        _STATES_MISREAD,
        f"{SAME_FLAG} of --dtype",
    ),
    _equal(
        "PD-TAIL-TOKENS",
        "dspark.tail_tokens",
        "decode was told to take tails of another length",
        "none of its requests would get the context that it was started for",
        f"unset {TAIL_TOKENS} on decode, or set prefill's value there",
    ),
    Rule(
        "PD-TAIL-WINDOW",
        REFUSE,
        "dspark.tail_tokens",
        lambda p: is_short(p) and not short_tail_allowed(p),
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
        lambda p: is_short(p) and short_tail_allowed(p) and not must_cover(p),
        f"the tail is shorter than the draft's context ({ALLOW_PARTIAL_CONTEXT}=1)",
        _SHORT_CONTEXT,
        f"raise {TAIL_TOKENS} on prefill",
    ),
    Rule(
        "PD-TAIL-COVER",
        REFUSE,
        "dspark.must_cover",
        lambda p: is_short(p) and short_tail_allowed(p) and must_cover(p),
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
