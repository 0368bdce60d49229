"""The tail buffer: one metadata slot per request with the last rows of its prompt.

Life cycle of a slot on prefill: the request's slot index is allocated before its
first forward; every chunk that overlaps the tail copies its rows in behind the
forward that made them (``TailBuffer.take``); ``TailBuffer.finish`` writes the header
when the last chunk is about to be sent; ``shape_tail_block`` then sends the header and
exactly the rows that exist. On decode the slot is filled by the transfer, read once
by ``TailBuffer.read`` and cleared before it is freed.

Only the last pipeline stage owns a buffer: all stages write the same decode slot, and
an earlier stage would overwrite the rows with its zeros. The buffer is the last of the
metadata buffers, so a peer without one pairs all the others as before.

Item layout, ``spec.item_bytes`` bytes: eight int64 words (magic, room, start, count,
row bytes, fingerprint, prompt tokens, zero), then ``tail_tokens`` rows of
``spec.width`` values.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang.srt.environ import envs
from sglang.srt.speculative.dspark_components.dspark_handoff import (
    HEADER_BYTES,
    TailSpec,
)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)

MAGIC = 0x4453504B54_0001  # "DSPKT", layout version 1
FRAME_MAGIC = b"dspark-tail/1:"
# Room, address, port and session come first in every registration. Releases differ in
# how many frames follow, so the marked one is looked for behind these.
_FIRST_TRAILING_FRAME = 4


class TailHeader(NamedTuple):
    """What a slot says about its rows; ``start`` is the position of the first."""

    magic: int
    room: int
    start: int
    count: int
    row_bytes: int
    fingerprint: int
    prompt_tokens: int


class _Filled(NamedTuple):
    owner: str  # request id
    next_position: int  # -1 once a row was skipped


class TailBuffer:
    """Rows and headers of ``size`` slots in one uint8 tensor.

    Pinned on a machine with CUDA, so that the copies behind a forward do not block.
    """

    def __init__(self, spec: TailSpec, size: int, device: Any = "cpu") -> None:
        self.spec = spec
        pin = torch.device(device).type == "cpu" and torch.cuda.is_available()
        self.storage = torch.zeros(
            (size, spec.item_bytes), dtype=torch.uint8, device=device, pin_memory=pin
        )
        self.headers = self.storage[:, :HEADER_BYTES].view(torch.int64)
        rows = self.storage[:, HEADER_BYTES:].view(spec.dtype)
        self.rows = rows.unflatten(1, (spec.tail_tokens, spec.width))
        self.missing_rows = 0
        self._filled: dict[int, _Filled] = {}

    def tail_start(self, prompt_tokens: int) -> int:
        return max(0, prompt_tokens - self.spec.tail_tokens)

    def take(self, batch: ScheduleBatch, hidden: torch.Tensor) -> None:
        """Copy the rows of one extend batch that fall into a tail.

        Args:
            batch: prefix_lens and extend_lens give each request's token range.
            hidden: ``[tokens, K * hidden_size]``, packed in request order; rows of
                graph padding may follow.

        Raises:
            RuntimeError: hidden is narrower than the spec, or shorter than the batch.
        """
        tokens = sum(batch.extend_lens)
        if hidden.shape[-1] != self.spec.width or hidden.shape[0] < tokens:
            raise RuntimeError(
                f"Prefill capture got hidden rows {tuple(hidden.shape)}, expected at "
                f"least {tokens} rows of {self.spec.width} values for target layers "
                f"{list(self.spec.layer_ids)}. A pipeline stage dropped its capture."
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
        self.rows[slot, low - start : high - start].copy_(
            hidden[low - begin : high - begin], non_blocking=True
        )
        self._filled[slot] = _Filled(req.rid, high)

    def finish(self, req: Req) -> None:
        """Write the header of a request whose last chunk is about to be sent.

        A tail with a gap is sent as no rows at all: decode must never read a row
        that was not written for this request.
        """
        prompt = len(req.origin_input_ids)
        start = self.tail_start(prompt)
        slot = req.metadata_buffer_index
        complete = self._filled.pop(slot, None) == _Filled(req.rid, prompt)
        if not complete:
            self.missing_rows += 1
            logger.error(
                "Prefill rows %d to %d of request %s were not captured; decode will "
                "draft without them (%d such requests so far).",
                start,
                prompt,
                req.rid,
                self.missing_rows,
            )
        self._write_header(
            slot,
            TailHeader(
                magic=MAGIC,
                room=int(req.bootstrap_room or 0),
                start=start if complete else prompt,
                count=prompt - start if complete else 0,
                row_bytes=self.spec.row_bytes,
                fingerprint=self.spec.fingerprint,
                prompt_tokens=prompt,
            ),
        )

    def _write_header(self, slot: int, header: TailHeader) -> None:
        words = torch.tensor([_as_int64(word) for word in header] + [0])
        self.headers[slot].copy_(words)

    def header(self, slot: int) -> TailHeader | None:
        """The slot's header, None when nothing was written since it was cleared."""
        words = self.headers[slot].tolist()
        if not any(words):
            return None
        return TailHeader(*words[:-1])

    def read(self, slot: int, header: TailHeader) -> torch.Tensor:
        """A copy of the rows a header announces, ``[count, width]``, pinned on CUDA."""
        rows = self.rows[slot, : header.count]
        out = torch.empty(
            rows.shape,
            dtype=rows.dtype,
            device=rows.device,
            pin_memory=rows.device.type == "cpu" and torch.cuda.is_available(),
        )
        return out.copy_(rows)

    def clear(self, slot: int) -> None:
        self.headers[slot].zero_()
        self._filled.pop(slot, None)


def _as_int64(word: int) -> int:
    """Room ids are unsigned on the wire; two's complement keeps every bit."""
    word = int(word) & 0xFFFFFFFFFFFFFFFF
    return word - (1 << 64) if word >> 63 else word


def same_room(header: TailHeader, room: int | None) -> bool:
    return header.room == _as_int64(int(room or 0))


# One scheduler, hence one set of metadata buffers, lives in a process.
_local: TailBuffer | None = None
_cap_tokens = 0
# Kept as long as upstream keeps a peer's registration, which it never drops by age.
_peers: dict[str, tuple[int, int, int]] = {}
_without_layout: set[str] = set()


def activate(tail: TailBuffer | None, *, cap_tokens: int = 0) -> None:
    """Make ``tail`` this process's buffer; ``cap_tokens`` limits prefix matches.

    A capturing prefill caps on every pipeline stage, also on those without a buffer:
    all stages must agree on what is computed.
    """
    global _local, _cap_tokens
    _local, _cap_tokens = tail, cap_tokens


def active_tail() -> TailBuffer | None:
    return _local


def tail_of(buffers: MetadataBuffers) -> TailBuffer | None:
    return getattr(buffers, "dspark_tail", None)


def tail_storage(buffers: MetadataBuffers) -> list[torch.Tensor]:
    """The tail's tensor as a list to append to the registered buffers."""
    tail = tail_of(buffers)
    return [] if tail is None else [tail.storage]


def finish_tail(buffers: MetadataBuffers, req: Req) -> None:
    tail = tail_of(buffers)
    if tail is not None:
        tail.finish(req)


def clear_tail_slot(buffers: MetadataBuffers, slot: int) -> None:
    tail = tail_of(buffers)
    if tail is not None:
        tail.clear(slot)


def take_tail_rows(batch: ScheduleBatch, logits_output: Any) -> None:
    """Keep the tail rows of a finished target forward, and drop the others.

    Called on the last pipeline stage after every forward; does nothing unless this
    engine captures. The packed rows of a chunk can be hundreds of megabytes, so they
    are released here instead of travelling on with the result.
    """
    if _local is None or not _cap_tokens:
        return
    hidden = logits_output.hidden_states
    if hidden is None:
        return
    if getattr(logits_output, "hidden_states_token_indices", None) is not None:
        raise RuntimeError(
            "Prefill capture got rows of a part of the tokens only; this attention "
            "backend drops late-layer tokens and cannot serve a handoff."
        )
    # An idle rank of DP attention runs dummy tokens, or none, for no request.
    if batch.reqs and batch.extend_lens is not None:
        _local.take(batch, hidden)
    logits_output.hidden_states = None


def cap_prefix_match(max_prefix_len: int, input_len: int) -> int:
    """Limit a prefix-cache match so that the tail is always computed.

    Cached tokens produce no hidden rows; recomputing T of them is the whole price.
    """
    if not _cap_tokens:
        return max_prefix_len
    return min(max_prefix_len, max(0, input_len - _cap_tokens))


def append_tail_frame(manager: Any, message: list[bytes]) -> None:
    """Tell prefill where in this decode's metadata the tail sits, and its shape.

    One frame, recognised by its first bytes wherever it stands behind upstream's.
    Without it prefill has no right to write: slots are addressed with the stride, and
    a stride of another tail length would hit another request's slot.
    """
    if _local is None or _cap_tokens:
        return
    index = len(manager.kv_args.aux_data_ptrs) - 1
    layout = (index, _local.spec.item_bytes, _local.spec.fingerprint)
    message.append(FRAME_MAGIC + ",".join(str(word) for word in layout).encode())


def note_peer_tail(message: list[bytes]) -> None:
    """Remember the tail layout of a decode that registers; malformed means none."""
    peer = message[3].decode("ascii")
    layout = None
    for frame in message[_FIRST_TRAILING_FRAME:]:
        if frame.startswith(FRAME_MAGIC):
            layout = _parse_frame(frame)
    _peers.pop(peer, None)
    if layout is not None:
        _peers[peer] = layout
    _without_layout.discard(peer)


def _parse_frame(frame: bytes) -> tuple[int, int, int] | None:
    try:
        index, item_bytes, fingerprint = frame[len(FRAME_MAGIC) :].split(b",")
        return int(index), int(item_bytes), int(fingerprint)
    except ValueError:
        logger.error("Ignoring a malformed tail frame: %r", frame[:80])
        return None


def tail_explains_aux_count(num_local: int, num_remote: int, peer: str) -> bool:
    """Whether two metadata buffer counts differ by nothing but a tail buffer.

    True for a pipeline stage before the last, and for a prefill that hands over
    draft KV to a decode that can also take a tail.
    """
    if num_local == num_remote:
        return True
    own = 1 if _local is not None else 0
    return num_local - own == num_remote - (1 if peer in _peers else 0)


def _say_without_layout(peer: str) -> None:
    if peer in _without_layout:
        return
    _without_layout.add(peer)
    logger.warning(
        "Decode %s announced no place for rows; its requests get none and draft "
        "without context. Set %s on it to this engine's value.",
        peer,
        envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name,
    )


def shape_tail_block(
    manager: Any,
    peer: str,
    *,
    slot: int,
    peer_slot: int,
    peer_ptrs: list[int],
) -> tuple[int, int, int] | None:
    """Where and how much of a finished slot to send, or None to send no tail.

    Args:
        slot, peer_slot: metadata slots here and there.
        peer_ptrs: the peer's metadata buffer addresses.

    Returns:
        (source address, destination address, bytes): the header and the rows that
        exist, at the peer's own stride.

    Raises:
        RuntimeError: the peer expects a tail of another shape.
    """
    if _local is None or not _cap_tokens:
        return None
    layout = _peers.get(peer)
    if layout is None:
        _say_without_layout(peer)
        return None
    index, item_bytes, fingerprint = layout
    own = (len(manager.kv_args.aux_data_ptrs) - 1, _local.spec.item_bytes)
    if (index, item_bytes) != own or fingerprint != _local.spec.fingerprint:
        raise RuntimeError(
            "The engines disagree on the tail of hidden rows: prefill sends "
            f"{own[1]} bytes a request as metadata buffer {own[0]}, target layers "
            f"{list(_local.spec.layer_ids)} (mark {_local.spec.fingerprint:x}); decode "
            f"expects {item_bytes} bytes as buffer {index} (mark {fingerprint:x}). "
            "Set the tail length and the layer ids alike on both engines."
        )
    header = _local.header(slot)
    count = 0 if header is None else header.count
    source = manager.kv_args.aux_data_ptrs[-1] + slot * _local.spec.item_bytes
    target = peer_ptrs[index] + peer_slot * item_bytes
    return source, target, HEADER_BYTES + count * _local.spec.row_bytes


def reshape_nixl_aux(
    manager: Any,
    peer: str,
    slots: tuple[int, int],
    peer_ptrs: list[int],
    blocks: tuple[list[tuple], list[tuple]],
) -> None:
    """Replace the whole-slot tail block of a NIXL metadata send, in place.

    Args:
        slots: metadata slots here and at the peer.
        blocks: (address, bytes, device) of sources and of targets.
    """
    if _local is None or not _cap_tokens:
        return
    sources, targets = blocks
    while len(sources) >= len(manager.kv_args.aux_data_ptrs):
        sources.pop()
        targets.pop()
    block = shape_tail_block(
        manager,
        peer,
        slot=slots[0],
        peer_slot=slots[1],
        peer_ptrs=peer_ptrs,
    )
    if block is not None:
        sources.append((block[0], block[2], 0))
        targets.append((block[1], block[2], 0))


def reshape_mooncake_aux(
    manager: Any,
    peer: str,
    slots: tuple[int, int],
    peer_ptrs: list[int],
    blocks: list[tuple],
) -> bool:
    """Replace the whole-slot tail block of a Mooncake metadata send, in place.

    Args:
        slots: metadata slots here and at the peer.
        blocks: (source address, target address, bytes).

    Returns:
        False when nothing may be sent; the reason is logged. The sender reports a
        failed send for its room then, where an error would end its thread.
    """
    if _local is None or not _cap_tokens:
        return True
    while len(blocks) >= len(manager.kv_args.aux_data_ptrs):
        blocks.pop()
    try:
        block = shape_tail_block(
            manager,
            peer,
            slot=slots[0],
            peer_slot=slots[1],
            peer_ptrs=peer_ptrs,
        )
    except RuntimeError as error:
        logger.error("Sending nothing to decode %s: %s", peer, error)
        return False
    if block is not None:
        blocks.append(block)
    return True
