"""Requests that an engine cannot serve are refused when they arrive.

SGLang takes these to its scheduler, where they end the engine or leave the request
without an answer: a prompt without tokens, a token id that the model does not have,
logprobs that do not exist, and a bootstrap room that another request is using. The
samples of ``n`` above 1 get rooms of their own here, for the same reason.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang.srt.managers.embed_types import PositionalEmbeds

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# Distance between the rooms of a request's samples. A multiple of every usual DP size, so
# that samples go to the DP rank that has their prompt in its cache.
_ROOM_STRIDE = 2**8 * 3**2 * 5 * 7 * 11 * 13
_ROOMS = 2**63
# What SGLang's metadata buffers hold of a first token's top logprobs.
_HANDOFF_TOP_LOGPROBS = 128


def check_request(
    manager: TokenizerManager, obj: GenerateReqInput, input_ids: list[int] | None
) -> None:
    """Refuse a request that ends the scheduler.

    Args:
        input_ids: the prompt's token ids.

    Raises:
        ValueError: shown to the client, with status 400.
    """
    vocab_size = manager.model_config.vocab_size
    _check_prompt(obj, input_ids, vocab_size)
    overrides = obj.positional_embed_overrides
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError(
            "positional_embed_overrides cannot be set over HTTP. Leave them out."
        )
    if obj.return_logprob:
        _check_logprobs(obj, vocab_size)


def _check_prompt(
    obj: GenerateReqInput, input_ids: list[int] | None, vocab_size: int
) -> None:
    """A prompt has tokens, of the vocabulary.

    What stands in for embeddings, images or an adapter's own tokens may lie outside and
    is left alone; a session may supply the prompt.
    """
    if obj.input_embeds is not None or obj.contains_mm_input():
        return
    if not input_ids:
        if obj.session_id is None and obj.session_params is None:
            raise ValueError("The prompt has no tokens. Send at least one.")
        return
    is_own = obj.lora_path or obj.positional_embed_overrides is not None
    if obj.input_ids is None or is_own:
        return
    for outside in (min(input_ids), max(input_ids)):
        if not 0 <= outside < vocab_size:
            raise ValueError(
                f"input_ids has token id {outside}, which this model does not have; "
                f"its ids go from 0 to {vocab_size - 1}. Send ids of its own tokenizer."
            )


def _check_logprobs(obj: GenerateReqInput, vocab_size: int) -> None:
    start = obj.logprob_start_len
    if start is not None and start < -1:
        raise ValueError(
            f"logprob_start_len is {start}. Send a position in the prompt, or -1 for "
            "logprobs of the answer alone."
        )
    most = vocab_size
    if obj.bootstrap_room is not None:
        most = min(most, _HANDOFF_TOP_LOGPROBS)
    if not 0 <= (obj.top_logprobs_num or 0) <= most:
        raise ValueError(
            f"top_logprobs_num is {obj.top_logprobs_num}; this server gives 0 to {most}."
        )


def room_of_sample(room: int | None, number: int) -> int | None:
    """The bootstrap room of one of the samples of ``n`` above 1.

    Prefill and decode number the samples of a request alike, so they derive the same
    room. The request's own room is used before, for its prompt without samples.

    Args:
        room: that of the sample's prompt; None outside of disaggregation.
        number: position among all samples of the request.
    """
    if room is None:
        return None
    return (room + (number + 1) * _ROOM_STRIDE) % _ROOMS


def refuse_used_room(queue: DecodePreallocQueue, req: Req) -> bool:
    """Refuse a request whose room belongs to another one; False when it is free.

    Two requests of one room share its state, and the first to end takes it from the
    other, whose KV is then released twice.
    """
    from sglang.srt.disaggregation.utils import _is_fake_transfer, prepare_abort

    if _is_fake_transfer(req):
        return False
    manager, room = queue.kv_manager, req.bootstrap_room
    # Rooms of aborted requests whose KV prefill may still write.
    ending = getattr(manager, "_deferred_abort_ack_tracker", ())
    if room not in manager.request_status and room not in ending:
        return False
    message = (
        f"Bootstrap room {room} of request {req.rid} is still in use by another request. "
        "Give each request a room of its own."
    )
    prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)
    return True
