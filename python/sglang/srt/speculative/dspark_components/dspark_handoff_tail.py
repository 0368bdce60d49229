"""The tail buffer: one metadata slot per request with the last hidden states of its prompt.

Life cycle of a slot on prefill: the request's slot index is allocated before its
first forward; every chunk that overlaps the tail copies its hidden states in behind the
forward that made them (``TailBuffer.take``); ``TailBuffer.finish`` writes the header
when the last chunk is about to be sent; the transfer then sends the header and
exactly the hidden states that exist. On decode the slot is filled by the transfer, read
once by ``TailBuffer.read`` and cleared before it is freed.

Only the last pipeline stage owns a buffer: all stages write the same decode slot, and
an earlier stage would overwrite it with zeros. The buffer is the last of the metadata
buffers, so a peer without one pairs all the others as before.

Slot layout, ``spec.slot_bytes`` bytes: eight int64 words (magic, room, start, count,
bytes of a token, fingerprint, prompt tokens, zero), then ``tail_tokens`` times
``spec.width`` values.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.speculative.dspark_components.dspark_handoff import TailSpec, current
from sglang.srt.speculative.dspark_components.handoff_refusals import (
    HEADER_BYTES,
    TAIL_TOKENS,
)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)

MAGIC = 0x4453504B54_0001  # "DSPKT", layout version 1
FRAME_MAGIC = b"dspark-tail/1:"


class TailHeader(NamedTuple):
    """What a slot says about its hidden states; ``start`` is the first position."""

    magic: int
    room: int
    start: int
    count: int
    token_bytes: int
    fingerprint: int
    prompt_tokens: int


class TailLayout(NamedTuple):
    """Where a decode keeps the tail: which metadata buffer, its stride and meaning."""

    index: int
    slot_bytes: int
    fingerprint: int

    @classmethod
    def of(cls, manager: CommonKVManager, spec: TailSpec) -> TailLayout:
        last = len(manager.kv_args.aux_data_ptrs) - 1
        return cls(last, spec.slot_bytes, spec.fingerprint)


class _Filled(NamedTuple):
    owner: str  # request id
    next_position: int  # -1 once a token was skipped


class TailBuffer:
    """Hidden states and headers of ``size`` slots in one uint8 tensor.

    Pinned on a machine with CUDA, so that the copies behind a forward do not block.
    """

    def __init__(
        self, spec: TailSpec, size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.spec = spec
        pin = torch.device(device).type == "cpu" and torch.cuda.is_available()
        self.storage = torch.zeros(
            (size, spec.slot_bytes), dtype=torch.uint8, device=device, pin_memory=pin
        )
        self.headers = self.storage[:, :HEADER_BYTES].view(torch.int64)
        values = self.storage[:, HEADER_BYTES:].view(spec.dtype)
        self.hidden_states = values.unflatten(1, (spec.tail_tokens, spec.width))
        self.num_incomplete = 0
        self._filled: dict[int, _Filled] = {}

    def tail_start(self, prompt_tokens: int) -> int:
        return max(0, prompt_tokens - self.spec.tail_tokens)

    def take(self, batch: ScheduleBatch, hidden: torch.Tensor) -> None:
        """Copy the hidden states of one extend batch that fall into a tail.

        Args:
            batch: prefix_lens and extend_lens give each request's token range.
            hidden: ``[tokens, K * hidden_size]``, packed in request order; graph
                padding may follow.

        Raises:
            RuntimeError: hidden is narrower than the spec, or shorter than the batch.
        """
        tokens = sum(batch.extend_lens)
        if hidden.shape[-1] != self.spec.width or hidden.shape[0] < tokens:
            raise RuntimeError(
                f"Prefill captured hidden states of shape {tuple(hidden.shape)}, "
                f"expected at least {tokens} tokens of {self.spec.width} values for "
                f"target layers {list(self.spec.layer_ids)}. A pipeline stage dropped "
                "its captured hidden states."
            )
        offset = 0
        for req, begin, extent in zip(batch.reqs, batch.prefix_lens, batch.extend_lens):
            if req.metadata_buffer_index is not None and req.metadata_buffer_index >= 0:
                self._take_one(req, hidden[offset : offset + extent], int(begin))
            offset += extent

    def _take_one(self, req: Req, hidden: torch.Tensor, begin: int) -> None:
        prompt = len(req.origin_input_ids)
        start = self.tail_start(prompt)
        low, high = max(begin, start), min(begin + hidden.shape[0], prompt)
        if low >= high:
            return
        slot = req.metadata_buffer_index
        filled = self._filled.get(slot)
        continues = filled == _Filled(req.rid, low)
        if low != start and not continues:
            self._filled[slot] = _Filled(req.rid, -1)
            return
        self.hidden_states[slot, low - start : high - start].copy_(
            hidden[low - begin : high - begin], non_blocking=True
        )
        self._filled[slot] = _Filled(req.rid, high)

    def finish(self, req: Req) -> None:
        """Write the header of a request whose last chunk is about to be sent.

        A tail with a gap is sent as an empty one: decode must never read what was not
        written for this request.
        """
        prompt = len(req.origin_input_ids)
        start = self.tail_start(prompt)
        slot = req.metadata_buffer_index
        complete = self._filled.pop(slot, None) == _Filled(req.rid, prompt)
        if not complete:
            self.num_incomplete += 1
            logger.error(
                "Hidden states of tokens %d to %d of request %s were not captured; decode "
                "will draft without them (%d such requests so far).",
                start,
                prompt,
                req.rid,
                self.num_incomplete,
            )
        header = TailHeader(
            magic=MAGIC,
            room=int(req.bootstrap_room or 0),
            start=start if complete else prompt,
            count=prompt - start if complete else 0,
            token_bytes=self.spec.token_bytes,
            fingerprint=self.spec.fingerprint,
            prompt_tokens=prompt,
        )
        words = torch.tensor([_as_int64(word) for word in header] + [0])
        self.headers[slot].copy_(words)

    def header(self, slot: int) -> TailHeader | None:
        """The slot's header, None when nothing was written since it was cleared."""
        words = self.headers[slot].tolist()
        if not any(words):
            return None
        return TailHeader(*words[:-1])

    def read(self, slot: int, header: TailHeader) -> torch.Tensor:
        """A copy of what a header announces, ``[count, width]``, pinned on CUDA."""
        values = self.hidden_states[slot, : header.count]
        out = torch.empty(
            values.shape,
            dtype=values.dtype,
            device=values.device,
            pin_memory=values.device.type == "cpu" and torch.cuda.is_available(),
        )
        return out.copy_(values)

    def clear(self, slot: int) -> None:
        self.headers[slot].zero_()
        self._filled.pop(slot, None)


class TailMetadataBuffers(MetadataBuffers):
    """Upstream's metadata buffers with the tail as one more, the last."""

    tail: TailBuffer

    @classmethod
    def of(cls, buffers: MetadataBuffers, tail: TailBuffer) -> TailMetadataBuffers:
        """Add the tail to freshly built buffers that are not registered yet."""
        mine = cls.__new__(cls)
        mine.__dict__.update(buffers.__dict__, tail=tail)
        return mine

    def get_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        # Peers pair metadata buffers by position: a new one must be the last.
        pointers, lengths, slot_lengths = super().get_buf_infos()
        storage = self.tail.storage
        return (
            [*pointers, storage.data_ptr()],
            [*lengths, storage.nbytes],
            [*slot_lengths, storage[0].nbytes],
        )

    def set_buf(self, req: Req) -> None:
        super().set_buf(req)
        self.tail.finish(req)

    def clear_slot(self, idx: int) -> None:
        super().clear_slot(idx)
        self.tail.clear(idx)


def tail_of(buffers: MetadataBuffers) -> TailBuffer | None:
    return buffers.tail if isinstance(buffers, TailMetadataBuffers) else None


def _as_int64(word: int) -> int:
    """Room ids are unsigned on the wire; two's complement keeps every bit."""
    word = int(word) & 0xFFFFFFFFFFFFFFFF
    return word - (1 << 64) if word >> 63 else word


def same_room(header: TailHeader, room: int | None) -> bool:
    return header.room == _as_int64(int(room or 0))


# -- prefill's forwards -------------------------------------------------------------------


def take_hidden_states(
    batch: ScheduleBatch, logits_output: LogitsProcessorOutput
) -> None:
    """Keep the tail of a finished target forward, and drop the other hidden states.

    Called on the last pipeline stage after every forward; does nothing unless this
    engine captures. The hidden states of a chunk can be hundreds of megabytes, so they
    are released here instead of travelling on with the result.
    """
    if not _sends_tail():
        return
    hidden = logits_output.hidden_states
    if hidden is None:
        return
    if getattr(logits_output, "hidden_states_token_indices", None) is not None:
        raise RuntimeError(
            "Prefill captured hidden states for part of the tokens only: this attention "
            "backend drops tokens in late layers and cannot be used for a tail. Choose "
            "another --attention-backend, or run DSPARK on prefill."
        )
    # An idle rank of DP attention runs dummy tokens, or none, for no request.
    if batch.reqs and batch.extend_lens is not None:
        current().tail.take(batch, hidden)
    logits_output.hidden_states = None


def cap_prefix_match(max_prefix_len: int, input_len: int) -> int:
    """Limit a prefix-cache match so that the tail is always computed.

    Cached tokens produce no hidden states; recomputing the last T, rounded up to whole
    pages, is the price of a hit.
    """
    tokens = current().cap_tokens
    if not tokens:
        return max_prefix_len
    return min(max_prefix_len, max(0, input_len - tokens))


# -- the wire -----------------------------------------------------------------------------


def append_tail_frame(manager: CommonKVManager, message: list[bytes]) -> None:
    """Tell prefill where in this decode's metadata the tail sits, and its shape.

    One frame, recognised by its first bytes wherever it comes after upstream's. Without
    it prefill must not write: slots are addressed with the stride, and the stride of
    another tail length would hit another request's slot.
    """
    handoff = current()
    if handoff.tail is None or handoff.cap_tokens:
        return
    layout = TailLayout.of(manager, handoff.tail.spec)
    message.append(FRAME_MAGIC + ",".join(str(word) for word in layout).encode())


def read_registrations() -> None:
    """Have every decode's registration read for the place of its tail."""
    from sglang.srt.disaggregation.common.admission import registration_readers

    if read_layout not in registration_readers:
        registration_readers.append(read_layout)


def read_layout(manager: CommonKVManager, message: list[bytes]) -> str | None:
    """Take the tail's frame off a decode's registration.

    Returns:
        Why this prefill refuses the decode, or None.
    """
    from sglang.srt.disaggregation.common.admission import Envelope

    peer = Envelope.read(message).decode
    handoff = current()
    handoff.peers.pop(peer, None)
    frames = [frame for frame in message if frame.startswith(FRAME_MAGIC)]
    for frame in frames:
        message.remove(frame)
        words = frame[len(FRAME_MAGIC) :].split(b",")
        try:
            handoff.peers[peer] = TailLayout(*(int(word) for word in words))
        except (TypeError, ValueError):
            return (
                "[PD-MALFORMED] the tail layout in decode's registration cannot be "
                f"read: {frame[:80]!r}. Apply the same release of sglang-dspark-pd to "
                "both engines."
            )
    if handoff.cap_tokens and not frames:
        return (
            "[PD-MODE] this prefill captures hidden states for a tail, and decode "
            f"announced no place for one. Set {TAIL_TOKENS} on decode to this prefill's "
            "value and run DSPARK there, or run DSPARK on prefill."
        )
    return None


def tail_explains_aux_count(num_local: int, num_remote: int, peer: str) -> bool:
    """Whether two metadata buffer counts differ by nothing but a tail buffer.

    True for a pipeline stage before the last, and for a prefill that hands over
    draft KV to a decode that can also take a tail.
    """
    handoff = current()
    own = 1 if handoff.tail is not None else 0
    return num_local - own == num_remote - (1 if peer in handoff.peers else 0)


def _tail_block(
    manager: CommonKVManager, peer: str, slots: tuple[int, int], peer_ptrs: list[int]
) -> tuple[int, int, int]:
    """The part of a finished slot to send.

    Args:
        slots: metadata slots here and at the peer.
        peer_ptrs: the peer's metadata buffer addresses.

    Returns:
        (source address, destination address, bytes): the header and the hidden states
        that exist, at the peer's own stride.

    Raises:
        RuntimeError: the peer expects a tail of another shape.
    """
    tail, layout = current().tail, current().peers.get(peer)
    own = TailLayout.of(manager, tail.spec)
    if layout != own:
        raise RuntimeError(
            f"The engines disagree on the tail: prefill sends {own} of target layers "
            f"{list(tail.spec.layer_ids)}; decode expects {layout}. Set the same tail "
            "length and layer ids on both engines."
        )
    slot, peer_slot = slots
    header = tail.header(slot)
    count = 0 if header is None else header.count
    source = manager.kv_args.aux_data_ptrs[-1] + slot * own.slot_bytes
    target = peer_ptrs[own.index] + peer_slot * own.slot_bytes
    return source, target, HEADER_BYTES + count * tail.spec.token_bytes


def cut_nixl_aux(
    manager: CommonKVManager,
    peer: str,
    slots: tuple[int, int],
    peer_ptrs: list[int],
    blocks: tuple[list[tuple], list[tuple]],
) -> None:
    """Replace the whole-slot tail block of a NIXL metadata send, in place.

    Args:
        slots: metadata slots here and at the peer.
        blocks: (address, bytes, device) of sources and of targets.

    Raises:
        RuntimeError: the peer expects a tail of another shape.
    """
    if not _sends_tail():
        return
    sources, targets = blocks
    while len(sources) >= len(manager.kv_args.aux_data_ptrs):
        sources.pop()
        targets.pop()
    source, target, length = _tail_block(manager, peer, slots, peer_ptrs)
    sources.append((source, length, 0))
    targets.append((target, length, 0))


def cut_mooncake_aux(
    manager: CommonKVManager,
    peer: str,
    slots: tuple[int, int],
    peer_ptrs: list[int],
    blocks: list[tuple[int, int, int]],
) -> bool:
    """Replace the whole-slot tail block of a Mooncake metadata send, in place.

    Args:
        slots: metadata slots here and at the peer.
        blocks: (source address, target address, bytes).

    Returns:
        False when nothing may be sent; the reason is logged. The sender reports a
        failed send for its room then, where an error would end its thread.
    """
    if not _sends_tail():
        return True
    while len(blocks) >= len(manager.kv_args.aux_data_ptrs):
        blocks.pop()
    try:
        blocks.append(_tail_block(manager, peer, slots, peer_ptrs))
    except RuntimeError as error:
        logger.error("Metadata not sent to decode %s: %s", peer, error)
        return False
    return True


def _sends_tail() -> bool:
    handoff = current()
    return handoff.tail is not None and handoff.cap_tokens > 0
