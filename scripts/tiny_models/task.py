"""Training sequences: a random key and a separator, repeated to the end, or once more
after symbols that the key does not use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))

from dspark_pd.bed.prompts import ALPHABET, RECALL_SYMBOLS, SEPARATOR

_SYMBOLS = torch.tensor(list(ALPHABET.encode("ascii")))
_SEPARATOR = ord(SEPARATOR)


@dataclass(frozen=True)
class Lengths:
    """One kind of batch: `batch` sequences of `tokens`, keys of key_lo .. key_hi.

    recall: the key comes twice, at a random place and at the end.
    """

    batch: int
    tokens: int
    key_lo: int
    key_hi: int
    recall: bool = False


def sample(kind: Lengths, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """-> ids [B, T] and period [B] (the first position whose token can be known).

    A sequence may start anywhere inside its key, so position says nothing about
    content.
    """
    if kind.recall:
        return _recall(kind, generator)
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


#: The second copy is told by this many of its tokens.
_SHOWN = 4
#: Least number of other symbols between two copies.
_APART = 60


def _recall(kind: Lengths, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random symbols, a key, other symbols, and the key again at the very end."""
    key_hi = kind.key_hi + 1
    length = int(torch.randint(kind.key_lo, key_hi, (1,), generator=generator))
    pick = torch.rand((kind.batch, kind.tokens), generator=generator)
    order = torch.rand((kind.batch, 64), generator=generator).argsort(-1)
    others = RECALL_SYMBOLS + pick * (64 - RECALL_SYMBOLS)
    ids = _SYMBOLS[order.gather(1, others.long())]
    # The draws of the places that the second copy takes.
    key = order.gather(1, (pick[:, -length:] * RECALL_SYMBOLS).long())
    unit = torch.nn.functional.pad(_SYMBOLS[key], (0, 1), value=_SEPARATOR)
    second = kind.tokens - unit.shape[1]
    room = second - 1 - unit.shape[1] - _APART
    first = (torch.rand(kind.batch, generator=generator) * room).long()
    ids.scatter_(1, first[:, None] + torch.arange(unit.shape[1]), unit)
    ids[:, second - 1] = _SEPARATOR
    ids[:, second:] = unit
    return ids, torch.full((kind.batch,), second + _SHOWN)
