"""Distributions over a small vocabulary and how far counts are from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy import stats

VOCABULARY = 8
#: What a right sampler falls below once in a thousand seeds; seeds are fixed.
LEAST_P = 1e-3
#: What a wrong one must fall below.
CAUGHT_P = 1e-9


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft, ``[VOCABULARY, VOCABULARY]``: a row per token before."""
    numbers = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, VOCABULARY, VOCABULARY, generator=numbers)
    logits = 1.5 * noise[0]
    return logits.softmax(dim=-1), (logits + noise[1]).softmax(dim=-1)


def joint(table: torch.Tensor, length: int) -> torch.Tensor:
    """Probability of each sequence of ``length`` tokens after token 0, flattened."""
    probs = table[0].double()
    for _ in range(length - 1):
        last = torch.arange(len(probs)) % VOCABULARY
        probs = (probs.unsqueeze(-1) * table.double()[last]).flatten()
    return probs


def p_value(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square test of ``[draws, length]`` tokens against :func:`joint`.

    Cells that expect fewer than five draws are counted together; a token that
    cannot be, once drawn, gives 0.
    """
    cells = torch.zeros(len(tokens), dtype=torch.long)
    for place in range(tokens.shape[1]):
        cells = cells * VOCABULARY + tokens[:, place]
    observed = torch.bincount(cells, minlength=len(expected)).double()
    if observed[expected == 0].sum() > 0:
        return 0.0
    wanted = expected * len(tokens) / expected.sum()
    rare = wanted < 5
    if wanted[rare].sum() < 5:
        rare |= wanted == wanted[~rare].min()
    sides = [
        torch.cat([side[~rare], side[rare].sum().view(1)])
        for side in (observed, wanted)
    ]
    return float(stats.chisquare(*sides).pvalue)


def filtered(probs: Sequence[float], top_k: int, top_p: float) -> torch.Tensor:
    """Top-k, then top-p of what is left, one list at a time."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[:top_k]
    mass = sum(probs[token] for token in order)
    kept, before = [], 0.0
    for token in order:
        if before <= top_p:
            kept.append(token)
        before += probs[token] / mass
    whole = sum(probs[token] for token in kept)
    return torch.tensor(
        [probs[t] / whole if t in kept else 0.0 for t in range(len(probs))]
    )
