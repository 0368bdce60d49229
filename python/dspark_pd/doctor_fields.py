"""Flags and variables that the doctor reads: their kinds, their other spellings.

All other flags of SGLang pass unread. ``NEIGHBOURS`` are flags of SGLang that look like
a misspelling of one of these and are none.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any, Final, Literal

Kind = Literal["int", "number", "text", "switch"]

FIELDS: Final[dict[str, Kind]] = {
    "model_path": "text",
    "revision": "text",
    "json_model_override_args": "text",
    "dtype": "text",
    "kv_cache_dtype": "text",
    "page_size": "int",
    "tp_size": "int",
    "pp_size": "int",
    "dp_size": "int",
    "attn_cp_size": "int",
    "dcp_size": "int",
    "enable_dp_attention": "switch",
    "enable_dp_lm_head": "switch",
    "enable_two_batch_overlap": "switch",
    "enable_hisparse": "switch",
    "disable_radix_cache": "switch",
    "enable_hierarchical_cache": "switch",
    "hicache_storage_backend": "text",
    "hicache_mem_layout": "text",
    "hicache_io_backend": "text",
    "speculative_algorithm": "text",
    "speculative_draft_model_path": "text",
    "speculative_draft_model_revision": "text",
    "speculative_draft_kv_cache_dtype": "text",
    "speculative_num_draft_tokens": "int",
    "disaggregation_mode": "text",
    "disaggregation_transfer_backend": "text",
    "disaggregation_bootstrap_port": "int",
    "disaggregation_decode_allocation_policy": "text",
    "disaggregation_decode_enable_radix_cache": "switch",
    "disaggregation_enable_kv_checksum": "switch",
    "disaggregation_decode_host_receive_threshold": "number",
    "cuda_graph_backend_prefill": "text",
    "enable_kv_cache_sharding": "switch",
    "enable_pd_role_switch": "switch",
    "enable_pdmux": "switch",
    "enable_return_aux_hidden_states": "switch",
    "enable_return_hidden_states": "switch",
    "return_hidden_states_mode": "text",
    "enable_streaming_session": "switch",
    "enable_unified_memory": "switch",
    "config": "text",
}
ALIASES: Final = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "model": "model_path",
    "attention_context_parallel_size": "attn_cp_size",
    "decode_context_parallel_size": "dcp_size",
    "speculative_draft_model": "speculative_draft_model_path",
    "enable_hicache": "enable_hierarchical_cache",
}
NEIGHBOURS: Final = (
    "attn_dp_size",
    "disaggregation_decode_enable_offload_kvcache",
    "dwdp_size",
    "enable_fp32_lm_head",
    "ep_size",
    "moe_data_parallel_size",
)
OUR_PREFIX: Final = "SGLANG_DSPARK_PD_"
CAPTURE: Final = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"
LAYER_IDS: Final = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
TAIL_TOKENS: Final = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
ALLOW_PARTIAL_CONTEXT: Final = "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT"
ALLOW_COLD_DRAFT: Final = "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT"
PEER_DRAFT_TOKENS: Final = "SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS"
HICACHE_FOLDER: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
AUX_TCP: Final = "SGLANG_MOONCAKE_SEND_AUX_TCP"
MEMORY_POOL: Final = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
VARIABLES: Final[dict[str, Kind]] = {
    CAPTURE: "switch",
    LAYER_IDS: "text",
    TAIL_TOKENS: "int",
    ALLOW_PARTIAL_CONTEXT: "switch",
    ALLOW_COLD_DRAFT: "switch",
    PEER_DRAFT_TOKENS: "int",
    HICACHE_FOLDER: "text",
    # Not "switch": SGLang starts with any value of it.
    AUX_TCP: "text",
    MEMORY_POOL: "text",
}
_TARGET: Final = ("model_path", "revision", "json_model_override_args")
_DRAFT: Final = (
    *_TARGET,
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
# What each key of a description is made from.
SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "backend": ("disaggregation_transfer_backend",),
    "algorithm": ("speculative_algorithm",),
    "mode": ("speculative_algorithm", CAPTURE, TAIL_TOKENS),
    "block_size": ("speculative_num_draft_tokens",),
    "page_size": ("page_size",),
    "allocation_policy": ("disaggregation_decode_allocation_policy",),
    "kv_dtype": ("kv_cache_dtype",),
    "tp": ("tp_size", "dp_size", "attn_cp_size", "enable_dp_attention"),
    "pp": ("pp_size",),
    "cp": ("attn_cp_size",),
    "dp": ("dp_size",),
    "dcp": ("dcp_size",),
    "allow_cold_draft": (ALLOW_COLD_DRAFT,),
    "allow_partial_context": (ALLOW_PARTIAL_CONTEXT,),
    "target": _TARGET,
    "target_heads": _TARGET,
    "attention": _TARGET,
    "rings": (
        *_TARGET,
        "speculative_algorithm",
        "speculative_num_draft_tokens",
        CAPTURE,
        PEER_DRAFT_TOKENS,
    ),
    "draft": _DRAFT,
    "draft_heads": _DRAFT,
    "draft_attention": _DRAFT,
    "draft_weights": _DRAFT,
    "draft_kv_dtype": (
        *_TARGET,
        "dtype",
        "kv_cache_dtype",
        "speculative_draft_kv_cache_dtype",
    ),
    "dspark": (*_DRAFT, TAIL_TOKENS, LAYER_IDS),
}
ON: Final = ("1", "true", "yes", "y")
_ON_OR_OFF: Final = (*ON, "0", "false", "no", "n")
_ALIKE: Final = 0.86


def field_of(flag: str) -> str:
    """Return the field of a flag without its dashes.

    SGLang's parser takes the beginning of a flag for the flag, so this does too.
    """
    name = flag.replace("-", "_")
    name = ALIASES.get(name, name)
    longer = [field for field in FIELDS if name and field.startswith(name)]
    return longer[0] if len(longer) == 1 and name not in NEIGHBOURS else name


def meant_by(field: str) -> str | None:
    """Return the field that ``field`` looks like a misspelling of."""
    if field in FIELDS or field in NEIGHBOURS:
        return None
    found = difflib.get_close_matches(field, [*FIELDS, *ALIASES], 1, _ALIKE)
    return ALIASES.get(found[0], found[0]) if found else None


def variable_meant_by(name: str) -> str | None:
    """Return the variable of the set that ``name`` looks like a misspelling of."""
    if name in VARIABLES or not name.startswith(OUR_PREFIX[:-3]):
        return None
    found = difflib.get_close_matches(name, VARIABLES, 1, _ALIKE)
    return found[0] if found else None


def flag_of(name: str) -> str:
    """Return a field as it is typed; a variable stays as it is."""
    return name if name in VARIABLES else f"--{name.replace('_', '-')}"


def value_of(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def misfit(name: str, value: Any) -> str | None:
    """Return what ``value`` should be, if SGLang could not start with it."""
    if value is None:
        return None
    kind = {**FIELDS, **VARIABLES}.get(name)
    if kind == "int":
        if isinstance(value, str):
            value = value_of(value.strip()) if value.strip() else 0
        if not isinstance(value, int) or isinstance(value, bool):
            return "a whole number"
    elif kind == "number":
        return None if _is_number(value) else "a number"
    elif name in VARIABLES and kind == "switch":
        if str(value).strip().lower() not in _ON_OR_OFF:
            return "1 or 0"
    elif kind == "text" and not isinstance(value, str):
        return "one value"
    return None


def _is_number(value: object) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(str(value)))
    except ValueError:
        return False
