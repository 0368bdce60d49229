"""First decode step after a prefill/decode handoff.

Life of a request on the decode engine:

1. the engine starts: ``refuse_without_handoff`` turns away a speculative
   algorithm that cannot continue a request it did not prefill;
2. the KV of a request arrives and its batch is assembled without a forward;
3. the algorithm rebuilds its draft input for that batch
   (``SpeculativeAlgorithm.build_disagg_draft_input``; for releases that have no
   DSPARK branch there, ``build_first_decode_input``);
4. ``enter_first_decode`` checks the result: a speculative batch never goes on
   without a draft input, and under the overlap schedule its rows are in the
   relay;
5. the first decode step prepares that draft input like any later one.

Step 4 is the only place that enforces the contract, for every algorithm. What
broke without it: the first decode step dereferenced a missing draft input and
took the scheduler down with every running request.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs
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

    Serves releases whose dispatch lacks the branch (0.5.16; upstream added its
    own in 0.5.17).
    """
    from sglang.srt.speculative.dspark_components.dspark_draft import (
        make_next_draft_input,
    )

    draft_input = make_next_draft_input(
        bonus_tokens=last_tokens, new_seq_lens=batch.seq_lens
    )
    relay_first_decode(batch, draft_input, future_map)
    return draft_input


def relay_first_decode(
    batch: ScheduleBatch, draft_input: SpecInput, future_map: FutureMap
) -> None:
    """Put the rows of a freshly built draft input into the overlap relay.

    No-op without the overlap schedule, where the next step reads the input
    itself. Relay rows are addressed by request-pool row, like those a forward
    leaves behind, so the next step cannot tell the two apart.
    """
    if not batch.enable_overlap:
        return
    from sglang.srt.managers.overlap_utils import RelayPayload

    rows = batch.req_pool_indices
    future_map.publish(rows, batch.seq_lens)
    future_map.stash(rows, RelayPayload.from_draft_input(draft_input))
    draft_input.future_indices = rows


def enter_first_decode(
    batch: ScheduleBatch, draft_input: Optional[SpecInput], future_map: FutureMap
) -> None:
    """Enforce that a handed-off batch can be decoded.

    A speculative batch without a draft input is an error here, where the cause
    is known, and not one step later. An input that its builder left out of the
    relay is relayed now: merged into a running batch it would otherwise lose
    its first token to whoever used that relay row before.

    Raises:
        RuntimeError: the algorithm is speculative and built no draft input.
    """
    from sglang.srt.managers.spec_relay_guard import carries_first_token

    algorithm = batch.spec_algorithm
    if algorithm.is_none():
        return
    if draft_input is None:
        raise RuntimeError(_no_draft_input(algorithm, len(batch.reqs)))
    if not batch.enable_overlap or draft_input.future_indices is not None:
        return
    if carries_first_token(draft_input, len(batch.reqs)):
        relay_first_decode(batch, draft_input, future_map)


def refuse_without_handoff(algorithm: Any, server_args: ServerArgs) -> None:
    """Refuse at start-up a decode engine whose algorithm cannot take a handoff.

    Raises:
        ValueError: ``--disaggregation-mode decode`` with a speculative algorithm
            that rebuilds no draft input for a request prefilled elsewhere.
    """
    if algorithm is None or algorithm.is_none():
        return
    if server_args.disaggregation_mode != "decode" or takes_handoff(algorithm):
        return
    raise ValueError(
        f"--speculative-algorithm {algorithm.name} cannot run with "
        "--disaggregation-mode decode: this release does not rebuild its draft "
        "input for a request that another engine prefilled, so the first decode "
        "step would have none. Use DSPARK or an EAGLE algorithm on the decode "
        "engine, drop --speculative-algorithm there, or serve without "
        "--disaggregation-mode."
    )


def takes_handoff(algorithm: Any) -> bool:
    """Whether the algorithm's handoff builder has a branch for it.

    Asked of the builder itself rather than of a list of names, so that the
    answer stays right for every release and for registered algorithms: without
    a branch it returns None whatever the batch, with one it needs a real batch.
    """
    build = getattr(algorithm, "build_disagg_draft_input", None)
    if build is None:
        return False
    no_arguments = [None] * len(inspect.signature(build).parameters)
    try:
        return build(*no_arguments) is not None
    except Exception:  # noqa: BLE001 - a branch that wants a real batch exists
        return True


def _no_draft_input(algorithm: Any, num_reqs: int) -> str:
    return (
        f"{algorithm.name} left a prebuilt batch of {num_reqs} request(s) without a "
        "draft input after the prefill/decode handoff; expected "
        "build_disagg_draft_input to return one. The algorithm does not support "
        "--disaggregation-mode decode; restart without it or with DSPARK."
    )
