"""Tables of KV slots, written and read with plain tensor indexing.

``req_to_token`` is the int32 table ``[max_requests, max_context]`` that maps a
request's token positions to KV slots.
"""

from __future__ import annotations

import torch


def _row_spans(
    rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), start.tolist(), end.tolist(), strict=True))


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Record newly allocated slots in each request's row.

    Args:
        req_pool_indices: ``[batch_size]`` row of each request.
        req_to_token: the table, changed in place.
        start_offset: ``[batch_size]`` first position to write.
        end_offset: ``[batch_size]`` position after the last one.
        out_cache_loc: ``[sum(end - start)]`` slots, request after request.
        batch_size: number of requests.

    Raises:
        ValueError: the slots do not cover the positions exactly.
    """
    spans = _row_spans(
        req_pool_indices[:batch_size],
        start_offset[:batch_size],
        end_offset[:batch_size],
    )
    needed = sum(end - start for _, start, end in spans)
    if needed != out_cache_loc.numel():
        raise ValueError(
            f"{needed} positions to fill but {out_cache_loc.numel()} KV slots given"
        )
    used = 0
    for row, start, end in spans:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[used : used + count].to(
            req_to_token.dtype
        )
        used += count


def last_slots(
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """The KV slot of each request's last prefix token.

    Args:
        req_pool_indices_tensor: ``[batch]`` row of each request.
        prefix_lens_tensor: ``[batch]`` tokens already placed.

    Returns:
        ``[batch]`` in the dtype of ``prefix_lens_tensor``; -1 without a prefix.
    """
    last = (prefix_lens_tensor - 1).clamp(min=0)
    slots = req_to_token[req_pool_indices_tensor, last].to(prefix_lens_tensor.dtype)
    return torch.where(prefix_lens_tensor > 0, slots, -1)


def speculative_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """KV slots of each request's draft window.

    Returns:
        int64 ``[batch_size * draft_token_num]``, request after request. Positions
        past ``end_offset`` keep slot 0, the padding slot.
    """
    locs = torch.zeros(batch_size, draft_token_num, dtype=torch.int64, device=device)
    spans = _row_spans(
        req_pool_indices[:batch_size],
        start_offset[:batch_size],
        end_offset[:batch_size],
    )
    for index, (row, start, end) in enumerate(spans):
        locs[index, : end - start] = req_to_token[row, start:end]
    return locs.view(-1)
