"""First decode step after a prefill/decode handoff.

Life of a request on the decode engine:

1. the KV of a request arrives and its batch is assembled without a forward;
2. the algorithm rebuilds its draft input for that batch
   (``SpeculativeAlgorithm.build_disagg_draft_input``);
3. ``enter_first_decode`` checks the result: a speculative batch never goes on
   without a draft input, and under the overlap schedule its relay entries exist;
4. the first decode step prepares that draft input like any later one. Before the
   relay is read, ``nothing_relayed`` answers whether there is anything to read.

Step 3 enforces the contract for every algorithm. What broke without it: the first
decode step dereferenced a missing draft input and took the scheduler down with every
running request. Step 4 covers inputs that did not come through a handoff: reading a relay
entry that is not the request's would return the token of the request that used it
before, and the text would be wrong without any error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpecInput


def relay_first_decode(
    batch: ScheduleBatch, draft_input: SpecInput, future_map: FutureMap
) -> None:
    """Put a freshly built draft input into the overlap relay.

    No-op without the overlap schedule, where the next step reads the input
    itself. Relay entries are addressed by request-pool index, like those a forward
    leaves behind, so the next step cannot tell the two apart.
    """
    if not batch.enable_overlap:
        return
    from sglang.srt.managers.overlap_utils import RelayPayload

    indices = batch.req_pool_indices
    future_map.publish(indices, batch.seq_lens)
    future_map.stash(indices, RelayPayload.from_draft_input(draft_input))
    draft_input.future_indices = indices


def enter_first_decode(
    batch: ScheduleBatch, draft_input: Optional[SpecInput], future_map: FutureMap
) -> None:
    """Enforce that a handed-off batch can be decoded.

    A speculative batch without a draft input is an error here, where the cause
    is known, and not one step later. An input that its builder left out of the
    relay is relayed now: merged into a running batch it would otherwise lose
    its first token to whoever used that relay entry before.

    Raises:
        RuntimeError: the algorithm is speculative and built no draft input.
    """
    algorithm = batch.spec_algorithm
    if algorithm.is_none():
        return
    if draft_input is None:
        raise RuntimeError(
            f"{algorithm.name} built no draft input for {len(batch.reqs)} request(s) "
            "after the prefill/decode handoff; expected build_disagg_draft_input to "
            "return one. The algorithm does not support --disaggregation-mode decode: "
            "restart decode with DSPARK, or without --speculative-algorithm."
        )
    if not batch.enable_overlap or draft_input.future_indices is not None:
        return
    if _carries_first_token(draft_input, len(batch.reqs)):
        relay_first_decode(batch, draft_input, future_map)


def nothing_relayed(draft_input: SpecInput, batch: ScheduleBatch) -> bool:
    """Whether the relay holds nothing for this batch and nothing is missing.

    Raises:
        RuntimeError: no relay entries are named and the input is not complete
            without them.
    """
    if draft_input.future_indices is not None:
        return False
    num_reqs = batch.batch_size()
    if num_reqs == 0 or _carries_first_token(draft_input, num_reqs):
        return True
    rids = ", ".join(str(req.rid) for req in batch.reqs[:4])
    raise RuntimeError(
        f"Lost relay entries of {num_reqs} speculative request(s) ({rids}): the draft "
        "input names none (future_indices is None) and does not carry one token and "
        "one length per request itself. The code that built it must publish and stash "
        "them, or fill bonus_tokens and new_seq_lens. To go on serving, restart "
        "with --disable-overlap-schedule."
    )


def _carries_first_token(draft_input: SpecInput, num_reqs: int) -> bool:
    columns = (draft_input.bonus_tokens, getattr(draft_input, "new_seq_lens", None))
    return all(column is not None and len(column) == num_reqs for column in columns)
