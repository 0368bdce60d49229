"""Attention of one request over its cached keys, in plain PyTorch.

Deliberately one request at a time: the result of a request cannot depend on who
shares its batch, which is what lets a test compare outputs exactly.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

NO_WINDOW = -1


def visible_keys(
    query_len: int,
    key_len: int,
    *,
    causal: bool,
    window_left: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor | None:
    """Which keys each query may see; queries are the last ``query_len`` positions.

    Args:
        causal: a query sees no key after its own position.
        window_left: a query sees at most this many keys before its own position;
            ``NO_WINDOW`` (-1) for all. Keys after it are ruled by ``causal`` alone.

    Returns:
        bool ``[query_len, key_len]``, or None when every query sees every key.
    """
    if window_left == NO_WINDOW and (not causal or query_len == 1):
        return None
    key = torch.arange(key_len, device=device)
    query = torch.arange(key_len - query_len, key_len, device=device).unsqueeze(1)
    mask = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
    if causal:
        mask &= key <= query
    if window_left != NO_WINDOW:
        mask &= key >= query - window_left
    return mask


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention with grouped key/value heads.

    Args:
        query: ``[query_len, heads, head_dim]``.
        key: ``[key_len, kv_heads, head_dim]``; ``heads`` is a multiple of it.
        value: ``[key_len, kv_heads, value_dim]``.
        mask: bool ``[query_len, key_len]`` from :func:`visible_keys`.

    Returns:
        ``[query_len, heads, value_dim]`` in the query's dtype.
    """
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.to(query.dtype).transpose(0, 1).unsqueeze(0),
        value.to(query.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
