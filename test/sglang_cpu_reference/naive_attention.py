"""Attention by its definition: one query, one head, one key at a time."""

from __future__ import annotations

import math

import torch


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int = -1,
) -> torch.Tensor:
    """Same contract as ``attend`` with the visibility rule spelled out.

    ``query`` rows are the last positions of the sequence; float64 inside.
    """
    rows, heads, _ = query.shape
    total, kv_heads, _ = key.shape
    out = torch.zeros(rows, heads, value.shape[-1], dtype=torch.float64)
    for row in range(rows):
        position = total - rows + row
        seen = [
            k
            for k in range(total)
            if (not causal or k <= position)
            and (window_left < 0 or k >= position - window_left)
        ]
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = [
                float(query[row, head].double() @ key[k, group].double()) * scale
                for k in seen
            ]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            for weight, k in zip(weights, seen, strict=True):
                out[row, head] += weight / sum(weights) * value[k, group].double()
    return out
