"""DSPARK's draft input after a handoff, for a release whose dispatch has no branch for it.

That is 0.5.16; SGLang added its own in 0.5.17.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.dspark_components.disagg_first_decode import (
    relay_first_decode,
)
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpecInput


def build_first_decode_input(
    batch: ScheduleBatch,
    last_tokens: torch.Tensor,
    future_map: FutureMap,
) -> SpecInput:
    """Return the DSPARK draft input of a batch that was prefilled elsewhere.

    ``last_tokens`` is int64 of shape ``[batch]``: the token prefill sampled, at
    position ``batch.seq_lens`` of each request. The draft context itself is not
    part of the input: it is the draft KV that arrived with the target KV.
    """
    draft_input = make_next_draft_input(
        bonus_tokens=last_tokens, new_seq_lens=batch.seq_lens
    )
    relay_first_decode(batch, draft_input, future_map)
    return draft_input
