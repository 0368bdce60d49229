"""The tail: the last hidden states of a prompt, in host memory that prefill sends.

Prefill holds one row for each request that it may run at once, addressed by the
request's index in ``req_to_token_pool``. So a request has its row from its first chunk
until its transfer has ended, and those that wait for their turn cost nothing;
``bound_requests`` keeps the number of rows within ``MAX_BUFFER_BYTES``, and a request
beyond it waits, as for KV memory. Every chunk that overlaps the tail copies its hidden
states behind the forward that made them (``TailBuffer.take``); ``TailBuffer.finish``
writes the header when the last chunk is about to be sent; the transfer then sends the
header and exactly the hidden states that exist. Only the last pipeline stage owns rows.

Decode holds one row for each metadata slot. It is allocated and registered with the
transfer engine when decode first meets a prefill that hands over a tail, and kept while
the engine lives. The transfer fills a row; ``commit`` of the request reads its header,
and injection copies it to the device. Until that copy was queued, ``TailSlots`` keeps
the slot from its next owner.

Neither is one of the metadata buffers, which peers pair by position: decode announces
address and stride with its registration.

Row layout, ``spec.slot_bytes`` bytes: eight int64 words (magic, room, start, count,
bytes of a token, fingerprint, prompt tokens, zero), then ``tail_tokens`` times
``spec.width`` values.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from sglang.srt.disaggregation.utils import MetadataBuffers, ReqToMetadataIdxAllocator
from sglang.srt.speculative.dspark_components.dspark_handoff import (
    HandoffConfigError,
    TailSpec,
    activate,
    current,
)
from sglang.srt.speculative.dspark_components.handoff_refusals import (
    HEADER_BYTES,
    MAX_BUFFER_BYTES,
    TAIL_TOKENS,
)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)

MAGIC = 0x4453504B54_0002  # "DSPKT", layout version 2
FRAME_MAGIC = b"dspark-tail/2:"


class TailHeader(NamedTuple):
    """What a row says about its hidden states; ``start`` is the first position."""

    magic: int
    room: int
    start: int
    count: int
    token_bytes: int
    fingerprint: int
    prompt_tokens: int


class TailLayout(NamedTuple):
    """Where a decode keeps its rows: their address, their stride and their meaning."""

    address: int
    slot_bytes: int
    fingerprint: int


class _Filled(NamedTuple):
    owner: str  # request id
    next_position: int  # -1 once a token was skipped


class TailBuffer:
    """Headers and hidden states of ``rows`` requests in one uint8 tensor.

    Page-locked on a machine with CUDA, so that copies behind a forward do not block.
    ``pin_memory`` would round the size up to a power of two.

    Raises:
        HandoffConfigError: CUDA cannot lock the memory.
    """

    def __init__(self, spec: TailSpec, rows: int) -> None:
        self.spec = spec
        self.storage = torch.zeros((rows, spec.slot_bytes), dtype=torch.uint8)
        if torch.cuda.is_available():
            _lock_pages(self.storage)
        self.headers = self.storage[:, :HEADER_BYTES].view(torch.int64)
        values = self.storage[:, HEADER_BYTES:].view(spec.dtype)
        self.hidden_states = values.unflatten(1, (spec.tail_tokens, spec.width))
        self.num_incomplete = 0
        self._is_registered = False
        self._filled: dict[int, _Filled] = {}
        self._row_of_slot: dict[int, int] = {}

    @classmethod
    def allocate(cls, spec: TailSpec, rows: int) -> TailBuffer:
        """A buffer, if all ranks of this host may have one of the same size.

        Raises:
            HandoffConfigError: it does not fit; the message has the sizes.
        """
        import psutil

        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        # Of a pipeline only the ranks of one stage have one.
        here = parallel.tp_size * parallel.pp_size // parallel.nnodes
        ranks = min(parallel.tp_size, here)
        wanted, total = rows * spec.slot_bytes, psutil.virtual_memory().total
        sizes = (
            f"{rows} requests of {spec.slot_bytes / (1 << 20):.2f} MiB are "
            f"{wanted / (1 << 20):.0f} MiB of host memory for this rank, and "
            f"{ranks * wanted / (1 << 20):.0f} MiB for all ranks on this host"
        )
        # Not what is free: ranks that ask while others allocate must agree.
        if ranks * wanted > total // 2:
            raise HandoffConfigError(
                f"A tail of {spec.tail_tokens} tokens does not fit: {sizes}; "
                f"this machine has {total >> 20} MiB, of which half may be taken. Lower "
                f"{TAIL_TOKENS} on prefill, or --max-running-requests on this engine."
            )
        logger.info("DSpark handoff: %s.", sizes)
        return cls(spec, rows)

    def register(self, manager: CommonKVManager) -> None:
        """Let the transfer engine read or write this memory; once."""
        if self._is_registered:
            return
        address, length = self.storage.data_ptr(), self.storage.nbytes
        if hasattr(manager, "agent"):
            manager.agent.register_memory([(address, length, 0, "")], "DRAM")
        elif hasattr(manager, "engine"):
            manager.engine.batch_register([address], [length])
        self._is_registered = True

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
            self._take_one(req, hidden[offset : offset + extent], int(begin))
            offset += extent

    def _take_one(self, req: Req, hidden: torch.Tensor, begin: int) -> None:
        prompt = len(req.origin_input_ids)
        start = self.tail_start(prompt)
        low, high = max(begin, start), min(begin + hidden.shape[0], prompt)
        if low >= high:
            return
        row = req.kv.req_pool_idx
        filled = self._filled.get(row)
        continues = filled == _Filled(req.rid, low)
        if low != start and not continues:
            self._filled[row] = _Filled(req.rid, -1)
            return
        self.hidden_states[row, low - start : high - start].copy_(
            hidden[low - begin : high - begin], non_blocking=True
        )
        self._filled[row] = _Filled(req.rid, high)

    def finish(self, req: Req) -> None:
        """Write the header of a request whose last chunk is about to be sent.

        A tail with a gap is sent as an empty one: decode must never read what was not
        written for this request.
        """
        prompt = len(req.origin_input_ids)
        start = self.tail_start(prompt)
        row = req.kv.req_pool_idx
        complete = self._filled.pop(row, None) == _Filled(req.rid, prompt)
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
        self.headers[row].copy_(words)
        self._row_of_slot[req.metadata_buffer_index] = row

    def sent_from(self, slot: int) -> tuple[int, int]:
        """(address, bytes) to send for the finished request of a metadata slot."""
        row = self._row_of_slot[slot]
        count = int(self.headers[row, TailHeader._fields.index("count")])
        address = self.storage.data_ptr() + row * self.spec.slot_bytes
        return address, HEADER_BYTES + count * self.spec.token_bytes

    def header(self, row: int) -> TailHeader | None:
        """The row's header, None when nothing was written since it was cleared."""
        words = self.headers[row].tolist()
        if not any(words):
            return None
        return TailHeader(*words[:-1])

    def clear(self, row: int) -> None:
        self.headers[row].zero_()


def _lock_pages(storage: torch.Tensor) -> None:
    error = int(
        torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes, 0)
    )
    if error:
        raise HandoffConfigError(
            f"CUDA could not lock {storage.nbytes >> 20} MiB of host memory for the "
            f"tail of hidden states (cudaHostRegister: error {error}). Raise the limit "
            "on locked memory (ulimit -l), or lower --max-running-requests."
        )


def bound_requests(max_num_reqs: int) -> int:
    """Limit the requests a capturing prefill runs at once to those it has rows for."""
    spec = current().spec
    if spec is None:
        return max_num_reqs
    rows = MAX_BUFFER_BYTES // spec.slot_bytes - 1  # the pool has a padding index
    if max_num_reqs > rows:
        logger.info(
            "DSpark handoff: %d requests at once instead of %d, because each holds %.1f "
            "MiB of hidden states until it is transferred; others wait.",
            rows,
            max_num_reqs,
            spec.slot_bytes / (1 << 20),
        )
    return min(max_num_reqs, rows)


class TailMetadataBuffers(MetadataBuffers):
    """SGLang's metadata buffers; a request's tail is finished and cleared with them."""

    @classmethod
    def of(cls, buffers: MetadataBuffers) -> TailMetadataBuffers:
        mine = cls.__new__(cls)
        mine.__dict__.update(buffers.__dict__)
        return mine

    def set_buf(self, req: Req) -> None:
        super().set_buf(req)
        current().tail.finish(req)

    def clear_slot(self, idx: int) -> None:
        super().clear_slot(idx)
        if tail := current().tail:
            tail.clear(idx)


class TailSlots(ReqToMetadataIdxAllocator):
    """Decode's metadata slots; one whose tail is still to be read stays taken.

    Every rank holds and gives back at the same points, so all of them see the same
    number of free slots. A slot whose copy to the device is only queued is free, and
    is waited for when it is taken again.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._holders: dict[int, Req] = {}
        self._copies: dict[int, torch.Event] = {}

    def hold(self, slot: int, req: Req) -> None:
        """Keep a slot until ``give_back``, or until its request lost its KV memory."""
        self._holders[slot] = req

    def give_back(self, slots: list[int], copied: torch.Event | None) -> None:
        """Free held slots once ``copied`` is over; None where copies do not overlap."""
        for slot in slots:
            if self._holders.pop(slot, None) is None:
                continue
            if copied is not None:
                self._copies[slot] = copied
            super().free(slot)

    def available_size(self) -> int:
        dropped = [slot for slot, req in self._holders.items() if not req.kv.holds_kv]
        self.give_back(dropped, None)
        return super().available_size()

    def alloc(self) -> int | None:
        slot = super().alloc()
        if copied := self._copies.pop(slot, None):
            copied.synchronize()
        return slot

    def free(self, free_index: int) -> None:
        if free_index not in self._holders:
            super().free(free_index)


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
    spec = current().spec
    if spec is None:
        return max_prefix_len
    return min(max_prefix_len, max(0, input_len - spec.tail_tokens))


# -- the wire -----------------------------------------------------------------------------


def make_room(receiver: CommonKVReceiver) -> TailBuffer | None:
    """Decode's rows, if its receiver's prefill hands over a tail; made at the first.

    Must precede the registration message, which names what NIXL may write. A decode
    that cannot make room announces none, and prefill refuses it.
    """
    from sglang.srt.disaggregation.agreement.decode_side import prefill_description

    manager = receiver.kv_mgr
    description = prefill_description(manager, receiver.bootstrap_addr) or {}
    if current().draft is None or description.get("mode") != "tail":
        return None
    try:
        tail = current().tail or _allocate(description["dspark"]["tail_tokens"])
        tail.register(manager)
    except Exception:
        logger.exception(
            "This decode cannot make room for the tail of prefill %s, so its requests "
            "fail.",
            receiver.bootstrap_addr,
        )
        return None
    activate(tail=tail)
    return tail


def _allocate(tail_tokens: int) -> TailBuffer:
    """Rows for as many tokens as the draft reads, or prefill sends if that is more."""
    handoff = current()
    shape = handoff.draft.shape
    tokens = max(tail_tokens, shape.window_need or 0)
    spec = msgspec.structs.replace(shape, tail_tokens=tokens)
    return TailBuffer.allocate(spec, rows=handoff.slots.size)


def announce_room(tail: TailBuffer | None, message: list[bytes]) -> None:
    """Tell prefill where this decode wants tails.

    One frame, recognised by its first bytes wherever it comes after SGLang's.
    """
    if tail is None:
        return
    layout = TailLayout(
        tail.storage.data_ptr(), tail.spec.slot_bytes, tail.spec.fingerprint
    )
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
                f"read: {frame[:80]!r}. Run the same build of SGLang on both engines."
            )
    if handoff.spec is not None and not frames:
        return (
            "[PD-MODE] this prefill hands over a tail of hidden states, and decode "
            "announced no memory for one. Run the same build of SGLang on both engines, and "
            "DSPARK on decode; if it does, its log says what went wrong."
        )
    if handoff.tail is not None:
        handoff.tail.register(manager)
    return None


def _tail_block(peer: str, slots: tuple[int, int]) -> tuple[int, int, int]:
    """The part of a finished row to send.

    Args:
        slots: metadata slots here and at the peer.

    Returns:
        (source address, destination address, bytes): the header and the hidden states
        that exist, at the peer's own stride.

    Raises:
        RuntimeError: the peer has no room for it, or expects other hidden states.
    """
    tail, layout = current().tail, current().peers.get(peer)
    if layout is None:
        raise RuntimeError(f"Decode {peer} has announced no memory for a tail.")
    spec, (slot, peer_slot) = tail.spec, slots
    fits = spec.slot_bytes <= layout.slot_bytes
    if not fits or spec.fingerprint != layout.fingerprint:
        raise RuntimeError(
            f"The engines disagree on the tail: prefill sends {spec.slot_bytes} bytes a "
            f"request of target layers {list(spec.layer_ids)} (fingerprint "
            f"{spec.fingerprint:x}); decode expects at most {layout.slot_bytes} bytes "
            f"(fingerprint {layout.fingerprint:x}). Give all prefills of a decode the "
            "same tail length and layer ids, and restart decode after a change."
        )
    source, length = tail.sent_from(slot)
    return source, layout.address + peer_slot * layout.slot_bytes, length


def send_nixl_tail(
    peer: str, slots: tuple[int, int], blocks: tuple[list[tuple], list[tuple]]
) -> None:
    """Add a request's tail to a NIXL metadata send, in place.

    Args:
        slots: metadata slots here and at the peer.
        blocks: (address, bytes, device) of sources and of targets.

    Raises:
        RuntimeError: see ``_tail_block``.
    """
    if not _sends_tail():
        return
    source, target, length = _tail_block(peer, slots)
    blocks[0].append((source, length, 0))
    blocks[1].append((target, length, 0))


def send_mooncake_tail(
    peer: str, slots: tuple[int, int], blocks: list[tuple[int, int, int]]
) -> bool:
    """Add a request's tail to a Mooncake metadata send, in place.

    Args:
        slots: metadata slots here and at the peer.
        blocks: (source address, target address, bytes).

    Returns:
        False when nothing may be sent; the reason is logged. The sender reports a
        failed send for its room then, where an error would end its thread.
    """
    if not _sends_tail():
        return True
    try:
        blocks.append(_tail_block(peer, slots))
    except RuntimeError as error:
        logger.error("Metadata not sent to decode %s: %s", peer, error)
        return False
    return True


def _sends_tail() -> bool:
    handoff = current()
    return handoff.tail is not None and handoff.spec is not None
