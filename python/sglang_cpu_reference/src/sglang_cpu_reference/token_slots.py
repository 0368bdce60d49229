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


def no_triton(backend: str) -> bool:
    """SGLang's question whether Triton kernels may write the tables: never."""
    del backend
    return False


def assign_req_to_token_pool(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    batch_size: int,
) -> None:
    """Record newly allocated slots in each request's row.

    Args:
        rows: ``[batch_size]`` row of each request.
        table: ``req_to_token``, changed in place.
        start: ``[batch_size]`` first position to write.
        end: ``[batch_size]`` position after the last one.
        slots: ``[sum(end - start)]`` slots, request after request.
        batch_size: number of requests.

    Raises:
        ValueError: the slots do not cover the positions exactly.
    """
    spans = _row_spans(rows[:batch_size], start[:batch_size], end[:batch_size])
    needed = sum(last - first for _, first, last in spans)
    if needed != slots.numel():
        raise ValueError(
            f"{needed} positions to fill but {slots.numel()} KV slots given"
        )
    used = 0
    for row, first, last in spans:
        count = last - first
        table[row, first:last] = slots[used : used + count].to(table.dtype)
        used += count


def last_slots(
    table: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """The KV slot of each request's last prefix token.

    Args:
        table: ``req_to_token``.
        rows: ``[batch]`` row of each request.
        prefix_lens: ``[batch]`` tokens already placed.

    Returns:
        ``[batch]`` in the dtype of ``prefix_lens``; -1 without a prefix.
    """
    last = (prefix_lens - 1).clamp(min=0)
    slots = table[rows, last].to(prefix_lens.dtype)
    return torch.where(prefix_lens > 0, slots, -1)


def speculative_cache_locs(
    *,
    draft_token_num: int,
    batch_size: int,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
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
