"""Decode's side of the tail: from a metadata slot to rows of draft KV.

Life cycle of one request's rows: ``commit_tail_rows`` copies them out of the metadata
slot when the transfer is committed, because the slot is freed at once and its next
owner's transfer is not ordered with this process; ``inject_tail_rows`` writes the
draft KV of every request of a prebuilt batch, on the schedule stream, between the
fence that drained the running forward and the one the next forward waits for.

What no row covers is zeroed when the draft would read it, so that acceptance depends
on the request alone and never on who used the KV slots before; so is the context of a
request that brings neither rows nor draft KV. A draft whose pool masks by a first valid
position (DeepSeek-V4) gets that position instead.

``save_draft_rows`` and ``restore_draft_rows`` carry draft KV through a retraction;
the target's backup covers the target's pools only.
"""

from __future__ import annotations

import functools
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang.srt.speculative.dspark_components.dspark_handoff_tail import (
    MAGIC,
    TailBuffer,
    TailHeader,
    same_room,
    tail_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Device memory that injection takes beside the weights' and the pools'.
MAX_BYTES_PER_CALL = 64 << 20


class TailRows(NamedTuple):
    """Rows of positions ``start`` to ``end`` - 1; None when there are none."""

    start: int
    end: int
    rows: torch.Tensor | None


NO_ROWS = TailRows(0, 0, None)


class _Draft(NamedTuple):
    """This engine's draft: what reads the rows, and what may be done to its pool."""

    window_need: int | None
    pool: Any
    can_copy: bool
    shares_slots: bool
    plain_slots: bool

    def first_read(self, seq_len: int) -> int:
        """The first position that the draft reads before ``seq_len``."""
        return 0 if self.window_need is None else max(0, seq_len - self.window_need)


_draft: _Draft | None = None
_undescribed: set[str] = set()


def adopt_draft(
    pool: Any,
    window_need: int | None,
    *,
    shares_slots: bool = False,
    plain_slots: bool = True,
) -> None:
    """Name the draft whose context this process looks after.

    Args:
        pool: its KV pool.
        window_need: rows it reads before a position, None for all.
        shares_slots: whether requests share token slots of a common prefix.
        plain_slots: whether a request's token slots are rows of the pool. Where they
            are not, a request without rows is left as upstream leaves it.
    """
    global _draft
    dense = hasattr(pool, "k_buffer") and hasattr(pool, "get_cpu_copy")
    masked = hasattr(pool, "set_swa_valid_from")
    shares_slots = shares_slots and not masked
    _draft = _Draft(window_need, pool, dense, shares_slots, plain_slots)


def forget_draft() -> None:
    """Back to an engine without a draft."""
    global _draft
    _draft = None
    _undescribed.clear()


def commit_tail_rows(
    buffers: MetadataBuffers, slot: int, decode_req: DecodeRequest
) -> None:
    """Take a committed request's rows out of its slot, before the slot is freed.

    A slot without a header brought no rows: the draft KV that arrived stays where
    prefill has a draft, and what nobody wrote is forgotten everywhere else. Rows that
    do not fit, or none where slots are shared, abort the request with a message.
    """
    if _draft is None:
        return
    req = decode_req.req
    tail = tail_of(buffers)
    header = tail.header(slot) if tail is not None else None
    req.dspark_tail_rows = None
    if header is None:
        if _brought_draft_kv(decode_req, expects_tail=tail is not None):
            return
        req.dspark_tail_rows = NO_ROWS
        problem = None if _is_warm_up(req) else _shared_slots_problem()
    else:
        problem = _header_problem(header, tail, req)
        if problem is None and header.count:
            rows = tail.read(slot, header)
            req.dspark_tail_rows = TailRows(header.start, header.prompt_tokens, rows)
        elif problem is None:
            req.dspark_tail_rows = NO_ROWS
            problem = _shared_slots_problem()
    if problem is None:
        return
    from sglang.srt.disaggregation.utils import prepare_abort

    message = f"Draft context of request {req.rid} cannot be used: {problem}"
    logger.error(message)
    prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)


def _brought_draft_kv(decode_req: DecodeRequest, *, expects_tail: bool) -> bool:
    """Whether a request without a header got its draft KV with the target KV.

    A prefill says so in its description. Where it does not describe itself, a decode
    that expects rows cannot have been meant to draft from KV that it did not announce;
    one that expects none keeps what upstream keeps.
    """
    if not _draft.plain_slots:
        return True
    if _is_warm_up(decode_req.req):
        return False
    receiver = decode_req.kv_receiver
    mode = prefill_mode(receiver.kv_mgr, receiver.bootstrap_addr)
    if mode is not None:
        return mode == "native"
    if receiver.bootstrap_addr not in _undescribed:
        _undescribed.add(receiver.bootstrap_addr)
        logger.warning(
            "Prefill %s sent no rows and does not say whether it runs DSPARK; %s.",
            receiver.bootstrap_addr,
            "its requests draft without context"
            if expects_tail
            else "its requests draft from the KV it sent, if it sent any",
        )
    return not expects_tail


def prefill_mode(manager: Any, bootstrap_addr: str) -> str | None:
    """``native``, ``tail`` or ``none`` by a prefill's description, None without one."""
    from sglang.srt.disaggregation.agreement.decode_side import prefill_description

    description = prefill_description(manager, bootstrap_addr)
    return description.get("mode") if description else None


def _is_warm_up(req: Req) -> bool:
    from sglang.srt.disaggregation.utils import _is_fake_transfer

    return _is_fake_transfer(req)


def _shared_slots_problem() -> str | None:
    if not _draft.shares_slots:
        return None
    return (
        "prefill sent no rows, and this decode shares draft KV between requests "
        "(--disaggregation-decode-enable-radix-cache), so others' would be read or "
        "cleared. See prefill's log for why, or drop the flag."
    )


def _header_problem(header: TailHeader, tail: TailBuffer, req: Req) -> str | None:
    spec = tail.spec
    if header.magic != MAGIC:
        return (
            f"prefill writes tail layout {header.magic:#x}, this decode reads "
            f"{MAGIC:#x}. Run the same release of the patch set on both engines."
        )
    if not same_room(header, req.bootstrap_room):
        return (
            f"its rows belong to bootstrap room {header.room}, not to "
            f"{req.bootstrap_room}: two requests shared a metadata slot."
        )
    found = (header.row_bytes, header.fingerprint)
    expected = (spec.row_bytes, spec.fingerprint)
    if found != expected:
        return (
            f"prefill sent rows of {found[0]} bytes (mark {found[1]:x}), expected "
            f"{expected[0]} bytes of target layers {list(spec.layer_ids)} (mark "
            f"{expected[1]:x}). Set the layer ids alike on both engines."
        )
    fits = 0 <= header.count <= spec.tail_tokens and header.start >= 0
    if not fits or header.start + header.count != header.prompt_tokens:
        return (
            f"prefill announced rows {header.start} to {header.start + header.count} "
            f"of a prompt of {header.prompt_tokens} tokens, and the slot holds "
            f"{spec.tail_tokens}."
        )
    return None


class _Job(NamedTuple):
    req_pool_idx: int
    start: int
    final: int
    rows: torch.Tensor


def inject_tail_rows(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    """Write the draft KV of a prebuilt batch from the rows its requests brought.

    Must follow ``process_prebuilt``: it may swap a request's duplicate KV slots for
    those of the prefix tree. A request that was not committed since it last ran, such
    as one back from a retraction, is left alone.
    """
    if _draft is None:
        return
    worker = scheduler.draft_worker
    jobs: list[_Job] = []
    for req, seq_len in zip(batch.reqs, batch.seq_lens_cpu.tolist()):
        taken = getattr(req, "dspark_tail_rows", None)
        if taken is None:
            continue
        req.dspark_tail_rows = None
        if taken.rows is not None and taken.end != seq_len:
            logger.error(
                "Rows of request %s end at %d, its sequence at %d; drafting without.",
                req.rid,
                taken.end,
                seq_len,
            )
            taken = NO_ROWS
        slot = int(req.kv.req_pool_idx)
        start = seq_len if taken.rows is None else taken.start
        _forget_uncovered(worker, slot, start, seq_len)
        if taken.rows is not None:
            jobs.append(_Job(slot, start, seq_len - 1, taken.rows))
    _inject(worker, list(_groups(jobs)))


def _groups(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Jobs in groups of at most ``MAX_BYTES_PER_CALL``, a larger one in pieces."""
    group: list[_Job] = []
    room = MAX_BYTES_PER_CALL
    for job in jobs:
        row_bytes = job.rows.shape[1] * job.rows.element_size()
        while job.rows.shape[0]:
            fits = room // row_bytes
            if not fits and group:
                yield group
                group, room = [], MAX_BYTES_PER_CALL
                continue
            piece = job.rows[: max(1, fits)]
            group.append(job._replace(rows=piece))
            room -= piece.nbytes
            job = job._replace(
                start=job.start + len(piece), rows=job.rows[len(piece) :]
            )
    if group:
        yield group


def _inject(worker: Any, groups: list[list[_Job]]) -> None:
    if not groups:
        return
    like = groups[0][0].rows
    most = max(sum(len(job.rows) for job in group) for group in groups)
    # All groups run on one stream, so each may overwrite the one before it.
    staging = torch.empty((most, like.shape[1]), dtype=like.dtype, device=worker.device)
    for group in groups:
        _inject_group(worker, group, staging)


def _inject_group(worker: Any, group: list[_Job], staging: torch.Tensor) -> None:
    # Pinned copies: a pageable one would wait for the forward this stream waits for.
    from sglang.srt.utils.common import async_h2d

    owners: list[int] = []
    columns: list[int] = []
    finals: list[int] = []
    for job in group:
        count = len(job.rows)
        staging[len(owners) : len(owners) + count].copy_(job.rows, non_blocking=True)
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


def _forget_uncovered(worker: Any, slot: int, start: int, seq_len: int) -> None:
    """Make draft KV before ``start`` read the same whoever used the slots before."""
    pool = worker.draft_model_runner.token_to_kv_pool
    if hasattr(pool, "set_swa_valid_from"):
        _set_valid_from(pool, worker.device, slot, start)
        return
    first_read = _draft.first_read(seq_len)
    # Shared slots are not this request's to clear; only a warm-up gets here with them.
    if first_read >= start or _draft.shares_slots:
        return
    if not is_clearable(pool):
        _say_uncleared(pool)
        return
    table = worker.model_runner.req_to_token_pool.req_to_token
    zero_kv_rows(pool, table[slot, first_read:start].to(torch.int64))


@functools.cache
def _say_uncleared(pool: Any) -> None:
    logger.warning(
        "Draft KV pool %s keeps no row per token slot: a request without draft context "
        "reads what its slots held before, and its accept length varies.",
        type(pool).__name__,
    )


def _set_valid_from(pool: Any, device: Any, slot: int, position: int) -> None:
    from sglang.srt.utils.common import async_h2d

    if getattr(pool, "swa_valid_from", None) is None:
        return
    pool.set_swa_valid_from(
        async_h2d([slot], dtype=torch.int64, device=device),
        async_h2d([position], dtype=torch.int64, device=device),
    )


def zero_kv_rows(pool: Any, slots: torch.Tensor) -> None:
    """Zero K and V of token slots ``[n]`` in every layer of a dense pool.

    Raises:
        RuntimeError: the pool keeps neither rows nor pages by token slot.
    """
    pool = getattr(pool, "full_kv_pool", pool)
    if not is_clearable(pool):
        raise RuntimeError(
            f"Draft KV pool {type(pool).__name__} keeps no row per token slot, so part "
            "of a request's draft context cannot be cleared."
        )
    for buffer in [*pool.k_buffer, *pool.v_buffer]:
        if getattr(pool, "use_hnd", False):
            buffer[slots // pool.page_size, :, slots % pool.page_size] = 0
        else:
            buffer.index_fill_(0, slots, 0)


def is_clearable(pool: Any) -> bool:
    """Whether ``zero_kv_rows`` knows the layout of a pool."""
    pool = getattr(pool, "full_kv_pool", pool)
    layout = getattr(pool, "kv_cache_layout", "nhd")
    return hasattr(pool, "k_buffer") and layout in ("nhd", "hnd")


def save_draft_rows(req: Req, req_to_token_pool: Any) -> None:
    """Copy the draft rows a resumed request will read to the host."""
    if _draft is None or not _draft.can_copy:
        return
    slots = _readable_slots(req, req_to_token_pool)
    backup = _draft.pool.get_cpu_copy(slots) if slots.numel() else None
    req.dspark_draft_backup = backup


def restore_draft_rows(req: Req, req_to_token_pool: Any) -> None:
    """Write saved draft rows into the slots the resumed request got."""
    backup = getattr(req, "dspark_draft_backup", None)
    if _draft is None or backup is None:
        return
    req.dspark_draft_backup = None
    _draft.pool.load_cpu_copy(backup, _readable_slots(req, req_to_token_pool))


def _readable_slots(req: Req, req_to_token_pool: Any) -> torch.Tensor:
    end = max(0, req.seqlen - 1)
    table = req_to_token_pool.req_to_token
    return table[req.kv.req_pool_idx, _draft.first_read(end) : end]
