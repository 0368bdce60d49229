"""Sampling of single tokens with each request's own numbers (``coins.py``).

SGLang's sampler calls these with the seeds of the batch: :func:`draw_by_seed` for the
token itself, :func:`min_p_before` on the way to it, :func:`draft_step` for the tokens
that DSPARK's draft proposes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_cpu_reference import coins


def draw_by_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """One index per row, by the inverse of its cumulative distribution.

    Args:
        logprobs: ``[rows, columns]``, log of weights that need no fixed sum.
        seed: int64 ``[rows]``.
        positions: ``[rows]``, position of the token before the one drawn.

    Returns:
        int64 ``[rows, 1]``; never a column of weight 0 beside others.
    """
    where = zip(seed.tolist(), positions.tolist(), strict=True)
    uniform = [coins.stream(*at, coins.Purpose.SAMPLE).random() for at in where]
    weights = logprobs.double().softmax(dim=-1)
    return draw(weights, torch.tensor(uniform, dtype=torch.float64)).unsqueeze(-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index of each row's weights that a number in [0, 1) falls on.

    Args:
        weights: ``[rows, columns]``, at least one positive per row.
        uniform: ``[rows]``.

    Returns:
        int64 ``[rows]``.
    """
    reached = weights.double().cumsum(dim=-1)
    aim = uniform.double() * reached[:, -1]
    index = torch.searchsorted(reached, aim.unsqueeze(-1), right=True).squeeze(-1)
    # A number next to 1 may round up to the whole sum, past the last weight.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(index, last)


def min_p_before(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around the sampler of top-k, top-p and min-p, which refuses min-p with seeds.

    Min-p drops the tail of the sorted probabilities and leaves the sums before it
    as they are, so it may come first: the same tokens survive all three.
    """
    if need_min_p_sampling:
        least = probs.amax(dim=-1, keepdim=True) * min_ps.view(-1, 1)
        probs = probs.masked_fill(probs < least, 0.0)
    return original(probs, top_ks, top_ps, min_ps, False, *args, **kwargs)


_BY_ROW = ("base_logits", "bias", "temperatures", "logits_out")


def draft_step(original: Callable[..., Any], cls: type, **kwargs: Any) -> Tensor:
    """Around ``MarkovSampleStep.execute``: each row with noise of its own request.

    The noise of the whole batch depends on a row's place and on the steps since the
    engine started; a row drafted alone, under its request's key, depends on neither.
    """
    step = coins.current_step()
    if step is None:
        return original(cls, **kwargs)
    tokens = []
    for row, key in enumerate(step.draft_keys()):
        own = {
            name: kwargs[name][row : row + 1]
            for name in _BY_ROW
            if kwargs.get(name) is not None
        }
        offset = torch.zeros_like(kwargs["offset"])
        tokens.append(original(cls, **{**kwargs, **own, "key": key, "offset": offset}))
    return torch.cat(tokens)
