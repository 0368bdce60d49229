"""Decode's side of the tail: from a metadata slot to rows of draft KV.

Life cycle of one request's rows: ``commit_tail_rows`` copies them out of the metadata
slot when the transfer is committed, because the slot is freed at once and its next
owner's transfer is not ordered with this process; ``inject_tail_rows`` writes the
draft KV of every request of a prebuilt batch, on the schedule stream, between the
fence that drained the running forward and the one the next forward waits for.

What no row covers is zeroed when the draft would read it, so that acceptance depends
on the request alone and never on who used the KV slots before. A draft whose pool
masks by a first valid position (DeepSeek-V4) gets that position instead.

``save_draft_rows`` and ``restore_draft_rows`` carry draft KV through a retraction;
the target's backup covers the target's pools only.
"""

from __future__ import annotations

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

    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

# 64 requests of 128 rows of a large target would be hundreds of megabytes at once.
MAX_ROWS_PER_CALL = 4096


class TailRows(NamedTuple):
    """Rows of positions ``start`` to ``end`` - 1; None when there are none."""

    start: int
    end: int
    rows: torch.Tensor | None


def commit_tail_rows(buffers: MetadataBuffers, slot: int, req: Req) -> None:
    """Take a committed request's rows out of its slot, before the slot is freed.

    A slot without a header belongs to a prefill that handed over draft KV instead;
    nothing is injected and the draft KV that arrived stays as it is. A header that
    does not fit aborts the request with both values in its message.
    """
    tail = tail_of(buffers)
    if tail is None:
        return
    header = tail.header(slot)
    if header is None:
        req.dspark_tail_rows = None
        return
    problem = _header_problem(header, tail, req)
    if problem is None:
        rows = tail.read(slot, header) if header.count else None
        req.dspark_tail_rows = TailRows(header.start, header.prompt_tokens, rows)
        return
    from sglang.srt.disaggregation.utils import prepare_abort

    message = f"Draft context of request {req.rid} cannot be used: {problem}"
    logger.error(message)
    prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)


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
    rows: torch.Tensor


def inject_tail_rows(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    """Write the draft KV of a prebuilt batch from the rows its requests brought.

    Must follow ``process_prebuilt``: it may swap a request's duplicate KV slots for
    those of the prefix tree.
    """
    tail = tail_of(scheduler.disagg_metadata_buffers)
    if tail is None:
        return
    worker = scheduler.draft_worker
    jobs: list[_Job] = []
    for req, seq_len in zip(batch.reqs, batch.seq_lens_cpu.tolist()):
        taken = getattr(req, "dspark_tail_rows", None)
        req.dspark_tail_rows = None
        if taken is None:
            _forget_fake(worker, req, seq_len)
            continue
        if taken.end != seq_len:
            logger.error(
                "Rows of request %s end at %d, its sequence at %d; drafting without.",
                req.rid,
                taken.end,
                seq_len,
            )
            taken = TailRows(seq_len, seq_len, None)
        slot = int(req.kv.req_pool_idx)
        _forget_uncovered(worker, tail, slot, taken.start, seq_len)
        if taken.rows is not None:
            jobs.append(_Job(slot, taken.start, taken.rows))
    for group in _groups(jobs):
        _inject_group(worker, group)


def _groups(jobs: list[_Job]) -> Iterator[list[_Job]]:
    group: list[_Job] = []
    held = 0
    for job in jobs:
        count = job.rows.shape[0]
        if group and held + count > MAX_ROWS_PER_CALL:
            yield group
            group, held = [], 0
        group.append(job)
        held += count
    if group:
        yield group


def _inject_group(worker: Any, group: list[_Job]) -> None:
    # Pinned copies: a pageable one would wait for the forward this stream waits for.
    from sglang.srt.utils.common import async_h2d

    owners: list[int] = []
    columns: list[int] = []
    finals: list[int] = []
    for job in group:
        count = job.rows.shape[0]
        owners += [job.req_pool_idx] * count
        columns += range(job.start, job.start + count)
        finals += [job.start + count - 1] * count
    device = worker.device
    owner, column, final = (
        async_h2d(values, dtype=torch.int64, device=device)
        for values in (owners, columns, finals)
    )
    rows = torch.cat([job.rows.to(device, non_blocking=True) for job in group])
    slots = worker.model_runner.req_to_token_pool.req_to_token[owner, column]
    injector = worker._kv_injector
    ring = injector.swa_ring_size is not None
    with worker._draft_context():
        injector.inject_target_hidden(
            target_hidden=rows,
            cache_loc=slots.to(torch.int64),
            positions=column,
            state_slot=owner if ring else None,
            final_pos=final if ring else None,
        )


def _forget_uncovered(
    worker: Any, tail: TailBuffer, slot: int, start: int, seq_len: int
) -> None:
    """Make draft KV before ``start`` read the same whoever used the slots before."""
    pool = worker.draft_model_runner.token_to_kv_pool
    if hasattr(pool, "set_swa_valid_from"):
        _set_valid_from(pool, worker.device, slot, start)
        return
    first_read = seq_len - tail.spec.rows_needed(seq_len)
    if first_read >= start:
        return
    table = worker.model_runner.req_to_token_pool.req_to_token
    zero_kv_rows(pool, table[slot, first_read:start].to(torch.int64))


def _forget_fake(worker: Any, req: Req, seq_len: int) -> None:
    """A warm-up request brings nothing at all: no position of its window is valid."""
    from sglang.srt.disaggregation.utils import _is_fake_transfer

    pool = worker.draft_model_runner.token_to_kv_pool
    if hasattr(pool, "set_swa_valid_from") and _is_fake_transfer(req):
        _set_valid_from(pool, worker.device, int(req.kv.req_pool_idx), seq_len)


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
        RuntimeError: the pool does not keep one row per token slot.
    """
    pool = getattr(pool, "full_kv_pool", pool)
    if getattr(pool, "use_hnd", False) or not hasattr(pool, "k_buffer"):
        raise RuntimeError(
            f"Draft KV pool {type(pool).__name__} keeps no row per token slot, so part "
            "of a request's draft context cannot be cleared. Let the tail cover the "
            "draft's window, or run DSPARK on prefill as well."
        )
    for buffer in [*pool.k_buffer, *pool.v_buffer]:
        buffer.index_fill_(0, slots, 0)


class _Kept(NamedTuple):
    pool: Any
    window_need: int | None


_kept: _Kept | None = None


def keep_draft_rows_of(pool: Any, window_need: int | None) -> None:
    """Name the draft pool whose rows must survive a retraction in this process."""
    global _kept
    dense = hasattr(pool, "k_buffer") and hasattr(pool, "get_cpu_copy")
    _kept = _Kept(pool, window_need) if dense else None


def save_draft_rows(req: Req, req_to_token_pool: Any) -> None:
    """Copy the draft rows a resumed request will read to the host."""
    if _kept is None:
        return
    slots = _readable_slots(req, req_to_token_pool)
    req.dspark_draft_backup = _kept.pool.get_cpu_copy(slots) if slots.numel() else None


def restore_draft_rows(req: Req, req_to_token_pool: Any) -> None:
    """Write saved draft rows into the slots the resumed request got."""
    backup = getattr(req, "dspark_draft_backup", None)
    if _kept is None or backup is None:
        return
    req.dspark_draft_backup = None
    _kept.pool.load_cpu_copy(backup, _readable_slots(req, req_to_token_pool))


def _readable_slots(req: Req, req_to_token_pool: Any) -> torch.Tensor:
    end = max(0, req.seqlen - 1)
    need = _kept.window_need
    start = 0 if need is None else max(0, end - need)
    return req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
