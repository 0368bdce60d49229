"""Sampling of single tokens with each request's own numbers (``coins.py``).

SGLang's sampler calls these with the seeds of the batch: :func:`draw_by_seed` for the
token itself, :func:`draw_among_kept` where top-k, top-p or min-p leave some out,
:func:`draft_step` for the tokens that DSPARK's draft proposes.
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


def draw_among_kept(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor,
    positions: Tensor,
    *,
    return_filtered_probs: bool = False,
    **kwargs: Any,
) -> Any:
    """Around the sampler of top-k, top-p and min-p: draw in the vocabulary's order.

    One request with such a field sends its whole batch here, requests without one
    among it. The original draws from sorted tokens, where the same number is another
    token, and refuses min-p with seeds.

    Returns:
        As the original: int32 ``[rows]``, or four tensors with the filtered weights.
    """
    kept = _kept(probs, top_ks, top_ps, min_ps if need_min_p_sampling else None)
    drawn = draw_by_seed(kept.log(), sampling_seed, positions).int()
    if not return_filtered_probs:
        return drawn.view(-1)
    _, weights, order, _ = original(
        kept,
        top_ks,
        top_ps,
        min_ps,
        False,
        sampling_seed,
        positions,
        return_filtered_probs=True,
        **kwargs,
    )
    return drawn.view(-1), weights, order, kept.gather(1, drawn.long()).view(-1)


def _kept(
    probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor | None
) -> Tensor:
    """The weights that survive all three filters, in their place; the others 0."""
    ranked, order = probs.sort(dim=-1, descending=True)
    before = ranked.cumsum(dim=-1) - ranked
    keep = torch.arange(probs.shape[-1]) < top_ks.view(-1, 1)
    keep &= before <= top_ps.view(-1, 1)
    if min_ps is not None:
        keep &= ranked >= ranked[:, :1] * min_ps.view(-1, 1)
    return torch.zeros_like(probs).scatter(-1, order, ranked * keep)


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
