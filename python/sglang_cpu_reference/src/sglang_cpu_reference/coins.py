"""Random numbers that belong to a request: its seed, a position, and what for.

Life cycle: :func:`seed_every_request` gives each row of a batch a seed when SGLang
builds the batch's sampling data: the request's ``sampling_seed``, or a random one
without. SGLang keeps the seeds beside the temperatures when it filters and merges
batches. :func:`during_step` names seeds and positions for one speculative decode step;
who draws inside it asks :func:`current_step`. Nothing is remembered between steps, so a
request draws the same numbers alone or in a batch, on one engine or behind a prefill.

Upstream draws from the process's own generator: it honours ``sampling_seed`` under
deterministic inference only, which has no CPU backend, and never in DSPARK's verify.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_WORD = 2**64 - 1
_LARGEST_SEED = 2**63 - 1


class Purpose(enum.IntEnum):
    """What a number decides; numbers of two purposes are independent."""

    SAMPLE = 0
    DRAFT = 1
    VERIFY = 2


def stream(seed: int, position: int, purpose: Purpose) -> np.random.Generator:
    """The numbers of one request at one position, from the start.

    Philox is counter-based: any two keys give independent streams, so the seed and
    the position are the key as they are.
    """
    key = np.array([seed & _WORD, position << 2 | purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


@dataclass(frozen=True)
class StepCoins:
    """The requests of one decode step, row by row.

    Attributes:
        seeds: their seeds.
        positions: tokens of each request that the step finds committed.
    """

    seeds: tuple[int, ...]
    positions: tuple[int, ...]

    def uniforms(self, count: int) -> torch.Tensor:
        """float32 ``[rows, count]`` in [0, 1), for the verify."""
        return torch.from_numpy(
            np.stack(
                [
                    stream(seed, position, Purpose.VERIFY).random(count, np.float32)
                    for seed, position in zip(self.seeds, self.positions, strict=True)
                ]
            )
        )

    def draft_keys(self) -> list[int]:
        """A 63-bit key of the draft's noise for each row."""
        return [
            int(stream(seed, position, Purpose.DRAFT).integers(_LARGEST_SEED))
            for seed, position in zip(self.seeds, self.positions, strict=True)
        ]


_step: ContextVar[StepCoins | None] = ContextVar("speculative_step", default=None)


def current_step() -> StepCoins | None:
    """The step that is being decoded; None outside one or where all is greedy."""
    return _step.get()


@contextmanager
def during_step(coins: StepCoins | None) -> Iterator[None]:
    """Make ``coins`` the current step."""
    token = _step.set(coins)
    try:
        yield
    finally:
        _step.reset(token)


def seed_every_request(
    info: SamplingBatchInfo, cls: type, batch: ScheduleBatch, vocab_size: int
) -> SamplingBatchInfo:
    """After ``SamplingBatchInfo.from_schedule_batch``: seeds, int64 ``[rows]``.

    A merge keeps seeds only where both batches have them, so every row gets one.
    """
    del cls, vocab_size
    if info.sampling_seed is None:
        info.sampling_seed = torch.tensor(
            [_seed_of(req.sampling_params.sampling_seed) for req in batch.reqs],
            dtype=torch.int64,
        )
    return info


def _seed_of(asked: int | None) -> int:
    if asked is not None:
        return asked
    # From the generator that --random-seed sets: every rank draws the same.
    return int(torch.randint(_LARGEST_SEED, ()))


def decode_with_coins(
    original: Callable[..., Any], worker: Any, batch: ScheduleBatch, *args, **kwargs
) -> Any:
    """Around ``DSparkWorkerV2._forward_decode``: say whose step it is."""
    with during_step(_coins_of(batch)):
        return original(worker, batch, *args, **kwargs)


def _coins_of(batch: ScheduleBatch) -> StepCoins | None:
    info = batch.sampling_info
    if batch.forward_mode.is_idle() or info is None or info.is_all_greedy:
        return None
    return StepCoins(
        seeds=tuple(info.sampling_seed.tolist()),
        positions=tuple(batch.seq_lens.tolist()),
    )
