"""What the overlap relay may assume of a speculative batch.

Under the overlap schedule the next step's draft input is a set of rows in the
``FutureMap``, addressed by ``future_indices``. Those are None on an input that
nobody relayed: one that a handoff built and that no forward has touched yet.

1. ``nothing_relayed`` answers, before the relay is read, whether there is
   anything to read. An input that is complete by itself is kept as it is.
2. ``refuse_half_relayed`` guards the merge of two batches: rows in the relay and
   rows carried by the input itself cannot live in one input.

Where a relay row was really lost, both raise. Reading the row anyway would
return the token of the request that used it before, and the text would go
wrong without a sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpecInput


def carries_first_token(draft_input: SpecInput, num_reqs: int) -> bool:
    """Whether the input holds a token and a length for each of its requests."""
    columns = (draft_input.bonus_tokens, getattr(draft_input, "new_seq_lens", None))
    return all(column is not None and len(column) == num_reqs for column in columns)


def nothing_relayed(draft_input: SpecInput, batch: ScheduleBatch) -> bool:
    """Whether the relay holds nothing for this batch and nothing is missing.

    Raises:
        RuntimeError: no relay rows are named and the input is not complete
            without them.
    """
    if draft_input.future_indices is not None:
        return False
    num_reqs = batch.batch_size()
    if num_reqs == 0 or carries_first_token(draft_input, num_reqs):
        return True
    rids = ", ".join(str(req.rid) for req in batch.reqs[:4])
    raise RuntimeError(
        f"Lost relay rows of {num_reqs} speculative request(s) ({rids}): the draft "
        "input names no rows (future_indices is None) and does not carry one token "
        "and one length per request itself. Whoever built it must publish and stash "
        "its rows, or fill bonus_tokens and new_seq_lens. To go on serving, restart "
        "with --disable-overlap-schedule."
    )


def refuse_half_relayed(kept: SpecInput, merged: SpecInput) -> None:
    """Refuse to merge inputs of which only one lives in the relay.

    The relayed side's own token column is stale between steps, so joining the
    columns would feed a wrong token to the target.

    Raises:
        RuntimeError: exactly one side has relay rows and both have requests.
    """
    if (kept.future_indices is None) == (merged.future_indices is None):
        return
    if 0 in (len(kept.bonus_tokens), len(merged.bonus_tokens)):
        return
    relayed = "merged" if kept.future_indices is None else "kept"
    raise RuntimeError(
        "Cannot merge speculative batches: only the "
        f"{relayed} one has rows in the overlap relay (future_indices). The other "
        "was built outside a forward and must be relayed first; see "
        "relay_first_decode in dspark_components/disagg_first_decode.py."
    )
