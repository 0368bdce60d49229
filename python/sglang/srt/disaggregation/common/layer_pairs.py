"""Which KV buffers of two engines hold the same layer.

A plain multi-head pool registers K of every layer, then V of every layer, and behind
them the same of a draft. Without ids a peer must guess where V starts. With a pipeline
stage on one side, or a draft on one side only, the guess is wrong for many layer
counts, and KV then lands in other layers without an error. So plain pools report layer
ids here, and a stage of a compressed-MLA target is placed by its pool's layer groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import (
        KVArgsRegisterInfo as MooncakePeer,
    )
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo, NixlKVManager
    from sglang.srt.mem_cache.memory_pool import KVCache

Pointers = list[int]


def plain_mha_layer_ids(
    pool: KVCache,
    draft_pool: KVCache | None,
    num_draft_entries: int,
    num_hidden_layers: int,
) -> list[int] | None:
    """Global layer id of every registered KV buffer, or None for other pools.

    Draft layers are numbered from ``num_hidden_layers`` on, like SGLang does for the
    pools that report ids themselves.
    """
    if not is_plain_mha(pool):
        return None
    last = pool.start_layer + pool.layer_num
    ids = list(range(pool.start_layer, last)) * 2
    if draft_pool is None or num_draft_entries == 0:
        return ids
    if not is_plain_mha(draft_pool) or num_draft_entries != 2 * draft_pool.layer_num:
        return None
    draft = range(num_hidden_layers, num_hidden_layers + draft_pool.layer_num)
    return ids + list(draft) * 2


def is_plain_mha(pool: KVCache) -> bool:
    """Whether a pool registers exactly one K and one V buffer per layer, K first."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if not isinstance(pool, MHATokenToKVPool):
        return False
    registered = pool._pd_registerable_tensors()
    own = [*pool.k_buffer, *pool.v_buffer]
    return len(registered) == len(own) == 2 * pool.layer_num and all(
        mine is theirs for mine, theirs in zip(own, registered, strict=True)
    )


def pair_by_layer(
    manager: NixlKVManager | MooncakeKVManager,
    peer: KVArgsRegisterInfo | MooncakePeer,
    *,
    positional: tuple[Pointers, Pointers],
) -> tuple[Pointers, Pointers]:
    """Source and destination buffers of a head-sliced transfer, paired by layer id.

    Args:
        positional: SGLang's own pairing, kept unless both peers report ids.

    Raises:
        ValueError: paired buffers are not all of one shape, which the slicing assumes.
    """
    source_ids = getattr(manager.kv_args, "kv_layer_ids", None)
    target_ids = getattr(peer, "dst_kv_layer_ids", None)
    if not source_ids or not target_ids:
        return positional
    from sglang.srt.disaggregation.utils import build_transfer_entry_pairs

    sources, targets = manager.kv_args.kv_data_ptrs, peer.dst_kv_ptrs
    pairs = build_transfer_entry_pairs(
        source_ids, target_ids, len(sources), len(targets)
    )
    lengths = {
        (manager.kv_args.kv_item_lens[i], peer.dst_kv_item_lens[j]) for i, j in pairs
    }
    if len(lengths) > 1:
        raise ValueError(
            "Unequal tensor parallel sizes on prefill and decode need one KV shape for "
            f"target and draft, got (prefill, decode) bytes a page {sorted(lengths)}. "
            "Use equal --tp-size, or a prefill without a draft."
        )
    return [sources[i] for i, _ in pairs], [targets[j] for _, j in pairs]


def check_buffers(manager: MooncakeKVManager, peer: MooncakePeer) -> None:
    """Raise for a registering decode to whose buffers Mooncake could not send.

    It slices where the tensor parallel sizes differ, by one pair of lengths for all
    buffers. Staged transfers, and those to another size of decode context
    parallelism, are not sliced that way.
    """
    mine, theirs = len(manager.kv_args.kv_data_ptrs), len(peer.dst_kv_ptrs)
    if theirs < mine:
        raise ValueError(
            f"decode registers fewer KV regions ({theirs}) than prefill ({mine}); "
            "prefill has a draft or layers that decode has not. Use the same model, "
            "draft and --speculative-algorithm on both engines."
        )
    is_mla = manager.is_mla_backend or manager.is_hybrid_mla_backend
    if is_mla or manager.enable_staging or peer.requires_dcp_relayout:
        return
    if manager.attn_tp_size != peer.dst_attn_tp_size:
        pair_by_layer(manager, peer, positional=([], []))


def compressed_mla_indices(
    manager: NixlKVManager, peer: KVArgsRegisterInfo, n_src: int, n_dst: int
) -> list[int] | None:
    """Where a pipeline stage's compressed-MLA buffers sit in a whole decode's.

    None where SGLang's own pairing serves: no pipeline, equal counts, other pools.

    Raises:
        RuntimeError: paired buffers differ in size.
    """
    if manager.pp_size == 1 or n_src == n_dst:
        return None
    ratios = manager.kv_args.mla_compression_ratios
    if not ratios:
        return None
    if manager.kv_args.kv_layer_ids or peer.dst_kv_layer_ids:
        return None
    _, indices = manager._mla_slice_ptrs_for_pp(
        list(range(n_src)), list(range(n_dst)), ratios
    )
    own = list(manager.kv_args.kv_item_lens)
    theirs = [peer.dst_kv_item_lens[j] for j in indices]
    if own != theirs:
        raise RuntimeError(
            f"Prefill stage and decode differ in KV bytes a page: {own} and {theirs}. "
            "Use one page size and one KV dtype on both engines."
        )
    return indices
