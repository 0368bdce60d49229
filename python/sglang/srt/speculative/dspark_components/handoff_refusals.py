"""The settings with which an engine refuses to start a tail handoff, as one table.

Standard library only: an engine asks it at start-up (``dspark_handoff_startup``), and a
tool can ask it about two launch commands without importing SGLang.

``REFUSALS`` is read over a flat mapping of *facts*: resolved server arguments and
environment variables by their own names, and what is known of target and draft (the keys
of ``model_facts``). A missing key means "not known", and a rule that needs it does not
apply. An argument that is not set may be missing or None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"
LAYER_IDS = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
TAIL_TOKENS = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
ALLOW_PARTIAL_CONTEXT = "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT"
ALLOW_COLD_DRAFT = "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT"
CONTEXT_ONLY_DRAFT = "SGLANG_DSPARK_PD_CONTEXT_ONLY_DRAFT"
PEER_DRAFT_TOKENS = "SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS"
MOONCAKE_AUX_TCP = "SGLANG_MOONCAKE_SEND_AUX_TCP"
MOONCAKE_POOL = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
PP_PARTITION = "SGLANG_PP_LAYER_PARTITION"
RUST_SERVER = "SGLANG_RUST_SERVER"
SWITCHES = (CAPTURE, ALLOW_PARTIAL_CONTEXT, ALLOW_COLD_DRAFT, CONTEXT_ONLY_DRAFT)
VARIABLES = (*SWITCHES, LAYER_IDS, TAIL_TOKENS, PEER_DRAFT_TOKENS, MOONCAKE_AUX_TCP, MOONCAKE_POOL, PP_PARTITION, RUST_SERVER)  # fmt: skip
# Server arguments: those that say the backend of prefill graphs, and all that a rule
# reads by name.
GRAPH_ARGUMENTS = ("cuda_graph_config", "cuda_graph_backend_prefill")
ARGUMENTS = (
    "speculative_algorithm", "speculative_draft_model_path", "pp_size", "attn_cp_size",
    "dcp_size", "disaggregation_transfer_backend",
    "disaggregation_decode_enable_radix_cache",
    "disaggregation_decode_host_receive_threshold", "enable_decoder_swa_bounded_replay",
    "enable_encoder_swa_bounded_replay", "enable_hierarchical_cache", "enable_hisparse",
    "enable_kv_cache_sharding", "enable_layernorm_sp", "enable_pd_role_switch",
    "enable_pdmux", "enable_return_aux_hidden_states", "enable_return_hidden_states",
    "enable_streaming_session", "enable_two_batch_overlap", "enable_unified_memory",
    "return_hidden_states_mode",
)  # fmt: skip

AUTO_TAIL = -1
DEFAULT_TAIL_TOKENS = 8
MAX_TAIL_TOKENS = 4096
# In front of a slot's hidden states: eight int64 words, a size that suits RDMA.
HEADER_BYTES = 64
# One request's share of the rows, and all rows of a rank of prefill.
MAX_SLOT_BYTES = 64 << 20
MAX_BUFFER_BYTES = 512 << 20
# Backends whose metadata send is cut to the hidden states that exist.
TAIL_BACKENDS = ("nixl", "mooncake", "fake")
DEFAULT_BACKEND = "mooncake"
# Targets whose pipeline stages pass captured hidden states on: through
# `pp_aux_capture`, and by code of their own.
STAGED_TARGETS = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
    "DeepseekV4ForCausalLM",
)
SELF_STAGED_TARGETS = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")

_BACKEND = "disaggregation_transfer_backend"
_RADIX = "disaggregation_decode_enable_radix_cache"
_HOST_RECEIVE = "disaggregation_decode_host_receive_threshold"

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One rule; ``says`` and ``fix`` may hold ``{placeholders}`` filled from the facts."""

    code: str
    role: str  # "prefill", "decode" or "both"
    applies: Callable[[Facts], Any]
    says: str
    fix: str


def refusals(facts: Facts) -> list[tuple[Refusal, str, str]]:
    """Rules that refuse an engine, each with its statement and its fix in words."""
    found = [
        rule
        for rule in REFUSALS
        if rule.role in ("both", facts.get("role")) and rule.applies(facts)
    ]
    shown = _Shown({**facts, **_derived(facts)}) if found else facts
    return [
        (rule, rule.says.format_map(shown), rule.fix.format_map(shown))
        for rule in found
    ]


def facts_from(
    args: Mapping[str, Any],
    environ: Mapping[str, str] | None,
    target_config: Mapping[str, Any] | None = None,
    draft_config: Mapping[str, Any] | None = None,
    role: str = "null",
) -> dict[str, Any]:
    """Facts about an engine.

    Args:
        args: server arguments by field name, all that were given.
        environ: its environment; None where it is not known.
        target_config, draft_config: parsed ``config.json``; None where not readable.
        role: ``--disaggregation-mode``.
    """
    given = {name: args[name] for name in ARGUMENTS if args.get(name) is not None}
    return {
        "role": role,
        _BACKEND: DEFAULT_BACKEND,
        **given,
        **_graph_backend(args),
        **{name: environ[name] for name in VARIABLES if name in (environ or {})},
        **model_facts(target_config, draft_config),
    }


def model_facts(
    target_config: Mapping[str, Any] | None, draft_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What two configs say.

    Returns:
        Those that are known of: architecture, model_type, num_layers (ids a layer may
        have), bundled_block_size, draft_layer_ids (ascending), window_need (positions
        the draft reads before its block, None for the whole prompt).
    """
    facts: dict[str, Any] = {}
    if target_config:
        target = _text_config(target_config)
        facts["model_type"] = target_config.get("model_type")
        facts["architecture"] = (target_config.get("architectures") or [None])[0]
        facts["bundled_block_size"] = target.get("dspark_block_size")
        if target.get("num_hidden_layers"):
            passes = int(target.get("num_loops") or 1)
            facts["num_layers"] = int(target["num_hidden_layers"]) * passes
        if target.get("dspark_target_layer_ids") is not None:
            draft_config = target_config
    if draft_config:
        draft = _text_config(draft_config)
        nested = draft.get("dflash_config") or draft.get("dspark_config") or {}
        for ids in (
            draft.get("dspark_target_layer_ids"),
            nested.get("target_layer_ids"),
            draft.get("target_layer_ids"),
        ):
            if ids:
                facts["draft_layer_ids"] = tuple(sorted(int(i) for i in ids))
                break
        facts["window_need"] = _window_need(draft)
    return facts


def captures(facts: Facts) -> bool:
    """Whether this is a prefill engine that captures hidden states for a handoff.

    Naming the layers asks for it as well.
    """
    asked = is_on(facts.get(CAPTURE)) or (facts.get(LAYER_IDS) and CAPTURE not in facts)
    prefill = facts.get("role") == "prefill" and not facts.get("speculative_algorithm")
    return bool(prefill and asked)


def pins_tail(facts: Facts) -> bool:
    """Whether this is a DSPARK decode engine that wants tails, of one length only."""
    return _drafts(facts, "decode") and TAIL_TOKENS in facts


def takes_part(facts: Facts) -> bool:
    """Whether this engine hands over or may take a tail."""
    return captures(facts) or _drafts(facts, "decode")


def is_undescribed(facts: Facts) -> bool:
    """Whether a prefill with a draft has a registry that does not describe it."""
    return _drafts(facts, "prefill") and is_on(facts.get(RUST_SERVER))


def names_tail(facts: Facts) -> bool:
    """Whether a DSPARK decode has a variable that must fit its draft."""
    return _drafts(facts, "decode") and (TAIL_TOKENS in facts or LAYER_IDS in facts)


def no_tail(facts: Facts) -> str | None:
    """Why a DSPARK decode can take no tail; None where it can."""
    asked = {TAIL_TOKENS: "1", **facts}
    found = [rule for rule in (*_TRANSFER, *_DECODE) if rule.applies(asked)]
    shown = _Shown({**asked, **_derived(asked)}) if found else asked
    return "; ".join(rule.says.format_map(shown) for rule in found) or None


def captures_on_stages(facts: Facts) -> bool:
    """Whether a prefill engine captures on pipeline stages, for a tail or a draft."""
    drafting = captures(facts) or _drafts(facts, "prefill")
    return drafting and int(facts.get("pp_size") or 1) > 1


def last_stage_start(facts: Facts) -> int | None:
    """First target layer of the last pipeline stage; None where it is not known."""
    layers, stages = facts.get("num_layers"), int(facts.get("pp_size") or 1)
    named = parse_layer_ids(facts.get(PP_PARTITION)) if stages > 1 else None
    # Layers that do not divide evenly go to the last stages, one each.
    return layers and layers - (named[-1] if named else -(-layers // stages))


def crosses_stages(facts: Facts) -> bool:
    """Whether a captured layer lies before the last stage, or may do so."""
    ids, start = layer_ids(facts), last_stage_start(facts)
    # A layer's output is the next layer's input, which most targets capture.
    after = not is_deepseek_v4(facts)
    return not ids or start is None or min(ids) + after < start


def is_on(value: str | None) -> bool:
    """Whether a switch is on; a value that is neither on nor off counts as off."""
    return value is not None and value.strip().lower() in ("1", "true", "yes", "y")


def parse_layer_ids(value: str | None) -> tuple[int, ...] | None:
    """Layer ids of a comma-separated list; None when it names none or is malformed."""
    items = [item for item in (value or "").split(",") if item.strip()]
    try:
        return tuple(int(item) for item in items) or None
    except ValueError:
        return None


def parse_int(value: str | None) -> int | None:
    try:
        return int(value or "")
    except ValueError:
        return None


def layer_ids(facts: Facts) -> tuple[int, ...] | None:
    """Target layers to capture: the variable's, else those of the draft's config."""
    return parse_layer_ids(facts.get(LAYER_IDS)) or facts.get("draft_layer_ids")


def tail_tokens(facts: Facts) -> int | None:
    """Length of the tail in tokens; None where it is malformed or cannot be known."""
    tokens = _given_tail(facts)
    return facts.get("window_need") if tokens == AUTO_TAIL else tokens


def partial_tail(facts: Facts) -> bool:
    """Whether a tail is known to cover less than the draft reads."""
    tokens = tail_tokens(facts)
    if tokens is None or "window_need" not in facts:
        return False
    return facts["window_need"] is None or tokens < facts["window_need"]


def peer_draft_tokens(facts: Facts) -> int | None:
    """Tokens the decode verifies at once, where a DeepSeek-V4 prefill must know them."""
    if PEER_DRAFT_TOKENS in facts:
        return parse_int(facts[PEER_DRAFT_TOKENS]) or 0
    block = facts.get("bundled_block_size")
    return int(block) + 1 if block else None


def is_deepseek_v4(facts: Facts) -> bool:
    return str(facts.get("architecture")).startswith("DeepseekV4ForCausalLM")


# -- what the rules ask -----------------------------------------------------------------


def _drafts(facts: Facts, role: str) -> bool:
    algorithm = str(facts.get("speculative_algorithm")).upper()
    return facts.get("role") == role and algorithm == "DSPARK"


def _in_tail(facts: Facts) -> bool:
    return captures(facts) or pins_tail(facts)


def _given_tail(facts: Facts) -> int | None:
    """The length as it was given; by default what the draft needs, where that is known."""
    if TAIL_TOKENS not in facts:
        return AUTO_TAIL if facts.get("window_need") else DEFAULT_TAIL_TOKENS
    tokens = parse_int(facts[TAIL_TOKENS].strip())
    fits = tokens is not None and 0 < tokens <= MAX_TAIL_TOKENS
    return tokens if fits or tokens == AUTO_TAIL else None


def _malformed_switches(facts: Facts) -> list[str]:
    known = ("1", "true", "yes", "y", "0", "false", "no", "n")
    return [
        f"{name}={facts[name]!r}"
        for name in SWITCHES
        if name in facts and facts[name].strip().lower() not in known
    ]


def _idle_variables(facts: Facts) -> list[str]:
    """Variables of a tail on an engine that has nothing to do with one."""
    if is_on(facts.get(CAPTURE)) or captures(facts) or _malformed_switches(facts):
        return []
    idle = []
    if LAYER_IDS in facts and not _drafts(facts, "decode"):
        idle.append(LAYER_IDS)
    if TAIL_TOKENS in facts and facts.get("role") == "prefill":
        idle.append(TAIL_TOKENS)
    return idle


def _layer_ids_problem(facts: Facts) -> str | None:
    """Why the layer ids cannot be captured, or would be misread."""
    named = facts.get(LAYER_IDS) or ""
    if takes_part(facts) and named.strip(", ") and parse_layer_ids(named) is None:
        return "expected target layer ids separated by commas, such as 1,9,17"
    ids, layers = layer_ids(facts), facts.get("num_layers")
    if not captures(facts) or not ids:
        return None
    if list(ids) != sorted(set(ids)):
        return "expected ascending ids without repetition, the order of the capture"
    if not layers:
        return None
    if ids[0] < 0 or ids[-1] >= layers:
        return f"the target's layers are 0 to {layers - 1}"
    # DeepSeek-V4 captures behind a layer, all others at the next layer's input.
    if ids[-1] == layers - 1 and not is_deepseek_v4(facts):
        return "the target's last layer cannot be captured: it has no next layer"
    return None


def _no_draft_known(facts: Facts) -> bool:
    """Whether a capturing prefill has a target that is known and no draft to ask."""
    return (
        captures(facts)
        and "architecture" in facts
        and "window_need" not in facts
        and not facts.get("speculative_draft_model_path")
    )


def _slot_bytes(facts: Facts) -> int | None:
    tokens, ids = tail_tokens(facts), layer_ids(facts)
    values = facts.get("hidden_size"), facts.get("dtype_bytes")
    if None in (tokens, ids, *values):
        return None
    return HEADER_BYTES + tokens * len(ids) * values[0] * values[1]


def _auto(facts: Facts) -> bool:
    return _in_tail(facts) and _given_tail(facts) == AUTO_TAIL


def _needs_consent(facts: Facts) -> bool:
    given = _given_tail(facts)
    return (
        _in_tail(facts)
        and given not in (None, AUTO_TAIL)
        and partial_tail(facts)
        and not is_on(facts.get(ALLOW_PARTIAL_CONTEXT))
    )


def _reads_whole_prompt(facts: Facts) -> bool:
    return facts.get("window_need", 0) is None


def _peer_tokens_missing(facts: Facts) -> bool:
    tokens = peer_draft_tokens(facts)
    unknown = is_deepseek_v4(facts) if tokens is None else tokens < 2
    return captures(facts) and unknown


def _other_layers_on_decode(facts: Facts) -> bool:
    named, read = parse_layer_ids(facts.get(LAYER_IDS)), facts.get("draft_layer_ids")
    differ = None not in (named, read) and named != read
    return differ and _drafts(facts, "decode")


def _staged_graphs(facts: Facts) -> bool:
    graphs = facts.get("prefill_graph_backend") not in (None, "disabled")
    own = not captures(facts) and facts.get("architecture") in SELF_STAGED_TARGETS
    return captures_on_stages(facts) and graphs and not own and crosses_stages(facts)


def _unknown_stages(facts: Facts) -> bool:
    known = facts.get("architecture") in (None, *STAGED_TARGETS, *SELF_STAGED_TARGETS)
    return captures_on_stages(facts) and not known and crosses_stages(facts)


def _partition_problem(facts: Facts) -> str | None:
    """Why a layout of pipeline stages cannot hold the target."""
    if not captures_on_stages(facts) or not facts.get(PP_PARTITION):
        return None
    layers, stages = facts.get("num_layers"), int(facts["pp_size"])
    sizes = parse_layer_ids(facts[PP_PARTITION])
    if sizes is None or min(sizes) < 1:
        return "expected numbers of layers separated by commas, such as 21,15"
    if len(sizes) != stages:
        return f"it names {len(sizes)} stages and --pp-size is {stages}"
    if layers and sum(sizes) != layers:
        return f"it names {sum(sizes)} layers and the target has {layers}"
    return None


def _metadata_elsewhere(facts: Facts) -> bool:
    """Whether a tail could not be in host memory, or would be sent in whole slots."""
    pool = facts.get(MOONCAKE_POOL) or ""
    # Mooncake takes "true" for NVLINK.
    over_tcp = pool == "NVLINK" or pool.lower() == "true"
    over_tcp = over_tcp or is_on(facts.get(MOONCAKE_AUX_TCP))
    over_tcp = over_tcp and facts.get(_BACKEND) == "mooncake"
    return _in_tail(facts) and (over_tcp or pool == "INTRA_NODE_NVLINK")


def _on_prefill(code: str, why: str, *names: str) -> Refusal:
    """A rule against flags of a capturing prefill."""
    flags = " or ".join(f"--{name.replace('_', '-')}" for name in names)
    return Refusal(
        code,
        "prefill",
        lambda f: captures(f) and any(f.get(name) for name in names),
        f"prefill captures hidden states and has {flags}: {why}",
        f"drop {flags} on prefill, or run DSPARK on prefill",
    )


def _on_decode(code: str, why: str, name: str) -> Refusal:
    """A rule against a flag of a decode that is to take tails."""
    flag = f"--{name.replace('_', '-')}"
    return Refusal(
        code,
        "decode",
        lambda f: pins_tail(f) and f.get(name),
        f"decode cannot take a tail with {flag}: {why}",
        f"drop {flag} on decode, or run DSPARK on prefill",
    )


# -- the table --------------------------------------------------------------------------

_VARIABLES: tuple[Refusal, ...] = (
    Refusal(
        "TAIL-SWITCH",
        "both",
        _malformed_switches,
        "a switch of the handoff is neither 1 nor 0: {malformed_switches}",
        "set it to 1 or 0, or unset it",
    ),
    Refusal(
        "TAIL-CAPTURE-ROLE",
        "both",
        lambda f: is_on(f.get(CAPTURE)) and f.get("role") != "prefill",
        f"{CAPTURE}=1 with --disaggregation-mode {{role}}: only a prefill engine has "
        "hidden states to hand over",
        f"set {CAPTURE} on the prefill engine only; a decode engine needs no variable",
    ),
    Refusal(
        "TAIL-CAPTURE-DRAFT",
        "prefill",
        lambda f: is_on(f.get(CAPTURE)) and bool(f.get("speculative_algorithm")),
        f"{CAPTURE}=1 with --speculative-algorithm {{speculative_algorithm}}: this "
        "prefill already runs the draft and sends draft KV, so it needs no capture",
        f"unset {CAPTURE}, or drop --speculative-algorithm, on prefill",
    ),
    Refusal(
        "TAIL-IDLE",
        "both",
        _idle_variables,
        f"{{idle_variables}} set, with no effect: this engine captures no hidden states "
        f"({CAPTURE} {{{CAPTURE}}}, --disaggregation-mode {{role}}, "
        "--speculative-algorithm {speculative_algorithm})",
        "unset {idle_variables}; on the prefill that is to hand over hidden states drop "
        f"--speculative-algorithm and set {CAPTURE}=1",
    ),
    Refusal(
        "TAIL-TOKENS",
        "both",
        lambda f: _in_tail(f) and _given_tail(f) is None,
        f"{TAIL_TOKENS}: expected a number of tokens from 1 to {MAX_TAIL_TOKENS}, or "
        f"{AUTO_TAIL} for as many as the draft's window needs; found {{{TAIL_TOKENS}!r}}",
        f"set {TAIL_TOKENS} on prefill, and leave it out on decode",
    ),
    Refusal(
        "TAIL-LAYER-IDS",
        "both",
        _layer_ids_problem,
        "{ids_of}={ids}: these target layers cannot be captured: {layer_ids_problem}",
        f"set {LAYER_IDS} to target_layer_ids of the draft's config.json",
    ),
    Refusal(
        "TAIL-DECODE-LAYER-IDS",
        "decode",
        _other_layers_on_decode,
        f"{LAYER_IDS}={{ids}} on decode, but its draft reads target layers "
        "{draft_layer_ids}",
        f"unset {LAYER_IDS} on decode, which reads the ids from its draft",
    ),
    Refusal(
        "TAIL-NO-LAYER-IDS",
        "prefill",
        lambda f: _no_draft_known(f) and not f.get(LAYER_IDS),
        f"{CAPTURE}=1, but nothing says which target layers the draft reads",
        f"set {LAYER_IDS} to target_layer_ids of the draft's config.json, or pass "
        "--speculative-draft-model-path without --speculative-algorithm (its config is "
        "read, its weights are not)",
    ),
    Refusal(
        "TAIL-PEER-TOKENS",
        "prefill",
        _peer_tokens_missing,
        f"{PEER_DRAFT_TOKENS} is {{peer_tokens}}: a DeepSeek-V4 prefill without a draft must "
        "know how many tokens its decode verifies at once (block size + 1), to allocate "
        "compressor rings of the same size",
        f"set {PEER_DRAFT_TOKENS} to --speculative-num-draft-tokens of the decode",
    ),
)

_LENGTH: tuple[Refusal, ...] = (
    Refusal(
        "TAIL-WINDOW-UNKNOWN",
        "prefill",
        lambda f: _auto(f) and _no_draft_known(f) and bool(f.get(LAYER_IDS)),
        f"{TAIL_TOKENS}={AUTO_TAIL}, but this prefill knows no draft to read a window from",
        f"set {TAIL_TOKENS} to a number, or pass --speculative-draft-model-path without "
        "--speculative-algorithm (its config is read, its weights are not)",
    ),
    Refusal(
        "TAIL-WINDOW-LIMIT",
        "both",
        lambda f: _auto(f) and (f.get("window_need") or 0) > MAX_TAIL_TOKENS,
        f"{TAIL_TOKENS}={AUTO_TAIL}: the draft's window needs {{window_need}} tokens; the "
        f"limit is {MAX_TAIL_TOKENS}",
        "run DSPARK on prefill",
    ),
    Refusal(
        "TAIL-WHOLE-PROMPT",
        "both",
        lambda f: _reads_whole_prompt(f) and (_auto(f) or _needs_consent(f)),
        f"{TAIL_TOKENS}={{given_tail}}, but the draft attends to the whole prompt, which "
        "no tail covers: output would stay exact, but fewer drafts would be accepted",
        f"run DSPARK on prefill, or accept it with a number of tokens in {TAIL_TOKENS} "
        f"and {ALLOW_PARTIAL_CONTEXT}=1 on both engines",
    ),
    Refusal(
        "TAIL-COVERAGE",
        "both",
        lambda f: not _reads_whole_prompt(f) and _needs_consent(f),
        f"{TAIL_TOKENS}={{given_tail}}, but the draft's window needs {{window_need}} "
        "tokens: output would stay exact, but fewer drafts would be accepted",
        f"unset {TAIL_TOKENS}, or accept it with {ALLOW_PARTIAL_CONTEXT}=1 on both engines",
    ),
    Refusal(
        "TAIL-SLOT-SIZE",
        "both",
        lambda f: _in_tail(f) and (_slot_bytes(f) or 0) > MAX_SLOT_BYTES,
        "a tail of {tail_tokens} tokens is {slot_bytes} bytes for one request; the limit "
        f"is {MAX_SLOT_BYTES}",
        f"lower {TAIL_TOKENS} on prefill",
    ),
    Refusal(
        "DECODE-RADIX-COLD",
        "decode",
        lambda f: (
            _drafts(f, "decode") and f.get(_RADIX) and is_on(f.get(ALLOW_COLD_DRAFT))
        ),
        f"decode has --disaggregation-decode-enable-radix-cache and {ALLOW_COLD_DRAFT}: "
        "requests share draft KV, and without context it would depend on which request "
        "came first",
        "on decode drop --disaggregation-decode-enable-radix-cache, or unset "
        f"{ALLOW_COLD_DRAFT}",
    ),
)

_TRANSFER: tuple[Refusal, ...] = (
    Refusal(
        "TAIL-BACKEND",
        "both",
        lambda f: _in_tail(f) and f.get(_BACKEND) not in (None, *TAIL_BACKENDS),
        "{role} has --disaggregation-transfer-backend {disaggregation_transfer_backend}, "
        "which cannot send a tail",
        f"use {' or '.join(TAIL_BACKENDS[:2])} on both engines",
    ),
    Refusal(
        "TAIL-AUX-TCP",
        "both",
        _metadata_elsewhere,
        "a tail needs metadata in host memory, sent by RDMA, but this engine has "
        f"{MOONCAKE_POOL} {{{MOONCAKE_POOL}}} and {MOONCAKE_AUX_TCP} "
        f"{{{MOONCAKE_AUX_TCP}}}: metadata would be in device memory or sent over TCP",
        f"unset {MOONCAKE_AUX_TCP} and {MOONCAKE_POOL} on both engines",
    ),
    Refusal(
        "TAIL-ROLE-SWITCH",
        "both",
        lambda f: _in_tail(f) and f.get("enable_pd_role_switch"),
        "{role} cannot take part in a tail handoff with --enable-pd-role-switch: which "
        "engine captures is fixed at start-up",
        "drop --enable-pd-role-switch on both engines, or run DSPARK on prefill",
    ),
)

_PREFILL: tuple[Refusal, ...] = (
    Refusal(
        "TAIL-RUST-SERVER",
        "prefill",
        lambda f: captures(f) and is_on(f.get(RUST_SERVER)),
        f"prefill captures hidden states and has {RUST_SERVER}: its bootstrap registry "
        "does not tell decodes that a tail will come",
        f"unset {RUST_SERVER} on prefill",
    ),
    _on_prefill(
        "TAIL-AUX-STATES",
        "that option captures other layers in the same forward",
        "enable_return_aux_hidden_states",
    ),
    _on_prefill(
        "TAIL-HIDDEN-STATES",
        "clients would get the captured hidden states",
        "enable_return_hidden_states",
        "return_hidden_states_mode",
    ),
    Refusal(
        "TAIL-CP",
        "prefill",
        lambda f: captures(f) and int(f.get("attn_cp_size") or 1) > 1,
        "prefill captures hidden states and has --attn-cp-size {attn_cp_size}: hidden "
        "states of one prompt are spread over ranks",
        "run prefill without context parallelism, or run DSPARK on prefill",
    ),
    _on_prefill(
        "TAIL-LAYERNORM-SP",
        "captured hidden states stay split over ranks",
        "enable_layernorm_sp",
    ),
    _on_prefill(
        "TAIL-KV-SHARDING",
        "KV sharding is not supported with a draft on decode",
        "enable_kv_cache_sharding",
    ),
    _on_prefill(
        "TAIL-TBO", "two captures would run in one forward", "enable_two_batch_overlap"
    ),
    _on_prefill(
        "TAIL-SESSION",
        "a session continues after cached tokens, whose hidden states are not computed",
        "enable_streaming_session",
    ),
    _on_prefill(
        "TAIL-PDMUX",
        "PD multiplexing splits a prefill by layers and skips the capture",
        "enable_pdmux",
    ),
    _on_prefill(
        "TAIL-SWA-REPLAY",
        "late layers run for part of the tokens only",
        "enable_decoder_swa_bounded_replay",
        "enable_encoder_swa_bounded_replay",
    ),
    Refusal(
        "TAIL-DSV41",
        "prefill",
        lambda f: captures(f) and f.get("model_type") == "deepseek_v41",
        "prefill captures hidden states of a DeepSeek-V4.1 target (model_type "
        "deepseek_v41): its late layers run for part of the tokens only, and decode "
        "expects a KV layout that a prefill without DSPARK does not have",
        "run DSPARK on prefill",
    ),
    Refusal(
        "TAIL-GRAPHS",
        "prefill",
        _staged_graphs,
        "prefill has --pp-size {pp_size} and prefill CUDA graphs (backend "
        "{prefill_graph_backend}): a graph replays a stage without the captured hidden "
        "states of earlier ones",
        "give prefill --cuda-graph-backend-prefill disabled, or --pp-size 1",
    ),
    Refusal(
        "TAIL-STAGES",
        "prefill",
        _unknown_stages,
        "prefill has --pp-size {pp_size}, and pipeline stages of {architecture} do not "
        "pass captured hidden states on: the draft reads target layers {ids}, and the "
        "last stage starts with layer {last_stage_start}",
        f"run prefill with --pp-size 1, or give the last stage the draft's layers with "
        f"{PP_PARTITION}; stages pass them on for "
        + ", ".join((*STAGED_TARGETS, *SELF_STAGED_TARGETS)),
    ),
    Refusal(
        "PP-PARTITION",
        "prefill",
        _partition_problem,
        f"{PP_PARTITION}={{{PP_PARTITION}}} on prefill: {{partition_problem}}",
        f"correct {PP_PARTITION} or --pp-size on prefill, or unset the variable",
    ),
)

_DECODE: tuple[Refusal, ...] = (
    Refusal(
        "TAIL-DCP",
        "decode",
        lambda f: pins_tail(f) and int(f.get("dcp_size") or 1) > 1,
        "decode cannot take a tail with --dcp-size {dcp_size}: one request's draft KV is "
        "split over ranks",
        "run decode without decode context parallelism, or run DSPARK on prefill",
    ),
    _on_decode(
        "TAIL-HISPARSE", "HiSparse builds its own draft input", "enable_hisparse"
    ),
    _on_decode(
        "TAIL-UNIFIED-MEMORY",
        "unified memory addresses draft KV by physical ids",
        "enable_unified_memory",
    ),
    _on_decode(
        "TAIL-HICACHE",
        "a prefix restored from host memory has no draft KV",
        "enable_hierarchical_cache",
    ),
    Refusal(
        "TAIL-HOST-RECEIVE",
        "decode",
        lambda f: pins_tail(f) and float(f.get(_HOST_RECEIVE, 1)) < 1,
        "decode cannot take a tail with --disaggregation-decode-host-receive-threshold "
        "{disaggregation_decode_host_receive_threshold}: requests are staged in host "
        "memory",
        "drop that flag on decode, or run DSPARK on prefill",
    ),
)

REFUSALS: tuple[Refusal, ...] = (
    *_VARIABLES,
    *_LENGTH,
    *_TRANSFER,
    *_PREFILL,
    *_DECODE,
)


# -- reading and showing facts ----------------------------------------------------------


class _Shown(dict[str, Any]):
    """Facts for a message; a missing one is shown as ``unset``."""

    def __missing__(self, key: str) -> str:
        return "unset"


def _derived(facts: Facts) -> dict[str, Any]:
    named = facts.get(LAYER_IDS)
    ids = ",".join(str(i) for i in layer_ids(facts) or ())
    return {
        "malformed_switches": " and ".join(_malformed_switches(facts)),
        "idle_variables": " and ".join(_idle_variables(facts)),
        "ids": named or ids,
        "ids_of": LAYER_IDS if named else "target_layer_ids of the draft's config",
        "layer_ids_problem": _layer_ids_problem(facts),
        "given_tail": _given_tail(facts),
        "tail_tokens": tail_tokens(facts),
        "slot_bytes": _slot_bytes(facts),
        "last_stage_start": last_stage_start(facts),
        "partition_problem": _partition_problem(facts),
        "peer_tokens": facts.get(PEER_DRAFT_TOKENS, "unset"),
    }


def _graph_backend(args: Mapping[str, Any]) -> dict[str, Any]:
    """The backend of prefill graphs, from the resolved record, its JSON or the flag."""
    found: Any = args.get("cuda_graph_config")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = None
    for name in ("prefill", "backend"):
        if isinstance(found, Mapping):
            found = found.get(name)
        else:
            found = getattr(found, name, None)
    found = found or args.get("cuda_graph_backend_prefill")
    return {"prefill_graph_backend": found} if found else {}


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def _window_need(draft: Mapping[str, Any]) -> int | None:
    window = draft.get("sliding_window")
    if draft.get("compress_ratios"):
        return int(window or draft.get("window_size") or 128)
    kinds = draft.get("layer_types")
    if kinds and window and set(kinds) == {"sliding_attention"}:
        return int(window) - 1
    return None
