"""What a running engine knows of itself and its arguments do not tell.

`describe_engine` runs once per rank, before the KV manager is built: it takes the
description that the arguments give (`peer_description.describe`) and puts facts in
place of guesses: dtypes of pools, metadata buffers, compressor rings, how a pipeline
stage finds its layers in a decode, and whether refusals are understood here.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from typing import Any

from sglang.srt.disaggregation.common.peer_agreement import BACKENDS_WITH_ADMISSION
from sglang.srt.disaggregation.common.peer_agreement_table import (
    STAGES_BY_POSITION,
    STAGES_GUESSED,
    STAGES_MISSED,
    Description,
)
from sglang.srt.disaggregation.common.peer_description import (
    describe,
    read_config,
    ring_ratios,
    stages_divide,
)

logger = logging.getLogger(__name__)

_ADMISSION = "sglang.srt.disaggregation.common.peer_admission"
_PLACING = "sglang.srt.disaggregation.common.layer_pairs"


def describe_engine(scheduler: Any, role: str, kv_args: Any, queue: Any) -> None:
    """Attach this rank's description to `kv_args`, before its KV manager is built.

    Args:
        queue: the prealloc or bootstrap queue that builds the manager; it holds the
            target's and the draft's pool and the metadata buffers.

    An engine that cannot describe itself starts all the same and is treated as one
    without this agreement.
    """
    try:
        kv_args.peer_description = _describe_rank(scheduler, role, kv_args, queue)
    except Exception:
        logger.exception("This engine cannot describe itself to its peers")
        kv_args.peer_description = None


def _describe_rank(scheduler, role, kv_args, queue) -> Description:
    args = _resolved_args(scheduler.server_args)
    model_config = scheduler.model_config
    # The doctor has the file only; a config object adds defaults that it does not know.
    target_config = read_config(args.get("model_path"), args.get("revision"))
    target_config = target_config or model_config.hf_config.to_dict()
    description = describe(
        args,
        role=role,
        target_config=target_config,
        draft_config=read_config(
            args.get("speculative_draft_model_path"),
            args.get("speculative_draft_model_revision"),
        ),
        environ=os.environ,
    )
    handoff = _describe_handoff(role, scheduler.server_args, model_config)
    if handoff is not None:
        description["mode"] = handoff["mode"]
        description["dspark"] = handoff
    # A rank without a draft's pool must not guess what another rank knows.
    description.pop("draft_kv_dtype", None)
    pool = getattr(queue, "token_to_kv_pool", None)
    facts = {
        "page_size": int(kv_args.page_size),
        "kv_dtype": kv_args.kv_cache_dtype_str,
        "kv_storage": _storage_dtype(pool),
        "draft_kv_dtype": _storage_dtype(
            getattr(queue, "draft_token_to_kv_pool", None)
        ),
        "aux": aux_layout(queue.metadata_buffers),
        "rings": _rings(ring_ratios(target_config)),
        "kv_layer_ids": bool(getattr(kv_args, "kv_layer_ids", None)),
        "stage_pairing": stage_pairing(description, pool, kv_args),
        "admits": admits(description.get("backend")) or None,
        "kv_entries": len(kv_args.kv_item_lens),
        "draft_entries": int(getattr(kv_args, "num_draft_entries", 0)),
    }
    description.update({k: v for k, v in facts.items() if v is not None})
    return json.loads(json.dumps(description, default=str))


def _resolved_args(server_args: Any) -> dict[str, Any]:
    try:
        from sglang.srt.arg_groups.overrides import resolved_view

        view = resolved_view(server_args)
    except ImportError:  # releases without deferred resolution
        view = server_args
    names = [
        "disaggregation_transfer_backend",
        "disaggregation_decode_allocation_policy",
        "speculative_algorithm",
        "page_size",
        "tp_size",
        "speculative_num_draft_tokens",
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "model_path",
        "revision",
        "json_model_override_args",
        "dtype",
        "dp_size",
        "speculative_draft_kv_cache_dtype",
        "kv_cache_dtype",
        "pp_size",
        "attn_cp_size",
        "dcp_size",
        "enable_dp_attention",
    ]
    return {name: getattr(view, name, None) for name in names}


def _describe_handoff(role: str, server_args: Any, model_config: Any) -> dict | None:
    """The hand-over's own part of the description; None where it is not installed."""
    try:
        from sglang.srt.speculative.dspark_components import dspark_handoff
    except ImportError:
        return None
    describe_role = getattr(dspark_handoff, f"describe_{role}", None)
    return describe_role(server_args, model_config) if describe_role else None


def _storage_dtype(pool: Any) -> str | None:
    """dtype of a KV pool itself; ``--kv-cache-dtype auto`` follows ``--dtype``."""
    dtype = getattr(pool, "dtype", None)
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def aux_layout(buffers: Any) -> list[str]:
    """``name:bytes per slot`` of the metadata buffers, in the order of allocation.

    The sender addresses a slot with its own width, so widths must agree like names.
    The hand-over's tail is left out: it is the last buffer and its mode covers it.
    """
    return [
        f"{name}:{value[0].nbytes}"
        for name, value in vars(buffers).items()
        if hasattr(value, "data_ptr") and "tail" not in name
    ]


def _rings(ratios: list[str]) -> dict[str, int] | None:
    """Rows of the compressor rings by ratio, as this release's pools allocate them.

    None for a model without rings, and on releases where the guess is exact.
    """
    if not ratios:
        return None
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

    resolve = getattr(pools, "resolve_compress_state_ring_size", None)
    if resolve is None:  # ring size does not depend on the number of draft tokens
        return None
    return {ratio: int(resolve(int(ratio))) for ratio in ratios}


def admits(backend: str | None) -> bool:
    """Whether this prefill takes a peer's refusal for what it is.

    Without the component that judges messages, one of an unknown kind ends the thread
    that reads it.
    """
    return backend in BACKENDS_WITH_ADMISSION and _is_installed(_ADMISSION)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def stage_pairing(description: Description, pool: Any, kv_args: Any) -> str | None:
    """How a pipeline stage finds its layers in a whole decode without layer ids.

    A constant of `peer_agreement_table`; None where that is not known.
    """
    backend = description.get("backend")
    if backend not in BACKENDS_WITH_ADMISSION:
        return None
    if getattr(kv_args, "mla_compression_ratios", None):
        placed = backend == "mooncake" or _is_installed(_PLACING)
        return STAGES_BY_POSITION if placed else STAGES_MISSED
    if description.get("attention") != "mha":
        return STAGES_BY_POSITION if _places_mla(backend) else STAGES_MISSED
    if backend == "nixl":
        return STAGES_MISSED
    if not _is_mha_pool(pool):
        return None
    layers = (description.get("target") or {}).get("layers")
    divide = stages_divide(layers, description["pp"], os.environ)
    return {True: STAGES_GUESSED, False: STAGES_MISSED}.get(divide)


def _places_mla(backend: str) -> bool:
    """Whether this release's backend slices a whole decode's MLA buffers by stage."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    return backend == "mooncake" or hasattr(
        CommonKVManager, "_mla_kv_entry_span_with_pp"
    )


def _is_mha_pool(pool: Any) -> bool:
    """Pools that register K of every layer, then V of every layer."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return isinstance(pool, MHATokenToKVPool)
