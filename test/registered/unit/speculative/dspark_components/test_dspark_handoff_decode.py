"""Decode's side of the tail: it is taken in time, checked and injected in place.

The draft is a stand-in that records what it is told to write; slots, positions,
grouping and clearing are those of the real path.
"""

from __future__ import annotations

import contextlib
import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.disaggregation import decode as decode_module
from sglang.srt.disaggregation.agreement.decode_side import PrefillPeer
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import (
    FAKE_BOOTSTRAP_HOST,
    poll_and_all_reduce,
)
from sglang.srt.mem_cache import common as mem_cache_common
from sglang.srt.speculative.dspark_components import dspark_handoff_decode as decode
from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails
from sglang.srt.speculative.dspark_components.dspark_handoff import (
    TailSpec,
    activate,
    current,
    deactivate,
)
from sglang.srt.speculative.dspark_components.dspark_kv_inject import (
    TargetHiddenKvInjector,
)
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

SLOTS, ROOM, WIDTH, HEADS, POOL = 4, 77, 6, 2, 64


def make_spec(tail_tokens=4, window_need=4, layer_ids=(0, 1, 2)) -> TailSpec:
    return TailSpec(
        layer_ids=layer_ids,
        hidden_size=WIDTH // 3,
        dtype=torch.float32,
        tail_tokens=tail_tokens,
        window_need=window_need,
    )


def make_room(spec=None):
    """This decode's rows; ``None`` before it has met a tail."""
    tail = tails.TailBuffer(spec or make_spec(), SLOTS)
    activate(tail=tail)
    return tail


def adopt(pool, window_need, **more):
    """Name the draft whose context this process looks after."""
    shape = make_spec(tail_tokens=0, window_need=window_need)
    slots = tails.TailSlots(SLOTS)
    activate(draft=decode.Draft(pool, shape, **more), slots=slots)


def fill(room_here, prompt, slot=0, room=ROOM, spec=None, salt=0):
    """What a finished transfer leaves in a slot; returns its hidden states."""
    tail = tails.TailBuffer(spec or room_here.spec, SLOTS)
    req = SimpleNamespace(
        rid="p",
        origin_input_ids=[0] * prompt,
        metadata_buffer_index=slot,
        bootstrap_room=room,
        kv=SimpleNamespace(req_pool_idx=slot),
    )
    hidden = torch.arange(prompt * WIDTH).float().view(prompt, WIDTH) + salt
    batch = SimpleNamespace(reqs=[req], prefix_lens=[0], extend_lens=[prompt])
    tail.take(batch, hidden)
    tail.finish(req)
    width = min(tail.storage.shape[1], room_here.storage.shape[1])
    room_here.storage[slot, :width] = tail.storage[slot, :width]
    return hidden[-min(prompt, tail.spec.tail_tokens) :]


def make_req(room=ROOM, row=1, rid="d"):
    return SimpleNamespace(
        rid=rid, bootstrap_room=room, bootstrap_host="h", finished_reason=None,
        kv=SimpleNamespace(req_pool_idx=row, holds_kv=True), grammar=None, return_logprob=False,
    )  # fmt: skip


def received(req, mode=None, address="h:1", slot=0):
    """A request as the transfer queue holds it; ``mode`` is what its prefill says."""
    peer = PrefillPeer(description={"mode": mode} if mode else None)
    reasons = {}
    manager = SimpleNamespace(
        prefill_peers={address: peer},
        failure_records=reasons,
        record_failure=reasons.__setitem__,
    )
    receiver = SimpleNamespace(
        kv_mgr=manager, bootstrap_addr=address, clear=lambda: None,
        poll=lambda: KVPoll.Success,
    )  # fmt: skip
    return SimpleNamespace(
        req=req, kv_receiver=receiver, metadata_buffer_index=slot, is_rebootstrap=False
    )


class Pool:
    """A dense draft pool, one row per token slot."""

    use_hnd = False

    def __init__(self):
        self.k_buffer = [torch.full((POOL, HEADS, 1), 9.0) for _ in range(2)]
        self.v_buffer = [torch.full((POOL, HEADS, 1), 9.0) for _ in range(2)]

    def get_cpu_copy(self, indices):
        return [buf[indices].clone() for buf in [*self.k_buffer, *self.v_buffer]]

    def load_cpu_copy(self, copies, indices):
        for buf, copy in zip([*self.k_buffer, *self.v_buffer], copies, strict=True):
            buf[indices] = copy


class MaskedPool(Pool):
    """A pool that masks by a first valid position instead."""

    def __init__(self):
        super().__init__()
        self.swa_valid_from = torch.zeros(SLOTS, dtype=torch.int64)

    def set_swa_valid_from(self, rows, positions):
        self.swa_valid_from[rows] = positions


class VectorizedPool(Pool):
    """A pool whose layout has no entry per token slot."""

    kv_cache_layout = "vectorized_5d"


class Draft:
    def __init__(self):
        self.calls = []

    def write_target_hidden_kv(self, *, target_hidden, cache_loc, positions, **_):
        self.calls.append((target_hidden.clone(), cache_loc, positions))


def make_worker(pool=None):
    table = torch.arange(SLOTS * 16, dtype=torch.int32).view(SLOTS, 16).flip(1)
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=table)
    )
    draft_runner = SimpleNamespace(token_to_kv_pool=pool or Pool())
    draft = Draft()
    worker = SimpleNamespace(
        device="cpu", model_runner=runner, draft_model_runner=draft_runner,
        draft_model=draft, entered=[],
    )  # fmt: skip
    worker._kv_injector = TargetHiddenKvInjector(
        draft_model=draft, draft_model_runner=draft_runner, model_runner=runner,
        device="cpu", verify_num_draft_tokens=5, block_pos_offsets=torch.arange(5),
    )  # fmt: skip

    @contextlib.contextmanager
    def draft_context():
        worker.entered.append(True)
        yield

    worker._draft_context = draft_context
    return worker


def make_batch(*pairs):
    reqs, seq_lens = zip(*pairs, strict=True)
    return SimpleNamespace(reqs=list(reqs), seq_lens_cpu=torch.tensor(seq_lens))


class DraftCase(CustomTestCase):
    def setUp(self):
        self.addCleanup(deactivate)
        adopt(Pool(), 4)

    def commit(self, req, slot=0, mode=None, address="h:1"):
        """What the queue does with a completed transfer; the reason if it fails."""
        decode_req, polls = received(req, mode, address, slot), [int(KVPoll.Success)]
        decode.check_tails(polls, [decode_req])
        reason = decode_req.kv_receiver.kv_mgr.failure_records.get(req.bootstrap_room)
        self.assertEqual(polls[0] == int(KVPoll.Failed), reason is not None)
        if reason is None:
            decode.hold_tail(decode_req)
        return reason

    def taken(self, req, **kwargs):
        self.assertIsNone(self.commit(req, **kwargs))
        return req.dspark_tail


def poll_once(decode_req, group):
    """The poll that the transfer queue makes, of one request."""
    metadata = SimpleNamespace(bootstrap_room=torch.full((SLOTS, 8), ROOM))
    return poll_and_all_reduce([decode_req.kv_receiver], group, [decode_req], metadata)


class TestCheck(DraftCase):
    def test_the_poll_takes_the_tail(self):
        fill(make_room(), 9)
        req = make_req()
        with mock.patch("torch.distributed.get_world_size", lambda _: 1):
            polls = poll_once(received(req), None)
        self.assertEqual(polls, [int(KVPoll.Success)])
        self.assertEqual(req.dspark_tail[:2], (5, 9))

    def test_two_ranks_fail_together(self):
        """One of them lost its rows: it alone sees that, and the poll fails on both.

        Real gloo ranks; without the check before their reduction, the one that goes on
        would hang at the next collective.
        """
        port = get_free_port()
        with torch.multiprocessing.get_context("fork").Pool(2) as pool:
            ranks = pool.starmap_async(poll_as_rank, [(0, port), (1, port)])
            (here, ours), (there, theirs) = ranks.get(timeout=60)
        self.assertEqual([here, there], [[int(KVPoll.Failed)]] * 2)
        self.assertEqual(ours, {})
        self.assertIn("room 78", theirs[ROOM])

    def test_a_request_is_seen_again_until_every_rank_has_it(self):
        """Nothing is held or failed before the ranks agree."""
        fill(make_room(), 9)
        decode_req = received(make_req())
        for _ in range(2):
            polls = [int(KVPoll.Success)]
            decode.check_tails(polls, [decode_req])
            self.assertEqual(polls, [int(KVPoll.Success)])
            self.assertEqual(decode_req.req.dspark_tail[:2], (5, 9))
        self.assertEqual(current().slots._holders, {})

    def test_only_a_completed_transfer_is_read(self):
        fill(make_room(), 9)
        for poll in (KVPoll.Transferring, KVPoll.Failed, KVPoll.WaitingForInput):
            req, polls = make_req(), [int(poll)]
            decode.check_tails(polls, [received(req)])
            self.assertFalse(hasattr(req, "dspark_tail"))
            self.assertEqual(polls, [int(poll)])


class TestCommit(DraftCase):
    def test_commit_holds_the_slot(self):
        """The queue's own commit does; freeing the slot right after does nothing."""
        expected = fill(make_room(), 9)
        queue = object.__new__(decode_module.DecodeTransferQueue)
        queue.scheduler = mock.MagicMock()
        queue.metadata_buffers = SimpleNamespace(get_buf=lambda _: committed_fields())
        queue.scheduler.kv_checksum_computer = None
        queue.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        queue._commit_hicache_local_restore_to_req = lambda _: None
        req = make_req()
        req.output_ids, req.return_logprob, req.return_sampling_mask = [], False, False
        req.time_stats = mock.Mock()
        slots = current().slots
        self.assertEqual(slots.alloc(), 0)
        decode_req = received(req)
        decode.check_tails([int(KVPoll.Success)], [decode_req])
        queue._commit_transfer_to_req(decode_req)
        slots.free(0)
        torch.testing.assert_close(req.dspark_tail.hidden_states, expected)
        self.assertEqual(req.dspark_tail[:2], (5, 9))
        self.assertEqual(slots.available_size(), SLOTS - 1)

    def test_short_prompt(self):
        expected = fill(make_room(), 2)
        taken = self.taken(make_req())
        self.assertEqual(taken[:2], (0, 2))
        torch.testing.assert_close(taken.hidden_states, expected)

    def test_draft_kv_is_kept_only_where_it_came(self):
        """Without a header it is the prefill's mode that says what was written."""
        for has_room in (False, True):
            if has_room:
                make_room()
            for mode, kept in (
                ("native", True),
                ("none", False),
                ("tail", False),
                (None, True),
            ):
                with self.subTest(mode=mode, has_room=has_room):
                    expected = None if kept else decode.NO_TAIL
                    self.assertEqual(self.taken(make_req(), mode=mode), expected)

    def test_undescribed_prefill_is_named_once(self):
        with self.assertLogs(decode.logger, "WARNING") as logs:
            for _ in range(3):
                self.commit(make_req(), address="named-once:1")
        self.assertEqual(len(logs.output), 1)
        self.assertIn("named-once:1", logs.output[0])

    def test_warm_up_brings_nothing(self):
        make_room()
        req = make_req()
        req.bootstrap_host = FAKE_BOOTSTRAP_HOST
        self.assertEqual(self.taken(req, mode="native"), decode.NO_TAIL)

    def test_draft_kv_is_left_alone_where_no_tail_can_be_taken(self):
        """Under --dcp-size and the like slots would name entries of other requests."""
        adopt(Pool(), 4, no_tail="decode has --dcp-size 2")
        self.assertIsNone(self.taken(make_req(), mode="none"))

    def test_engine_without_draft(self):
        deactivate()
        req = make_req()
        self.assertIsNone(self.commit(req))
        self.assertFalse(hasattr(req, "dspark_tail"))

    def test_a_request_without_a_tail_is_refused_where_slots_are_shared(self):
        """Clearing them would change the draft KV of other requests."""
        adopt(Pool(), 4, shares_slots=True)
        tail = make_room()
        fill(tail, 9)
        self.assertIsNone(self.commit(make_req()))
        tail.headers[0, 2:4] = torch.tensor([9, 0])
        self.refused("enable-radix-cache")
        tail.clear(0)
        self.refused("enable-radix-cache")
        warm_up = make_req()
        warm_up.bootstrap_host = FAKE_BOOTSTRAP_HOST
        self.assertIsNone(self.commit(warm_up, mode="tail"))
        adopt(MaskedPool(), 4, shares_slots=True)
        self.assertIsNone(self.commit(make_req(), mode="tail"))

    def refused(self, pattern, room=ROOM):
        reason = self.commit(make_req(room=room), mode="tail")
        self.assertRegex(reason, f"Draft context cannot be used: .*{pattern}")

    def test_hidden_states_of_other_layers_are_refused_with_both_values(self):
        for other in (make_spec(layer_ids=(0, 1, 3)), make_spec(layer_ids=(0, 1, 4))):
            fill(make_room(), 9, spec=other)
            marks = f"{other.fingerprint:x}.*{make_spec().fingerprint:x}"
            self.refused(marks)

    def test_other_room_is_refused(self):
        fill(make_room(), 9, room=78)
        self.refused("room 78, not to 77")

    def test_other_layout_version_is_refused(self):
        tail = make_room()
        fill(tail, 9)
        tail.headers[0, 0] += 1
        self.refused("the same build")

    def test_impossible_counts_are_refused(self):
        for word, value in ((2, 3), (3, 5), (3, -1), (6, 12)):
            with self.subTest(word=word):
                tail = make_room()
                fill(tail, 9)
                tail.headers[0, word] = value
                self.refused("announced tokens")
        self.assertEqual(current().slots._holders, {})


def poll_as_rank(rank, port):
    """One of two ranks that poll the same request; rank 1 got another's rows."""
    import torch.distributed as dist

    mock.patch.stopall()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    adopt(Pool(), 4)
    fill(make_room(), 9, room=ROOM + rank)
    decode_req = received(make_req())
    polls = poll_once(decode_req, dist.group.WORLD)
    dist.destroy_process_group()
    return polls, decode_req.kv_receiver.kv_mgr.failure_records


def committed_fields():
    """What SGLang's metadata holds; only the first token and the room matter."""
    numbers = torch.zeros(16, dtype=torch.int64)
    room = torch.tensor([ROOM] + [0] * 7)
    return (*[numbers] * 13, room)


class TestInject(DraftCase):
    def setUp(self):
        super().setUp()
        self.room, self.worker = make_room(), make_worker()
        self.scheduler = SimpleNamespace(draft_worker=self.worker)

    def arrive(self, prompt, row, slot=0, salt=0, rid="d"):
        states = fill(self.room, prompt, slot=slot, salt=salt)
        req = make_req(row=row, rid=rid)
        self.commit(req, slot)
        return req, states

    def cleared(self, pool=None):
        """Token slots that are zero in every layer."""
        pool = pool or self.worker.draft_model_runner.token_to_kv_pool
        zero = [(buf == 0).flatten(1).all(1) for buf in pool.k_buffer + pool.v_buffer]
        return set(torch.nonzero(torch.stack(zero).all(0)).flatten().tolist())

    def slots(self, row, begin, end):
        table = self.worker.model_runner.req_to_token_pool.req_to_token
        return set(table[row, begin:end].tolist())

    def inject(self, *pairs):
        decode.inject_tails(self.scheduler, make_batch(*pairs))
        return self.worker.draft_model.calls

    def test_draft_kv_goes_to_the_requests_own_slots(self):
        req, states = self.arrive(9, row=2)
        ((written, slots, positions),) = self.inject((req, 9))
        torch.testing.assert_close(written, states)
        self.assertEqual(positions.tolist(), [5, 6, 7, 8])
        table = self.worker.model_runner.req_to_token_pool.req_to_token
        self.assertEqual(slots.tolist(), table[2, 5:9].tolist())
        self.assertEqual(self.worker.entered, [True])
        self.assertIsNone(req.dspark_tail)

    def test_slots_are_given_back_behind_their_copies(self):
        """No hidden state is copied on the host; the slot is free after the device's copy."""
        one, _ = self.arrive(9, row=1, slot=0)
        two, _ = self.arrive(9, row=2, slot=1)
        self.assertEqual(
            one.dspark_tail.hidden_states.data_ptr(),
            self.room.hidden_states[0].data_ptr(),
        )
        slots = current().slots
        taken = [slots.alloc() for _ in range(SLOTS)]
        for slot in taken:
            slots.free(slot)
        self.assertEqual(slots.available_size(), SLOTS - 2)
        with mock.patch.object(decode, "_copied", lambda _: "event"):
            # The second ends elsewhere and is dropped, but holds its slot no more.
            with self.assertLogs(decode.logger, "ERROR"):
                self.inject((one, 9), (two, 12))
        self.assertEqual(slots.available_size(), SLOTS)
        self.assertEqual(slots._copies, {0: "event", 1: "event"})

    def test_batch_is_one_call(self):
        """Requests with a long, a short and no tail share one write."""
        one, first = self.arrive(9, row=1, slot=0, salt=1)
        two, second = self.arrive(2, row=3, slot=1, salt=2)
        native = make_req(row=2)
        self.commit(native, 2, mode="native")
        calls = self.inject((one, 9), (native, 5), (two, 2))
        self.assertEqual(len(calls), 1)
        torch.testing.assert_close(calls[0][0], torch.cat([first, second]))
        self.assertEqual(calls[0][2].tolist(), [5, 6, 7, 8, 0, 1])

    def test_device_memory_is_bounded_in_bytes(self):
        """A call holds that many bytes of hidden states, however long a tail is."""
        token_bytes = WIDTH * 4
        arrived = [self.arrive(9, row=i, slot=i, salt=100 * i) for i in range(4)]
        expected = torch.cat([states for _, states in arrived])
        allocated = []
        empty = torch.empty

        def count(*args, **kwargs):
            allocated.append(empty(*args, **kwargs))
            return allocated[-1]

        for tokens, sizes in ((8, [8, 8]), (6, [6, 6, 4]), (3, [3] * 5 + [1])):
            for req, mine in arrived:
                req.dspark_tail = decode.Tail(5, 9, mine)
            limit = tokens * token_bytes + token_bytes // 2
            allocated.clear()
            self.worker.draft_model.calls.clear()
            with (
                self.subTest(tokens=tokens),
                mock.patch.object(decode, "MAX_BYTES_PER_CALL", limit),
                mock.patch.object(torch, "empty", count),
            ):
                calls = self.inject(*[(req, 9) for req, _ in arrived])
                self.assertEqual([len(call[0]) for call in calls], sizes)
                torch.testing.assert_close(torch.cat([c[0] for c in calls]), expected)
                positions = torch.cat([call[2] for call in calls]).tolist()
                self.assertEqual(positions, [5, 6, 7, 8] * 4)
                self.assertLessEqual(sum(t.nbytes for t in allocated), limit)

    def test_pieces_know_the_requests_last_position(self):
        """A ring keeps the entries next to it; a piece's own end would keep others."""
        states = torch.zeros(5, WIDTH)
        with mock.patch.object(decode, "MAX_BYTES_PER_CALL", 2 * states[0].nbytes):
            groups = list(decode._groups([decode._Job(0, 3, 7, states)]))
        found = [(job.start, len(job.hidden_states), job.final) for (job,) in groups]
        self.assertEqual(found, [(3, 2, 7), (5, 2, 7), (7, 1, 7)])

    def test_native_draft_kv_is_left_alone(self):
        pool = self.worker.draft_model_runner.token_to_kv_pool
        req = make_req()
        self.commit(req, mode="native")
        self.assertEqual(self.inject((req, 9)), [])
        self.assertTrue(all((buf == 9).all() for buf in pool.k_buffer + pool.v_buffer))

    def test_draft_kv_nobody_wrote_is_cleared(self):
        """A cold draft and a warm-up, on decodes with and without room for tails."""
        warm_up = make_req(row=2)
        warm_up.bootstrap_host = FAKE_BOOTSTRAP_HOST
        for room in (self.room, None):
            activate(tail=room)
            for mode, req in (("none", make_req(row=2)), ("native", warm_up)):
                with self.subTest(mode=mode, room=room is not None):
                    self.worker = make_worker()
                    self.scheduler = SimpleNamespace(draft_worker=self.worker)
                    self.commit(req, mode=mode)
                    self.assertEqual(self.inject((req, 9)), [])
                    self.assertEqual(self.cleared(), self.slots(2, 5, 9))

    def test_shared_slots_are_not_cleared(self):
        adopt(Pool(), 4, shares_slots=True)
        req = make_req(row=2)
        req.bootstrap_host = FAKE_BOOTSTRAP_HOST
        self.commit(req)
        self.inject((req, 9))
        self.assertEqual(self.cleared(), set())

    def test_resumed_request_keeps_its_draft_kv(self):
        """It is prebuilt again without a transfer; its draft KV was restored."""
        req, _ = self.arrive(9, row=2)
        self.inject((req, 9))
        self.worker.draft_model.calls.clear()
        self.assertEqual(self.inject((req, 12)), [])
        self.assertEqual(self.cleared(), set())

    def test_draft_kv_that_no_tail_covers_is_cleared(self):
        """Acceptance must not depend on who used the slots before."""
        adopt(Pool(), None)
        req, _ = self.arrive(9, row=2)
        self.inject((req, 9))
        self.assertEqual(self.cleared(), self.slots(2, 0, 5))

    def test_only_the_window_is_cleared(self):
        self.room = make_room(make_spec(tail_tokens=2, window_need=5))
        adopt(Pool(), 5)
        req, _ = self.arrive(9, row=2)
        self.inject((req, 9))
        self.assertEqual(self.cleared(), self.slots(2, 4, 7))

    def test_covered_window_clears_nothing(self):
        req, _ = self.arrive(9, row=2)
        self.inject((req, 9))
        self.assertEqual(self.cleared(), set())

    def test_incomplete_tail_is_cleared_not_read(self):
        req = make_req(row=2)
        fill(self.room, 9)
        self.room.headers[0, 2:4] = torch.tensor([9, 0])
        self.commit(req)
        self.assertEqual(self.inject((req, 9)), [])
        self.assertEqual(self.cleared(), self.slots(2, 5, 9))

    def test_a_tail_of_another_length_is_dropped(self):
        req, _ = self.arrive(9, row=2)
        with self.assertLogs(decode.logger, "ERROR"):
            self.assertEqual(self.inject((req, 10)), [])

    def test_masked_pool_gets_its_first_position(self):
        """Written for every request, also for those without a tail."""
        pool = MaskedPool()
        adopt(pool, 4)
        self.worker = make_worker(pool)
        self.scheduler = SimpleNamespace(draft_worker=self.worker)
        req, _ = self.arrive(9, row=2)
        fake = make_req(row=3)
        fake.bootstrap_host = FAKE_BOOTSTRAP_HOST
        self.commit(fake, 1)
        cold = make_req(row=1)
        self.commit(cold, 1, mode="none")
        pool.swa_valid_from[:] = 1
        self.inject((req, 9), (fake, 7), (cold, 8))
        self.assertEqual(pool.swa_valid_from.tolist(), [1, 8, 5, 7])
        self.assertTrue((pool.k_buffer[0] == 9).all())

    def test_pages_are_cleared_by_token_slot(self):
        """With SGLANG_USE_HND_KVCACHE a buffer's first axis is pages."""
        pool = Pool()
        pool.use_hnd, pool.kv_cache_layout, pool.page_size = True, "hnd", 4
        pool.k_buffer = [torch.ones(3, HEADS, 4, 2)]
        pool.v_buffer = [torch.ones(3, HEADS, 4, 3)]
        decode.zero_kv(pool, torch.tensor([1, 6, 7]))
        for buf in pool.k_buffer + pool.v_buffer:
            by_slot = buf.transpose(1, 2).flatten(0, 1)
            zero = torch.nonzero((by_slot == 0).flatten(1).all(1)).flatten()
            self.assertEqual(zero.tolist(), [1, 6, 7])

    def test_pool_without_entries_per_slot_is_named_once(self):
        pool = VectorizedPool()
        self.worker = make_worker(pool)
        self.scheduler = SimpleNamespace(draft_worker=self.worker)
        with self.assertLogs(decode.logger, "WARNING") as logs:
            for _ in range(2):
                cold = make_req()
                self.commit(cold, mode="none")
                self.inject((cold, 9))
        self.assertEqual(len(logs.output), 1)
        self.assertIn("VectorizedPool", logs.output[0])

    def test_pools_of_every_dtype_are_cleared(self):
        """index_fill_ does not know all of them."""
        for dtype in (
            torch.uint8,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.float16,
            torch.bfloat16,
            torch.float32,
        ):
            pool = Pool()
            pool.k_buffer = [torch.ones(8, HEADS, 2).to(dtype)]
            pool.v_buffer = [torch.ones(8, HEADS, 3).to(dtype)]
            decode.zero_kv(pool, torch.tensor([1, 6]))
            with self.subTest(dtype):
                for buf in pool.k_buffer + pool.v_buffer:
                    zero = (buf.float() == 0).flatten(1).all(1)
                    self.assertEqual(torch.nonzero(zero).flatten().tolist(), [1, 6])
                    kept = (buf.float() == 1).flatten(1).all(1)
                    self.assertEqual(int(kept.sum()), 6)

    def test_both_pools_of_a_hybrid_are_cleared(self):
        """A sliding layer's slot is another one, or none any more."""
        pool = SimpleNamespace(full_kv_pool=Pool(), swa_kv_pool=Pool())
        mapping = torch.tensor([0, 5, -1])
        pool.translate_loc_from_full_to_swa = lambda slots: mapping[slots]
        self.assertTrue(decode.is_clearable(pool))
        decode.zero_kv(pool, torch.tensor([1, 2]))
        self.assertEqual(self.cleared(pool.full_kv_pool), {1, 2})
        self.assertEqual(self.cleared(pool.swa_kv_pool), {0, 5})
        pool.swa_kv_pool = VectorizedPool()
        self.assertFalse(decode.is_clearable(pool))

    def test_warm_up_writes_padding_slots_only(self):
        """At start, so that names, shapes and dtypes are proved and kernels compiled."""
        table = self.worker.model_runner.req_to_token_pool.req_to_token
        table[0] = 0
        decode.warm_up(self.worker, make_spec(tail_tokens=0, window_need=4))
        ((written, slots, positions),) = self.worker.draft_model.calls
        self.assertEqual(tuple(written.shape), (4, WIDTH))
        self.assertEqual(set(slots.tolist()), {0})
        self.assertEqual(positions.tolist(), [0, 1, 2, 3])
        self.worker.draft_model.calls.clear()
        decode.warm_up(self.worker, make_spec(tail_tokens=0, window_need=None))
        self.assertEqual(len(self.worker.draft_model.calls[0][0]), 8)

    def test_prebuilt_batch_is_injected(self):
        """After the slots are final and before the batch can be merged and run."""
        order = []
        batch = SimpleNamespace(
            is_empty=lambda: False,
            process_prebuilt=lambda _: order.append("prebuilt"),
        )
        scheduler = mock.MagicMock()
        scheduler._get_new_prebuilt_batch.return_value = batch
        mixin = decode_module.SchedulerDisaggregationDecodeMixin
        inject = lambda *_: order.append("inject")  # noqa: E731
        with mock.patch.object(decode, "inject_tails", inject):
            mixin.get_new_prebuilt_batch(scheduler, None)
        self.assertEqual(order, ["prebuilt", "inject"])


class TestRetraction(CustomTestCase):
    """Draft KV moves with the request, whatever its new slots held."""

    def setUp(self):
        self.addCleanup(deactivate)
        table = torch.arange(SLOTS * 16).view(SLOTS, 16)
        self.table = SimpleNamespace(req_to_token=table)
        self.pool = Pool()
        for i, buf in enumerate([*self.pool.k_buffer, *self.pool.v_buffer]):
            buf.copy_((torch.arange(POOL) + 100 * i)[:, None, None].expand_as(buf))
        self.req = SimpleNamespace(
            seqlen=10, kv=SimpleNamespace(req_pool_idx=1, retraction_backup=None)
        )

    def retract_and_resume(self, backend="cpu_tensor"):
        self.req.offload_kv_cache = self.req.load_kv_cache = lambda *_: None
        tree = mock.MagicMock()
        no_rebootstrap = mock.patch.object(
            mem_cache_common, "dsv4_needs_rebootstrap", lambda _: False
        )
        with no_rebootstrap:
            mem_cache_common.backup_kv_cache(self.req, tree, self.table, None, backend)
        before = [buf[16:32].clone() for buf in self.pool.k_buffer + self.pool.v_buffer]
        for buf in self.pool.k_buffer + self.pool.v_buffer:
            buf.fill_(-1)
        self.req.kv.req_pool_idx = 2
        mem_cache_common.restore_kv_cache(self.req, tree, self.table, None, backend)
        after = [buf[32:48] for buf in self.pool.k_buffer + self.pool.v_buffer]
        return before, after

    def test_host_pool_makes_no_second_copy(self):
        """Decode's default on CUDA backs up the draft's pool with the target's."""
        adopt(self.pool, None)
        self.pool.get_cpu_copy = mock.Mock(side_effect=AssertionError)
        _, after = self.retract_and_resume("host_pool")
        self.assertTrue(all((buf == -1).all() for buf in after))

    def test_cpu_backup_saves_draft_kv(self):
        adopt(self.pool, None)
        before, after = self.retract_and_resume()
        for mine, theirs in zip(before, after, strict=True):
            torch.testing.assert_close(mine[:9], theirs[:9])
            self.assertTrue((theirs[9:] == -1).all())

    def test_restore_writes_draft_kv(self):
        """A sliding draft needs its window only."""
        adopt(self.pool, 4)
        before, after = self.retract_and_resume()
        for mine, theirs in zip(before, after, strict=True):
            torch.testing.assert_close(mine[5:9], theirs[5:9])
            self.assertTrue((theirs[:5] == -1).all())
        self.assertIsNone(self.req.dspark_draft_backup)

    def test_other_engines_save_nothing(self):
        deactivate()
        _, after = self.retract_and_resume()
        self.assertTrue(all((buf == -1).all() for buf in after))


if __name__ == "__main__":
    unittest.main()
