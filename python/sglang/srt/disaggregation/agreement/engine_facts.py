"""What a running engine knows about itself beyond its arguments.

Life cycle: `describe_engine` runs once per rank, after the queue has filled in the
arguments of its KV manager and before it builds it. It starts from the description that
the arguments give (`description.describe`) and replaces guesses by facts: parallel sizes,
dtypes of pools, metadata buffers, compressor rings, how a pipeline stage finds its layers
in a decode. The manager carries the result with the other arguments (`own_description`).
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.agreement.description import (
    DESCRIPTION_KEY,
    describe,
    stages_divide,
)
from sglang.srt.disaggregation.agreement.model_configs import read_config, ring_ratios
from sglang.srt.disaggregation.agreement.pair import Description
from sglang.srt.disaggregation.agreement.rules import (
    STAGES_BY_POSITION,
    STAGES_GUESSED,
    STAGES_MISSED,
)

# export: from tail-rules
from sglang.srt.disaggregation.agreement.tail import handed_over

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_ARGUMENTS = (
    "disaggregation_transfer_backend",
    "disaggregation_decode_allocation_policy",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_kv_cache_dtype",
    "model_path",
    "revision",
    "json_model_override_args",
    "dtype",
    "kv_cache_dtype",
    "page_size",
)


def describe_engine(
    scheduler: Scheduler,
    role: str,
    kv_args: KVArgs,
    queue: PrefillBootstrapQueue | DecodePreallocQueue,
) -> None:
    """Add this rank's description to the arguments of its KV manager.

    Args:
        queue: the queue that builds the manager; it holds the target's and the draft's
            pool and the metadata buffers.

    An engine that cannot describe itself still starts; its peers treat it as one without
    this agreement.
    """
    try:
        kv_args.engine_description = _describe_rank(scheduler, role, kv_args, queue)
    except Exception:
        logger.exception("This engine cannot describe itself to its peers")
        kv_args.engine_description = None


def own_description(manager: CommonKVManager) -> Description | None:
    """What `describe_engine` found; None for an engine that has no description."""
    return getattr(manager.kv_args, "engine_description", None)


def show_description(scheduler: Scheduler, state: dict[str, Any]) -> None:
    """Add this engine's description to the scheduler's part of ``/server_info``."""
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, name, None), "kv_manager", None)
        description = own_description(manager) if manager is not None else None
        if description is not None:
            state[DESCRIPTION_KEY] = description


def _describe_rank(scheduler, role, kv_args, queue) -> Description:
    args = _resolved_args(scheduler.server_args)
    model_config = scheduler.model_config
    # A tool has the file only; a config object adds defaults that it does not know.
    target_config = read_config(args["model_path"], args["revision"])
    target_config = target_config or model_config.hf_config.to_dict()
    description = describe(
        args,
        role=role,
        target_config=target_config,
        draft_config=read_config(
            args["speculative_draft_model_path"],
            args["speculative_draft_model_revision"],
        ),
        environ=os.environ,
    )
    # export: from tail-rules
    description |= handed_over(role, scheduler.server_args, model_config)
    description |= _parallel_sizes(role)
    # A rank without the draft's pool must not guess what another rank knows.
    description.pop("draft_kv_dtype", None)
    pool = getattr(queue, "token_to_kv_pool", None)
    draft_pool = getattr(queue, "draft_token_to_kv_pool", None)
    facts = {
        "page_size": int(kv_args.page_size),
        "kv_dtype": kv_args.kv_cache_dtype_str,
        "kv_storage": _storage_dtype(pool),
        "draft_kv_dtype": _storage_dtype(draft_pool),
        "aux": aux_layout(queue.metadata_buffers),
        "rings": _rings(ring_ratios(target_config)),
        "kv_layer_ids": bool(getattr(kv_args, "kv_layer_ids", None)),
        "stage_pairing": stage_pairing(description, pool, kv_args),
    }
    description.update({k: v for k, v in facts.items() if v is not None})
    return json.loads(json.dumps(description, default=str))


def _resolved_args(server_args: ServerArgs) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(server_args)
    return {name: getattr(view, name, None) for name in _ARGUMENTS}


def _parallel_sizes(role: str) -> dict[str, int]:
    """Sizes as the KV manager reads them; flags are rewritten before engines start."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    tp, cp = parallel.attn_tp_size, parallel.attn_cp_size
    if role == "prefill" and getattr(parallel, "enable_cp_tp_group_sharing", False):
        tp, cp = cp, 1  # as prefill registers at its bootstrap server
    return {"tp": tp, "cp": cp, "pp": parallel.pp_size, "dcp": parallel.attn_dcp_size}


def _storage_dtype(pool: Any) -> str | None:
    """dtype of a KV pool itself; ``--kv-cache-dtype auto`` follows ``--dtype``."""
    dtype = getattr(pool, "dtype", None)
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def aux_layout(buffers: MetadataBuffers) -> list[str]:
    """``name:bytes per slot`` of the metadata buffers, in the order of allocation.

    The sender addresses a slot with its own width, so widths must agree like names.
    """
    return [
        f"{name}:{value[0].nbytes}"
        for name, value in vars(buffers).items()
        if hasattr(value, "data_ptr")
    ]


def _rings(ratios: list[str]) -> dict[str, int] | None:
    """Slots of the compressor rings by ratio, as this release's pools allocate them.

    None for a model without rings.
    """
    if not ratios:
        return None
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

    # export: only <0.5.21
    if not hasattr(pools, "resolve_compress_state_ring_size"):
        return None  # Ring sizes do not depend on draft tokens: the guess is exact.
    resolve = pools.resolve_compress_state_ring_size
    return {ratio: int(resolve(int(ratio))) for ratio in ratios}


def stage_pairing(description: Description, pool: Any, kv_args: KVArgs) -> str | None:
    """How a pipeline stage finds its layers in a whole decode without layer ids.

    A constant of `rules`; None where that is not known.
    """
    backend = description.get("backend")
    if backend not in ("nixl", "mooncake"):
        return None
    if getattr(kv_args, "mla_compression_ratios", None):
        # export: only <0.5.23
        if backend == "nixl" and not _has_layer_pairs():
            return STAGES_MISSED
        return STAGES_BY_POSITION
    if description.get("attention") != "mha":
        # export: only <0.5.21
        if not _places_mla(backend):
            return STAGES_MISSED
        return STAGES_BY_POSITION
    if backend == "nixl":
        return STAGES_MISSED
    if not _is_mha_pool(pool):
        return None
    layers = (description.get("target") or {}).get("layers")
    divide = stages_divide(layers, description["pp"], os.environ)
    return {True: STAGES_GUESSED, False: STAGES_MISSED}.get(divide)


# export: only <0.5.23
def _has_layer_pairs() -> bool:
    """Whether compressed MLA is placed by its layer groups, as 0.5.23 and later do."""
    from importlib.util import find_spec

    return find_spec("sglang.srt.disaggregation.common.layer_pairs") is not None


# export: only <0.5.21
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
