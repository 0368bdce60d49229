"""Which drafted tokens a sampling request keeps, in PyTorch.

Written from the published algorithms: speculative sampling (Leviathan et al.,
arXiv:2211.17192; Chen et al., arXiv:2302.01318) and block verification (Sun et al.,
arXiv:2403.10444). With target distribution ``p`` and draft distribution ``q``, tokens
follow ``p`` exactly, whatever ``q`` is; ``q`` decides how many are kept.

Life cycle: DSPARK's verify calls :func:`chain_speculative_sampling` once per decode step
of a batch with a sampling request. The numbers come from the step's requests
(``coins.py``); outside a step, from the caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_cpu_reference import coins
from sglang_cpu_reference.sampling import draw


def chain_speculative_sampling(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Verify a chain of drafted tokens per request and draw the token after it.

    Args:
        predicts: int32, written at ``retrive_index`` of each kept slot: the token
            that follows the slot.
        accept_index: int32 ``[rows, slots]``, written: the kept slots of each row.
        accept_token_num: int32 ``[rows]``, written: drafted tokens kept.
        candidates: ``[rows, slots]``, the last committed token and the drafted ones.
        retrive_index: ``[rows, slots]``, place of each slot in ``predicts``.
        retrive_next_token: of trees; a chain needs none.
        retrive_next_sibling: of trees; a chain needs none.
        uniform_samples: float32 ``[rows, slots - 1]`` or wider, in [0, 1).
        uniform_samples_for_final_sampling: float32 ``[rows]`` in [0, 1).
        target_probs: float32 ``[rows, slots, vocabulary]``, after each slot.
        draft_probs: float32 ``[rows, slots - 1, vocabulary]``; NaN counts as 0.
        threshold_single: exact acceptance has no threshold.
        threshold_acc: exact acceptance has no threshold.
        deterministic: no choice here, the result depends on its arguments alone.
        block_verification: judge prefixes as a whole; keeps more tokens.
    """
    del retrive_next_token, retrive_next_sibling
    del threshold_single, threshold_acc, deterministic
    drafted = candidates.shape[1] - 1
    step = coins.current_step()
    if step is not None:
        numbers = step.uniforms(drafted + 1)
        uniform_samples, final = numbers[:, :drafted], numbers[:, drafted]
    else:
        final = uniform_samples_for_final_sampling
    target, draft = _comparable(target_probs, draft_probs)
    judge = accept_blockwise if block_verification else accept_each
    kept, scale = judge(
        target, draft, candidates[:, 1:].long(), uniform_samples[:, :drafted]
    )
    bonus = draw(leftover(target, draft, kept, scale), final)
    _write(predicts, accept_index, candidates, retrive_index, kept, bonus)
    accept_token_num.copy_(kept)


def _comparable(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the target's vocabulary; what is no probability of the draft is 0."""
    draft = draft[..., : target.shape[-1]]
    return target, torch.where((draft >= 0) & (draft <= 1), draft, 0.0)


def _of_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs[:, : tokens.shape[1]].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def accept_each(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keep each token with probability ``min(1, p / q)`` until the first refusal.

    Returns:
        int64 ``[rows]``: how many are kept; ``[rows]``: the weight of ``p`` in what is
        left, always 1.
    """
    p, q = _of_tokens(target, tokens), _of_tokens(draft, tokens)
    accepted = (q > 0) & (uniform * q < p)
    kept = accepted.long().cumprod(dim=-1).sum(dim=-1)
    return kept, torch.ones_like(p[:, 0])


def accept_blockwise(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keep the longest prefix that its own number accepts.

    Returns:
        As :func:`accept_each`; the weight is the prefix's joint ratio.
    """
    p, q = _of_tokens(target, tokens), _of_tokens(draft, tokens)
    rows, drafted = tokens.shape
    weight = torch.ones(rows)
    kept, kept_weight = torch.zeros(rows, dtype=torch.long), torch.ones(rows)
    for count in range(1, drafted + 1):
        ratio = torch.where(q[:, count - 1] > 0, p[:, count - 1] / q[:, count - 1], 0.0)
        weight = (weight * ratio).clamp(max=1.0)
        chance = weight
        if count < drafted:
            rest = (weight[:, None] * target[:, count] - draft[:, count]).clamp(min=0)
            mass = rest.sum(dim=-1)
            # Weight 1 and nothing left: both distributions agree, so it is kept.
            whole = mass + 1 - weight
            chance = torch.where(whole > 0, mass / whole, 1.0)
        taken = uniform[:, count - 1] < chance
        kept = torch.where(taken, count, kept)
        kept_weight = torch.where(taken, weight, kept_weight)
    return kept, kept_weight


def leftover(target: Tensor, draft: Tensor, kept: Tensor, scale: Tensor) -> Tensor:
    """Weights of the token after the kept ones, ``[rows, vocabulary]``.

    What the target has beyond the draft; the target itself after a chain kept whole,
    or where rounding leaves nothing.
    """
    rows = torch.arange(len(kept))
    p = target[rows, kept]
    refused = (kept < draft.shape[1]).unsqueeze(-1)
    q = draft[rows, kept.clamp(max=draft.shape[1] - 1)]
    rest = (scale.unsqueeze(-1) * p - q).clamp(min=0)
    use = refused & (rest.sum(dim=-1, keepdim=True) > 0)
    return torch.where(use, rest, p)


def _write(
    predicts: Tensor,
    accept_index: Tensor,
    candidates: Tensor,
    places: Tensor,
    kept: Tensor,
    bonus: Tensor,
) -> None:
    """The kept slots, and after each the next token; the bonus after the last."""
    slots = torch.arange(candidates.shape[1])
    on = slots <= kept.unsqueeze(-1)
    following = candidates.roll(-1, dims=1).scatter(
        1, kept.unsqueeze(-1), bonus.to(candidates.dtype).unsqueeze(-1)
    )
    predicts[places[on]] = following[on].to(predicts.dtype)
    accept_index[on] = places[on].to(accept_index.dtype)
