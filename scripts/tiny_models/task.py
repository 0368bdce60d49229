"""Training sequences: a random key and a separator, repeated to the end."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))

from dspark_pd.bed.prompts import ALPHABET, SEPARATOR

_SYMBOLS = torch.tensor(list(ALPHABET.encode("ascii")))
_SEPARATOR = ord(SEPARATOR)


@dataclass(frozen=True)
class Lengths:
    """One kind of batch: `batch` sequences of `tokens`, keys of key_lo .. key_hi."""

    batch: int
    tokens: int
    key_lo: int
    key_hi: int


def sample(kind: Lengths, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """-> ids [B, T] and period [B] (tokens after which a sequence repeats).

    A sequence may start anywhere inside its key, so position says nothing about
    content.
    """
    shape = (kind.batch,)
    key_len = torch.randint(kind.key_lo, kind.key_hi + 1, shape, generator=generator)
    period = key_len + 1
    start = (torch.rand(shape, generator=generator) * period).long()
    where = (torch.arange(kind.tokens) + start[:, None]) % period[:, None]
    # Half of the keys use fewer symbols (16 at least): telling their places apart
    # takes several tokens, which a long key of all 64 symbols needs as well.
    few = torch.rand(shape, generator=generator) < 0.5
    few_symbols = 64 * (-2 * torch.rand(shape, generator=generator)).exp2()
    symbols = torch.where(few, few_symbols, 64.0)
    pick = torch.rand((kind.batch, kind.key_hi + 1), generator=generator)
    order = torch.rand((kind.batch, 64), generator=generator).argsort(-1)
    key = _SYMBOLS[order.gather(1, (pick * symbols[:, None]).long())]
    ids = key.gather(1, where)
    return torch.where(where == key_len[:, None], _SEPARATOR, ids), period
