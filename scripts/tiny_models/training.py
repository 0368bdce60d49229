"""Train the target on copying, then a draft on blocks after random anchors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import GAMMA, Draft, Target
from .task import Lengths, sample

#: Embedded in the block positions that are still unknown.
MASK_TOKEN_ID = 257


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps, each on one kind drawn evenly from `kinds`."""

    steps: int
    kinds: tuple[Lengths, ...]


@dataclass(frozen=True)
class Recipe:
    """Phases under one learning-rate schedule: warm-up, constant, linear decay.

    lr: peak rate of the matrices (Muon, scaled to match AdamW's step size).
    lr_other: peak rate of embeddings and norms (AdamW).
    decay: share of all steps, at the end, over which the rates fall to zero.
    anchors: draft blocks per sequence; unused by the target.
    """

    phases: tuple[Phase, ...]
    lr: float = 4e-3
    lr_other: float = 2e-3
    decay: float = 0.5
    warmup: int = 50
    anchors: int = 12

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def rate(self, step: int) -> float:
        """Fraction of the peak rates at `step`."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, (step + 1) / self.warmup, left)


Log = Callable[[str], None]
Loss = Callable[[Lengths, torch.Generator], tuple[Tensor, float]]


def target_loss(target: Target) -> Loss:
    """Next-token loss over the repeats only; the figure is copy accuracy."""

    def loss(kind: Lengths, generator: torch.Generator) -> tuple[Tensor, float]:
        ids, period = sample(kind, generator)
        logits, _ = target(ids[:, :-1])
        labels = ids[:, 1:]
        known = torch.arange(1, ids.shape[1]) >= period[:, None]
        logits, labels = logits[known], labels[known]
        hit = (logits.argmax(-1) == labels).float().mean().item()
        return F.cross_entropy(logits, labels), hit

    return loss


def draft_loss(target: Target, draft: Draft, anchors_per_sequence: int) -> Loss:
    """Loss over all block positions; the figure is accept length of the blocks."""

    def loss(kind: Lengths, generator: torch.Generator) -> tuple[Tensor, float]:
        ids, period = sample(kind, generator)
        shape = (kind.batch, anchors_per_sequence)
        room = (kind.tokens - GAMMA - period)[:, None]
        anchors = (torch.rand(shape, generator=generator) * room).long()
        anchors = anchors + period[:, None]
        with torch.no_grad():
            _, rows = target(ids)
        logits, labels = block_logits(target, draft, ids, rows, anchors)
        right = (logits.argmax(-1) == labels).float().cumprod(-1)
        accept = right.sum(-1).mean().item() + 1
        return F.cross_entropy(logits.flatten(0, 2), labels.flatten()), accept

    return loss


def block_logits(
    target: Target, draft: Draft, ids: Tensor, rows: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [B, A, GAMMA, V] with the true previous tokens fed to the Markov head,
    and the labels [B, A, GAMMA] they should predict."""
    batch, count = anchors.shape
    at = anchors[..., None] + torch.arange(GAMMA + 1)
    tokens = ids.gather(1, at.flatten(1)).view(batch, count, GAMMA + 1)
    hidden = draft(rows, block_inputs(target, tokens[..., 0]), anchors)
    base = target.head(hidden).view(batch, count, GAMMA, -1)
    return base + draft.markov_head(tokens[..., :-1]), tokens[..., 1:]


def block_inputs(target: Target, anchor_tokens: Tensor) -> Tensor:
    """[B, A] anchor tokens -> embeddings of [anchor, mask ...]: [B, A*G, hidden]."""
    block = anchor_tokens.new_full((*anchor_tokens.shape, GAMMA), MASK_TOKEN_ID)
    block[..., 0] = anchor_tokens
    return target.embed(block.flatten(1))


def train(module: nn.Module, loss: Loss, recipe: Recipe, seed: int, log: Log) -> None:
    """Run every phase of `recipe`. Logs the mean figure of every 100 steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = _optimizers(module, recipe)
    began, figures, step = time.monotonic(), [], 0
    for phase in recipe.phases:
        for _ in range(phase.steps):
            pick = int(torch.randint(len(phase.kinds), (1,), generator=generator))
            value, figure = loss(phase.kinds[pick], generator)
            _update(module, optimizers, value, recipe.rate(step))
            figures.append(figure)
            step += 1
            if step % 100 == 0:
                mean, seconds = sum(figures) / 100, time.monotonic() - began
                log(f"step {step:5d}/{recipe.steps} {mean:.3f} {seconds:5.0f} s")
                figures.clear()


def _optimizers(module: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers: it forms the copying heads in about half
    the steps AdamW needs here. AdamW for everything a token id indexes, and norms."""
    by_token = ("embed_tokens.weight", "markov_w1.weight", "markov_w2.weight")
    matrices, others = [], []
    for name, parameter in module.named_parameters():
        is_matrix = parameter.dim() == 2 and not name.endswith(by_token)
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=recipe.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        others, lr=recipe.lr_other, betas=(0.9, 0.98), weight_decay=0.01
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def _update(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    value: Tensor,
    rate: float,
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    value.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["peak"]
        optimizer.step()
