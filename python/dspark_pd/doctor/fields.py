"""Flags and variables that the doctor reads: their kinds, their other spellings.

All other flags of SGLang pass unread. ``NEIGHBOURS`` are flags of SGLang that look like
a misspelling of one of these and are none.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

Kind = Literal["int", "number", "text", "json", "switch"]

FIELDS: Final[dict[str, Kind]] = {
    "model_path": "text",
    "revision": "text",
    "json_model_override_args": "json",
    "dtype": "text",
    "kv_cache_dtype": "text",
    "page_size": "int",
    "tp_size": "int",
    "pp_size": "int",
    "dp_size": "int",
    "attn_dp_size": "int",
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
    "speculative_dspark_block_size": "int",
    "disaggregation_mode": "text",
    "disaggregation_transfer_backend": "text",
    "disaggregation_bootstrap_port": "int",
    "disaggregation_decode_allocation_policy": "text",
    "disaggregation_decode_enable_radix_cache": "switch",
    "disaggregation_enable_kv_checksum": "switch",
    "disaggregation_decode_host_receive_threshold": "number",
    "cuda_graph_backend_prefill": "text",
    "cuda_graph_config": "json",
    "enable_decoder_swa_bounded_replay": "switch",
    "enable_encoder_swa_bounded_replay": "switch",
    "enable_layernorm_sp": "switch",
    "enable_kv_cache_sharding": "switch",
    "enable_pd_role_switch": "switch",
    "enable_pdmux": "switch",
    "enable_return_aux_hidden_states": "switch",
    "enable_return_hidden_states": "switch",
    "return_hidden_states_mode": "text",
    "enable_streaming_session": "switch",
    "enable_unified_memory": "switch",
}
ALIASES: Final = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "model": "model_path",
    "attention_context_parallel_size": "attn_cp_size",
    "decode_context_parallel_size": "dcp_size",
    "speculative_draft_model": "speculative_draft_model_path",
    "enable_hicache": "enable_hierarchical_cache",
}
NEIGHBOURS: Final = (
    "disaggregation_decode_enable_offload_kvcache",
    "dwdp_size",
    "enable_fp32_lm_head",
    "ep_size",
    "moe_data_parallel_size",
    "moe_dp_size",
    "speculative_dflash_block_size",
)
RUST_SERVER: Final = "SGLANG_RUST_SERVER"
HICACHE_FOLDER: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
KEEP_ALIVE: Final = "SGLANG_TIMEOUT_KEEP_ALIVE"
BOOTSTRAP_TIMEOUT: Final = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
VARIABLES: Final[dict[str, Kind]] = {
    "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "switch",
    "SGLANG_DSPARK_PD_TARGET_LAYER_IDS": "text",
    "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": "int",
    "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT": "switch",
    "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT": "switch",
    "SGLANG_DSPARK_PD_CONTEXT_ONLY_DRAFT": "switch",
    "SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS": "int",
    HICACHE_FOLDER: "text",
    BOOTSTRAP_TIMEOUT: "int",
    KEEP_ALIVE: "int",
    "SGLANG_PP_LAYER_PARTITION": "text",
    # Not "switch": SGLang starts with any value of them.
    RUST_SERVER: "text",
    "SGLANG_MOONCAKE_SEND_AUX_TCP": "text",
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "text",
}
ON: Final = ("1", "true", "yes", "y")
_ON_OR_OFF: Final = (*ON, "0", "false", "no", "n")
_OURS: Final = "SGLANG_DSPARK_"
_ALIKE: Final = 0.86


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what matters of an environment; misspelt variables of the set as well."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in VARIABLES or name.startswith(_OURS)
    }


def meant_by(name: str) -> str | None:
    """Return the flag or variable of which ``name`` looks like a misspelling.

    A flag is given and returned as it is typed, dashes first.
    """
    if name.startswith("-"):
        field = name.lstrip("-").partition("=")[0].replace("-", "_")
        if field in NEIGHBOURS:
            return None
        found = difflib.get_close_matches(field, (*FIELDS, *ALIASES), 1, _ALIKE)
        return flag_of(ALIASES.get(found[0], found[0])) if found else None
    if name in VARIABLES or not name.startswith(_OURS):
        return None
    found = difflib.get_close_matches(name, VARIABLES, 1, _ALIKE)
    return found[0] if found else None


def flag_of(name: str) -> str:
    """Return a field as it is typed; a variable stays as it is."""
    return name if name in VARIABLES else f"--{name.replace('_', '-')}"


def settled(name: str, value: Any) -> Any:
    """Return a value as SGLang reads it: numbers as such, an algorithm in any case."""
    if not isinstance(value, str):
        return value
    if name == "speculative_algorithm":
        return value.upper() or None
    number = FIELDS.get(name) == "int" and re.fullmatch(r"-?\d+", value.strip())
    return int(value) if number else value


def wanted(name: str, value: Any) -> str | None:
    """Return what ``value`` should be, if SGLang could not start with it."""
    if value is None:
        return None
    kind = {**FIELDS, **VARIABLES}[name]
    fits = True
    if kind == "int":
        whole = (
            re.fullmatch(r"\s*(-?\d+)?\s*", value) if isinstance(value, str) else None
        )
        fits = type(value) is int or bool(whole)
    elif kind == "number":
        fits = _is_number(value)
    elif kind == "switch" and name in VARIABLES:
        fits = str(value).strip().lower() in ("", *_ON_OR_OFF)
    elif kind == "switch":
        fits = isinstance(value, bool)
    else:
        fits = isinstance(value, (str, dict) if kind == "json" else str)
    words = {"int": "a whole number", "number": "a number", "text": "one value"}
    words["json"] = "a JSON object"
    return None if fits else words.get(kind, "on or off")


def _is_number(value: object) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(str(value)))
    except ValueError:
        return False
