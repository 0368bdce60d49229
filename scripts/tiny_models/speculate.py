"""Accept length by greedy speculative decoding, not by teacher-forced accuracy.

The target decodes greedily; verify commits exactly what the target would have said.
So the walk over verify steps needs the target's greedy continuation once, its
context rows once, and one drafted block per step. Drafting itself is sequential:
the Markov head sees the tokens it drafted, not the true ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark_pd.bed.prompts import Prompt

from .models import GAMMA, Draft, Target
from .training import block_inputs


@dataclass
class Walk:
    """Counts over prompts.

    steps: verify steps. committed: tokens they committed, bonus included, the last
    step counted whole. generated: tokens asked for (first token included). accepted:
    histogram of accepted draft tokens per step, 0 .. GAMMA.
    """

    prompts: int = 0
    steps: int = 0
    committed: int = 0
    generated: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * (GAMMA + 1))

    @property
    def accept_length(self) -> float:
        """Committed tokens per verify step, bonus included: 1 .. GAMMA + 1."""
        return self.committed / self.steps

    def as_dict(self) -> dict:
        return {
            "accept_length": round(self.accept_length, 3),
            # What a server reports: the last step is cut at max_new_tokens.
            "completion_tokens_per_step": round(self.generated / self.steps, 3),
            "prompts": self.prompts,
            "verify_steps": self.steps,
            "accepted_histogram": self.accepted,
        }


@torch.no_grad()
def greedy_continuation(target: Target, prompt: Prompt, extra: int) -> list[int]:
    """The target's greedy tokens, `extra` more than asked so that the last block can
    be judged whole. Starts from the expected copy and repeats until the target agrees
    with itself: every round fixes at least one more token, so it ends."""
    start = len(prompt.ids)
    period = prompt.ids[: prompt.key_len + 1]
    length = prompt.max_new_tokens + extra
    guess = [period[(start + i) % len(period)] for i in range(length)]
    while True:
        ids = torch.tensor([prompt.ids + guess])
        said = target(ids)[0][0, start - 1 : -1].argmax(-1).tolist()
        if said == guess:
            return guess
        guess = said


def keep_context(rows: Tensor, prompt_len: int, tail: int | None) -> Tensor:
    """Rows [1, T, C] with the prompt's rows zeroed, but for its last `tail` ones.

    Rows of generated tokens stay: a decode engine computes those itself. A zeroed row
    gives zero K and V, which is what an unwritten draft pool holds. tail None keeps
    everything.
    """
    if tail is None:
        return rows
    rows = rows.clone()
    rows[:, : max(0, prompt_len - tail)] = 0
    return rows


@torch.no_grad()
def draft_block(target: Target, draft: Draft, ids: list[int], rows: Tensor) -> Tensor:
    """GAMMA tokens drafted after the anchor `ids[-1]`, from rows of the ids before."""
    anchor = torch.tensor([[len(ids) - 1]])
    token = torch.tensor([[ids[-1]]])
    hidden = draft(rows[:, : len(ids) - 1], block_inputs(target, token), anchor)
    base = target.head(hidden)[0]
    drafted, previous = [], token[0, 0]
    for position in range(GAMMA):
        logits = base[position] + draft.markov_head(previous)
        previous = logits.argmax()
        drafted.append(previous)
    return torch.stack(drafted)


@torch.no_grad()
def walk(
    target: Target, draft: Draft, prompts: Iterable[Prompt], tail: int | None = None
) -> Walk:
    """Decode every prompt speculatively and count. tail: see `keep_context`."""
    total = Walk()
    for prompt in prompts:
        steps = _decode(target, draft, prompt, tail)
        total.prompts += 1
        total.steps += len(steps)
        total.committed += sum(steps) + len(steps)
        total.generated += prompt.max_new_tokens
        for accepted in steps:
            total.accepted[accepted] += 1
    return total


def _decode(
    target: Target, draft: Draft, prompt: Prompt, tail: int | None
) -> list[int]:
    """Accepted draft tokens of each verify step of one request."""
    start = len(prompt.ids)
    ids = prompt.ids + greedy_continuation(target, prompt, GAMMA)
    rows = keep_context(target(torch.tensor([ids]))[1], start, tail)
    known, steps = start + 1, []
    while known < start + prompt.max_new_tokens:
        drafted = draft_block(target, draft, ids[:known], rows).tolist()
        truth = ids[known : known + GAMMA]
        accepted = 0
        while accepted < GAMMA and drafted[accepted] == truth[accepted]:
            accepted += 1
        steps.append(accepted)
        known += accepted + 1
    return steps
