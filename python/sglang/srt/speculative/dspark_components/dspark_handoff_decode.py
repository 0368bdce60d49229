"""Decode's side of the tail: from a row that prefill wrote to draft KV.

Life cycle of one request's tail: ``check_tails`` reads and checks its header when the
transfer is complete on this rank; ``hold_tail`` keeps its slot when all ranks commit the
request; ``inject_tails`` copies the hidden states of every request of a prebuilt batch
from their rows to the device and writes the draft KV, on the schedule stream, between
the fence that drained the running forward and the one the next forward waits for. Then
the slots are given back.

What no tail covers is zeroed when the draft would read it, so that acceptance depends
on the request alone and never on who used the KV slots before; so is the context of a
request that brings neither a tail nor draft KV. A draft whose pool masks by a first
valid position (DeepSeek-V4) gets that position instead.

``warm_up`` does it once when decode starts, so that a draft it does not work for shows
then, and nothing compiles while requests wait.

``save_draft_kv`` and ``restore_draft_kv`` carry draft KV through a retraction whose
backup covers the target's pools only (``cpu_tensor``; ``host_pool`` covers the draft's).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.disaggregation.common.control_threads import log_once
from sglang.srt.speculative.dspark_components.dspark_handoff import TailSpec, current
from sglang.srt.speculative.dspark_components.dspark_handoff_tail import (
    MAGIC,
    TailHeader,
    same_room,
)
from sglang.srt.speculative.dspark_components.handoff_refusals import (
    DEFAULT_TAIL_TOKENS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

logger = logging.getLogger(__name__)

# Device memory that injection takes beside the weights' and the pools'.
MAX_BYTES_PER_CALL = 64 << 20
MAX_WARM_UP_TOKENS = 128


class Tail(NamedTuple):
    """Hidden states of positions ``start`` to ``end`` - 1, ``[tokens, K * hidden_size]``,
    in the row of a metadata slot; None where there are none."""

    start: int
    end: int
    hidden_states: torch.Tensor | None
    slot: int | None = None


NO_TAIL = Tail(0, 0, None)


@dataclasses.dataclass(frozen=True)
class Draft:
    """This engine's draft: what reads the context, and what may be done to its pool.

    Args:
        shape: hidden states it is made from, and how many tokens it reads before a
            position.
        no_tail: why this decode takes no tail. A request without draft KV is left as
            SGLang leaves it then.
        pinned_tokens: the only length of a tail that this decode takes.
        shares_slots: whether requests share token slots of a common prefix.
    """

    pool: KVCache
    shape: TailSpec
    no_tail: str | None = None
    pinned_tokens: int | None = None
    shares_slots: bool = False

    @property
    def is_masked(self) -> bool:
        return hasattr(self.pool, "set_swa_valid_from")

    @property
    def must_cover(self) -> str | None:
        """Why a tail that covers less than the draft reads cannot be used."""
        if self.is_masked:
            return None
        if self.shares_slots:
            return (
                "--disaggregation-decode-enable-radix-cache shares it between requests"
            )
        if not is_clearable(self.pool):
            return f"{type(self.pool).__name__} keeps no entry per token slot"
        return None

    @property
    def can_copy(self) -> bool:
        return is_clearable(self.pool) and hasattr(self.pool, "get_cpu_copy")

    def first_read(self, seq_len: int) -> int:
        """The first position that the draft reads before ``seq_len``."""
        need = self.shape.window_need
        return 0 if need is None else max(0, seq_len - need)


def check_tails(polls: list[int], decode_reqs: list[DecodeRequest]) -> None:
    """Take the tails of completed transfers; a poll whose tail is unusable fails.

    ``polls`` are this rank's, before they are reduced over the ranks to the lowest: one
    rank that cannot use its part of a tail fails the request on all of them, without a
    reduction of its own. A request is seen again until every rank has all of it.

    A row without a header has no tail: where prefill has a draft, the draft KV that
    arrived stays; elsewhere, draft KV that was never written is cleared.
    """
    if current().draft is None:
        return
    from sglang.srt.disaggregation.base import KVPoll

    for i, decode_req in enumerate(decode_reqs):
        if polls[i] != int(KVPoll.Success):
            continue
        req = decode_req.req
        req.dspark_tail, problem = _taken(decode_req)
        if problem is not None:
            polls[i] = int(KVPoll.Failed)
            message = f"Draft context cannot be used: {problem}"
            decode_req.kv_receiver.kv_mgr.record_failure(req.bootstrap_room, message)


def hold_tail(decode_req: DecodeRequest) -> None:
    """Keep the slot of a committed request's tail until the tail is injected."""
    tail = getattr(decode_req.req, "dspark_tail", None)
    if tail is not None and tail.slot is not None:
        current().slots.hold(tail.slot, decode_req.req)


def _taken(decode_req: DecodeRequest) -> tuple[Tail | None, str | None]:
    """The tail that a request brought (None for draft KV), and why it cannot be used."""
    req, slot, tail = decode_req.req, decode_req.metadata_buffer_index, current().tail
    header = tail.header(slot) if tail is not None else None
    if header is None:
        if _brought_draft_kv(decode_req):
            return None, None
        return NO_TAIL, None if _is_warm_up(req) else _shared_slots_problem()
    problem = _header_problem(header, tail.spec, req)
    if problem is not None:
        return None, problem
    if not header.count:
        return NO_TAIL, _shared_slots_problem()
    hidden_states = tail.hidden_states[slot, : header.count]
    return Tail(header.start, header.prompt_tokens, hidden_states, slot), None


def _brought_draft_kv(decode_req: DecodeRequest) -> bool:
    """Whether a request without a header got its draft KV with the target KV.

    Prefill's description says so. Without one, decode does as SGLang.
    """
    if current().draft.no_tail is not None:
        return True
    if _is_warm_up(decode_req.req):
        return False
    receiver = decode_req.kv_receiver
    mode = prefill_mode(receiver.kv_mgr, receiver.bootstrap_addr)
    if mode is not None:
        return mode == "native"
    log_once(
        logger.warning,
        f"Prefill {receiver.bootstrap_addr} does not say whether it runs DSPARK; its "
        "requests draft from the KV it sent, if it sent any.",
    )
    return True


def prefill_mode(manager: CommonKVManager, bootstrap_addr: str) -> str | None:
    """``native``, ``tail`` or ``none`` by a prefill's description, None without one."""
    from sglang.srt.disaggregation.agreement.decode_side import prefill_description

    description = prefill_description(manager, bootstrap_addr)
    return description.get("mode") if description else None


def _is_warm_up(req: Req) -> bool:
    from sglang.srt.disaggregation.utils import _is_fake_transfer

    return _is_fake_transfer(req)


def _shared_slots_problem() -> str | None:
    draft = current().draft
    if draft.is_masked or not draft.shares_slots:
        return None
    return (
        "prefill sent no tail, and this decode shares draft KV between requests "
        "(--disaggregation-decode-enable-radix-cache), so draft KV of other requests "
        "would be read or cleared. Look in prefill's log for why the tail is missing, "
        "or drop that flag on decode."
    )


def _header_problem(header: TailHeader, spec: TailSpec, req: Req) -> str | None:
    if header.magic != MAGIC:
        return (
            f"prefill writes tail layout {header.magic:#x}, this decode reads "
            f"{MAGIC:#x}. Run the same build of SGLang on both engines."
        )
    if not same_room(header, req.bootstrap_room):
        return (
            f"the tail in its slot belongs to bootstrap room {header.room}, not to "
            f"{req.bootstrap_room}: two requests shared a metadata slot."
        )
    found = (header.token_bytes, header.fingerprint)
    expected = (spec.token_bytes, spec.fingerprint)
    if found != expected:
        return (
            f"prefill sent {found[0]} bytes a token (fingerprint {found[1]:x}), expected "
            f"{expected[0]} bytes of target layers {list(spec.layer_ids)} (fingerprint "
            f"{expected[1]:x}). Set the same layer ids on both engines."
        )
    fits = 0 <= header.count <= spec.tail_tokens and header.start >= 0
    if not fits or header.start + header.count != header.prompt_tokens:
        return (
            f"prefill announced tokens {header.start} to {header.start + header.count} "
            f"of a prompt of {header.prompt_tokens} tokens, and the slot holds "
            f"{spec.tail_tokens}."
        )
    return None


class _Job(NamedTuple):
    req_pool_idx: int
    start: int
    final: int
    hidden_states: torch.Tensor


def inject_tails(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    """Write the draft KV of a prebuilt batch from the tails its requests brought.

    Must follow ``process_prebuilt``: it may swap a request's duplicate KV slots for
    those of the prefix tree. A request that was not committed since it last ran, such
    as one back from a retraction, is left alone.
    """
    if current().draft is None:
        return
    worker = scheduler.draft_worker
    jobs: list[_Job] = []
    read: list[int] = []
    for req, seq_len in zip(batch.reqs, batch.seq_lens_cpu.tolist()):
        tail = getattr(req, "dspark_tail", None)
        if tail is None:
            continue
        req.dspark_tail = None
        if tail.slot is not None:
            read.append(tail.slot)
        if tail.hidden_states is not None and tail.end != seq_len:
            logger.error(
                "The tail of request %s ends at token %d, its sequence at token %d; "
                "drafting without the tail.",
                req.rid,
                tail.end,
                seq_len,
            )
            tail = NO_TAIL
        slot = int(req.kv.req_pool_idx)
        start = seq_len if tail.hidden_states is None else tail.start
        _forget_uncovered(worker, slot, start, seq_len)
        if tail.hidden_states is not None:
            jobs.append(_Job(slot, start, seq_len - 1, tail.hidden_states))
    _inject(worker, list(_groups(jobs)))
    if read:
        current().slots.give_back(read, _copied(worker.device))


def _copied(device: torch.device | str) -> torch.Event | None:
    """An event behind all copies queued so far; None where copies do not overlap."""
    if torch.device(device).type == "cpu":
        return None
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def warm_up(worker: DSparkWorkerV2, shape: TailSpec) -> None:
    """Inject zeros into the padding slot of every pool, which no request reads."""
    tokens = min(shape.window_need or DEFAULT_TAIL_TOKENS, MAX_WARM_UP_TOKENS)
    zeros = torch.zeros((tokens, shape.width), dtype=shape.dtype)
    _inject(worker, [[_Job(0, 0, tokens - 1, zeros)]])
    if event := _copied(worker.device):
        event.synchronize()


def _groups(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Jobs in groups of at most ``MAX_BYTES_PER_CALL``, a larger one in pieces."""
    group: list[_Job] = []
    room = MAX_BYTES_PER_CALL
    for job in jobs:
        token_bytes = job.hidden_states[0].nbytes
        while len(job.hidden_states):
            fits = room // token_bytes
            if not fits and group:
                yield group
                group, room = [], MAX_BYTES_PER_CALL
                continue
            piece = job.hidden_states[: max(1, fits)]
            group.append(job._replace(hidden_states=piece))
            room -= piece.nbytes
            job = job._replace(
                start=job.start + len(piece),
                hidden_states=job.hidden_states[len(piece) :],
            )
    if group:
        yield group


def _inject(worker: DSparkWorkerV2, groups: list[list[_Job]]) -> None:
    if not groups:
        return
    like = groups[0][0].hidden_states
    most = max(sum(len(job.hidden_states) for job in group) for group in groups)
    # All groups run on one stream, so each may overwrite the one before it.
    staging = torch.empty((most, like.shape[1]), dtype=like.dtype, device=worker.device)
    for group in groups:
        _inject_group(worker, group, staging)


def _inject_group(
    worker: DSparkWorkerV2, group: list[_Job], staging: torch.Tensor
) -> None:
    # Pinned copies: a pageable one would wait for the forward this stream waits for.
    from sglang.srt.utils.common import async_h2d

    owners: list[int] = []
    columns: list[int] = []
    finals: list[int] = []
    for job in group:
        count = len(job.hidden_states)
        staging[len(owners) : len(owners) + count].copy_(
            job.hidden_states, non_blocking=True
        )
        owners += [job.req_pool_idx] * count
        columns += range(job.start, job.start + count)
        finals += [job.final] * count
    owner, column, final = (
        async_h2d(values, dtype=torch.int64, device=worker.device)
        for values in (owners, columns, finals)
    )
    slots = worker.model_runner.req_to_token_pool.req_to_token[owner, column]
    injector = worker._kv_injector
    ring = injector.swa_ring_size is not None
    with worker._draft_context():
        injector.inject_target_hidden(
            target_hidden=staging[: len(owners)],
            cache_loc=slots.to(torch.int64),
            positions=column,
            state_slot=owner if ring else None,
            final_pos=final if ring else None,
        )


def _forget_uncovered(
    worker: DSparkWorkerV2, slot: int, start: int, seq_len: int
) -> None:
    """Make draft KV before ``start`` independent of who used the slots before."""
    draft = current().draft
    pool = worker.draft_model_runner.token_to_kv_pool
    if draft.is_masked:
        _set_valid_from(pool, worker.device, slot, start)
        return
    first_read = draft.first_read(seq_len)
    # Shared slots are not this request's to clear; only a warm-up gets here with them.
    if first_read >= start or draft.shares_slots:
        return
    if not is_clearable(pool):
        log_once(
            logger.warning,
            f"Draft KV pool {type(pool).__name__} keeps no entry per token slot and "
            "cannot be cleared: a request without draft context reads what an earlier "
            "request left there. Output is correct; its accept length varies.",
        )
        return
    table = worker.model_runner.req_to_token_pool.req_to_token
    zero_kv(pool, table[slot, first_read:start].to(torch.int64))


def _set_valid_from(
    pool: KVCache, device: torch.device, slot: int, position: int
) -> None:
    from sglang.srt.utils.common import async_h2d

    if getattr(pool, "swa_valid_from", None) is None:
        return
    pool.set_swa_valid_from(
        async_h2d([slot], dtype=torch.int64, device=device),
        async_h2d([position], dtype=torch.int64, device=device),
    )


def zero_kv(pool: KVCache, slots: torch.Tensor) -> None:
    """Zero K and V of token slots ``[n]`` in every layer of a clearable pool."""
    if windowed := getattr(pool, "swa_kv_pool", None):
        # Slots that it has none for (-1) become the padding slot.
        zero_kv(windowed, pool.translate_loc_from_full_to_swa(slots).clamp(min=0))
    pool = getattr(pool, "full_kv_pool", pool)
    for buffer in [*pool.k_buffer, *pool.v_buffer]:
        # As bytes: index_fill_ does not know all dtypes of fp8 pools.
        buffer = buffer.view(torch.uint8)
        if getattr(pool, "use_hnd", False):
            buffer[slots // pool.page_size, :, slots % pool.page_size] = 0
        else:
            buffer.index_fill_(0, slots, 0)


def is_clearable(pool: KVCache) -> bool:
    """Whether ``zero_kv`` knows the layout of a pool."""
    windowed = getattr(pool, "swa_kv_pool", None)
    if windowed is not None and not is_clearable(windowed):
        return False
    pool = getattr(pool, "full_kv_pool", pool)
    layout = getattr(pool, "kv_cache_layout", "nhd")
    return hasattr(pool, "k_buffer") and layout in ("nhd", "hnd")


def save_draft_kv(req: Req, req_to_token_pool: ReqToTokenPool) -> None:
    """Copy the draft KV that a resumed request will read to the host."""
    draft = current().draft
    if draft is None or not draft.can_copy:
        return
    slots = _readable_slots(draft, req, req_to_token_pool)
    req.dspark_draft_backup = draft.pool.get_cpu_copy(slots) if slots.numel() else None


def restore_draft_kv(req: Req, req_to_token_pool: ReqToTokenPool) -> None:
    """Write saved draft KV into the slots the resumed request got."""
    draft = current().draft
    backup = getattr(req, "dspark_draft_backup", None)
    if draft is None or backup is None:
        return
    req.dspark_draft_backup = None
    slots = _readable_slots(draft, req, req_to_token_pool)
    draft.pool.load_cpu_copy(backup, slots)


def _readable_slots(
    draft: Draft, req: Req, req_to_token_pool: ReqToTokenPool
) -> torch.Tensor:
    end = max(0, req.seqlen - 1)
    table = req_to_token_pool.req_to_token
    return table[req.kv.req_pool_idx, draft.first_read(end) : end]
