"""The tail of hidden states: what prefill writes, sends and decode finds.

Two buffers stand for the two engines, and a memmove over their addresses stands for
the transfer, so strides, order and lengths are those of the real send.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.disaggregation.agreement.decode_side import PrefillPeer
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import admission
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.nixl.conn import GUARD, NixlKVManager
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails
from sglang.srt.speculative.dspark_components.dspark_handoff import (
    HandoffConfigError,
    TailSpec,
    activate,
    current,
    deactivate,
)
from sglang.srt.speculative.dspark_components.handoff_refusals import HEADER_BYTES
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=17, suite="base-a-test-cpu")

HIDDEN, LAYERS, SLOTS = 4, (0, 1, 2), 4
WIDTH = HIDDEN * len(LAYERS)


def make_spec(tail_tokens=8, layer_ids=LAYERS, need=None) -> TailSpec:
    return TailSpec(
        layer_ids=layer_ids,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        tail_tokens=tail_tokens,
        window_need=tail_tokens if need is None else need,
    )


def make_buffers() -> MetadataBuffers:
    return tails.TailMetadataBuffers.of(
        MetadataBuffers(
            SLOTS,
            hidden_size=16,
            hidden_states_dtype=torch.float32,
            max_sampling_mask_tokens=8,
        )
    )


def make_req(prompt_tokens, row=0, rid="a", room=77, slot=1):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=list(range(prompt_tokens)),
        metadata_buffer_index=slot,
        bootstrap_room=room,
        kv=SimpleNamespace(req_pool_idx=row, holds_kv=True),
    )


def make_batch(*parts):
    """An extend batch of (request, first position, tokens)."""
    reqs, begins, extents = zip(*parts, strict=True)
    return SimpleNamespace(
        reqs=list(reqs), prefix_lens=list(begins), extend_lens=list(extents)
    )


def states_of(position, tokens, salt=0):
    """Hidden states that name their position, ``[tokens, WIDTH]``."""
    positions = torch.arange(position, position + tokens, dtype=torch.float32)
    return (positions * 100 + salt)[:, None] + torch.arange(WIDTH)


def manager_of(cls=SimpleNamespace):
    """A KV manager with SGLang's buffers; the tail's memory is not one of them."""
    pointers, lengths, item_lengths = make_buffers().get_buf_infos()
    manager = object.__new__(cls) if cls is not SimpleNamespace else cls()
    manager.kv_args = SimpleNamespace(
        aux_data_ptrs=pointers, aux_data_lens=lengths, aux_item_lens=item_lengths
    )
    return manager


def states_in(tail, row):
    header = tail.header(row)
    return header, tail.hidden_states[row, : header.count]


class Agent:
    """NIXL's agent: what was registered, and what a transfer is made of."""

    def __init__(self):
        self.registered = []

    def register_memory(self, regions, kind):
        self.registered += [(*region[:2], kind) for region in regions]

    def get_xfer_descs(self, blocks, _kind):
        return blocks

    def initialize_xfer(self, _verb, sources, targets, _peer):
        return sources, targets


def drafting(*shape, **more):
    """What making room reads of a decode's draft."""
    return SimpleNamespace(shape=make_spec(*shape, **more))


class TailCase(CustomTestCase):
    def setUp(self):
        self.addCleanup(deactivate)
        deactivate()

    def prefill(self, spec=None):
        spec = spec or make_spec()
        tail = tails.TailBuffer(spec, SLOTS)
        activate(spec=spec, tail=tail)
        return tail

    def registration(self, tail, peer="d"):
        """What a decode with these rows sends first; ``None`` for one without."""
        frames = [b"None", b"127.0.0.1", b"1", peer.encode()] + [b""] * 20
        if tail is None:
            return frames
        tails.announce_room(tail, frames)
        return frames

    def announce(self, peer, tail):
        """Register a decode with prefill."""
        return tails.read_layout(SimpleNamespace(), self.registration(tail, peer))


def receiver_of(mode, tail_tokens=8):
    """A receiver for a prefill that describes itself like that."""
    described = {"mode": mode, "dspark": {"tail_tokens": tail_tokens}}
    manager = SimpleNamespace(
        prefill_peers={"p:1": PrefillPeer(description=described if mode else None)}
    )
    return SimpleNamespace(kv_mgr=manager, bootstrap_addr="p:1")


class TestMemory(TailCase):
    """How much host memory a tail takes, and what happens when there is no more."""

    # target: layers of the draft, hidden size, tokens; default requests of a dense prefill
    SHAPES = {
        "Qwen3-8B": (5, 4096, 127, 4096),
        "Llama-3-70B": (5, 8192, 127, 2048),
        "DeepSeek-V4-Flash": (3, 4096, 128, 256),
    }

    def spec_of(self, name):
        layers, hidden, tokens, _ = self.SHAPES[name]
        return TailSpec(
            layer_ids=tuple(range(layers)),
            hidden_size=hidden,
            dtype=torch.bfloat16,
            tail_tokens=tokens,
            window_need=tokens,
        )

    def test_default_flags_stay_within_half_a_gigabyte(self):
        """Before, two slots for each request were pinned, rounded to a power of two."""
        before, now = {}, {}
        for name, (*_, requests) in self.SHAPES.items():
            spec = self.spec_of(name)
            activate(spec=spec)
            rows = tails.bound_requests(requests) + 1
            now[name] = round(rows * spec.slot_bytes / (1 << 20))
            asked = 2 * requests * spec.slot_bytes
            before[name] = (1 << (asked - 1).bit_length()) >> 20
        self.assertEqual(
            now, {"Qwen3-8B": 511, "Llama-3-70B": 506, "DeepSeek-V4-Flash": 510}
        )
        self.assertEqual(
            before,
            {"Qwen3-8B": 65536, "Llama-3-70B": 65536, "DeepSeek-V4-Flash": 2048},
        )

    def test_the_scheduler_runs_no_more_requests_than_rows(self):
        """4,096 slots are 2,048 requests, and there are rows for 102 of them."""
        model = SimpleNamespace(
            model_config=SimpleNamespace(context_len=4096),
            mambaish_config=None,
            attn_dp_size=1,
        )
        resolve = functools.partial(KVCacheConfigurator.resolve_max_num_reqs, model)
        schedule = SimpleNamespace(max_running_requests=2048)
        module = "sglang.srt.mem_cache.kv_cache_configurator.get_schedule"
        with mock.patch(module, lambda: schedule):
            self.assertEqual(resolve(1 << 20), 2048)
            activate(spec=self.spec_of("Qwen3-8B"))
            self.assertEqual(resolve(1 << 20), 102)
            schedule.max_running_requests = 16
            self.assertEqual(resolve(1 << 20), 16)

    def allocate(self, rows, total, **parallel):
        defaults = dict(tp_size=1, pp_size=1, nnodes=1)
        memory = SimpleNamespace(total=total)
        with (
            mock.patch(
                "sglang.srt.runtime_context.get_parallel",
                lambda: SimpleNamespace(**{**defaults, **parallel}),
            ),
            mock.patch("psutil.virtual_memory", lambda: memory),
        ):
            return tails.TailBuffer.allocate(make_spec(), rows)

    def test_all_ranks_of_a_host_count(self):
        spec, rows = make_spec(), 4
        wanted = rows * spec.slot_bytes
        cases = (
            (1, {}),
            (4, {"tp_size": 4}),
            # Of a pipeline one stage has rows.
            (4, {"tp_size": 4, "pp_size": 2}),
            (2, {"tp_size": 4, "nnodes": 2}),
            (4, {"tp_size": 4, "pp_size": 2, "nnodes": 2}),
        )
        for ranks, parallel in cases:
            with self.subTest(parallel):
                with self.assertLogs(tails.logger, "INFO") as logs:
                    self.allocate(rows, 2 * ranks * wanted, **parallel)
                self.assertIn("for this rank, and 0 MiB for all ranks", logs.output[0])
                with self.assertRaisesRegex(HandoffConfigError, "--max-running"):
                    self.allocate(rows, 2 * ranks * wanted - 2, **parallel)

    def test_pages_are_locked_as_they_are_where_there_is_cuda(self):
        """Pinned memory of torch's allocator would be rounded up to a power of two."""
        asked = []
        cudart = SimpleNamespace(
            cudaHostRegister=lambda *region: asked.append(region) or self.error
        )
        with (
            mock.patch("torch.cuda.is_available", lambda: True),
            mock.patch("torch.cuda.cudart", lambda: cudart),
        ):
            self.error = 0
            tail = tails.TailBuffer(make_spec(), 3)
            region = (tail.storage.data_ptr(), 3 * make_spec().slot_bytes, 0)
            self.assertEqual(asked, [region])
            self.error = 2
            with self.assertRaisesRegex(HandoffConfigError, "ulimit -l"):
                tails.TailBuffer(make_spec(), 3)

    def test_a_row_has_a_header_and_hidden_states(self):
        spec = make_spec(tail_tokens=5)
        self.assertEqual(spec.slot_bytes, HEADER_BYTES + 5 * WIDTH * 4)
        tail = tails.TailBuffer(spec, SLOTS)
        self.assertEqual(tuple(tail.hidden_states.shape), (SLOTS, 5, WIDTH))
        tail.hidden_states[1, 0, 0] = 3.0
        self.assertEqual(tail.header(1), None)

    def test_decode_makes_room_when_it_first_meets_a_tail(self):
        """For what its draft reads, and for what prefill sends if that is more."""
        for tokens, room in ((8, 8), (3, 8), (20, 20)):
            with self.subTest(tokens=tokens):
                deactivate()
                activate(draft=drafting(0, need=8))
                activate(slots=tails.TailSlots(SLOTS))
                receiver = receiver_of("tail", tokens)
                receiver.kv_mgr.agent = Agent()
                with self.one_rank():
                    tail = tails.make_room(receiver)
                    self.assertIs(tails.make_room(receiver), tail)
                self.assertIs(current().tail, tail)
                shape = (SLOTS, room, WIDTH)
                self.assertEqual(tuple(tail.hidden_states.shape), shape)
                region = (tail.storage.data_ptr(), tail.storage.nbytes, "DRAM")
                self.assertEqual(receiver.kv_mgr.agent.registered, [region])

    def one_rank(self):
        parallel = SimpleNamespace(tp_size=1, pp_size=1, nnodes=1)
        return mock.patch("sglang.srt.runtime_context.get_parallel", lambda: parallel)

    def test_decode_makes_no_room_for_other_prefills(self):
        activate(draft=drafting(0), slots=tails.TailSlots(SLOTS))
        for mode in ("native", "none", None):
            self.assertIsNone(tails.make_room(receiver_of(mode)))
            self.assertIsNone(current().tail)

    def test_decode_without_memory_lets_prefill_refuse(self):
        activate(draft=drafting(0), slots=tails.TailSlots(SLOTS))
        nothing = SimpleNamespace(total=0)
        message = [b"x"]
        with (
            self.one_rank(),
            mock.patch("psutil.virtual_memory", lambda: nothing),
            self.assertLogs(tails.logger, "ERROR") as logs,
        ):
            tails.announce_room(tails.make_room(receiver_of("tail")), message)
        self.assertEqual(message, [b"x"])
        self.assertIn("cannot make room", logs.output[0])

    def test_mooncake_registers_with_its_engine(self):
        tail = tails.TailBuffer(make_spec(), SLOTS)
        engine = mock.Mock()
        tail.register(SimpleNamespace(engine=engine))
        engine.batch_register.assert_called_once_with(
            [tail.storage.data_ptr()], [tail.storage.nbytes]
        )


class TestSlots(CustomTestCase):
    """A metadata slot of decode is taken until its tail was read."""

    def setUp(self):
        self.slots = tails.TailSlots(2)
        self.slot, self.req = self.slots.alloc(), make_req(3)
        self.slots.hold(self.slot, self.req)
        self.slots.free(self.slot)

    def test_a_held_slot_is_not_given_to_another_request(self):
        self.assertEqual(self.slots.available_size(), 1)
        self.assertEqual(self.slots.alloc(), 1)
        self.slots.give_back([self.slot], None)
        self.assertEqual(self.slots.alloc(), self.slot)

    def test_the_next_owner_waits_for_the_copy(self):
        copied = mock.Mock()
        self.slots.give_back([self.slot], copied)
        self.slots.alloc()
        copied.synchronize.assert_not_called()
        self.assertEqual(self.slots.alloc(), self.slot)
        copied.synchronize.assert_called_once()

    def test_a_request_that_is_gone_holds_nothing(self):
        """Aborted between its transfer and its first batch."""
        self.req.kv.holds_kv = False
        self.assertEqual(self.slots.available_size(), 2)
        self.slots.give_back([self.slot], None)
        self.assertEqual(self.slots.available_size(), 2)

    def test_other_slots_are_freed_as_before(self):
        self.slots.free(self.slots.alloc())
        self.assertEqual(self.slots.available_size(), 1)


class TestMetadataBuffers(TailCase):
    def test_clear_slot_clears_the_header(self):
        """The next owner of decode's slot must not inherit one."""
        tail = self.prefill()
        req = make_req(3)
        tail.take(make_batch((req, 0, 3)), states_of(0, 3))
        tail.finish(req)
        self.assertEqual(tail.header(0).count, 3)
        make_buffers().clear_slot(0)
        self.assertIsNone(tail.header(0))
        deactivate()
        make_buffers().clear_slot(0)

    def test_peers_see_sglangs_buffers(self):
        """They are paired by position; the tail's memory is announced apart."""
        plain = MetadataBuffers(
            SLOTS,
            hidden_size=16,
            hidden_states_dtype=torch.float32,
            max_sampling_mask_tokens=8,
        )
        mine = tails.TailMetadataBuffers.of(plain)
        self.assertIsInstance(mine, MetadataBuffers)
        self.assertEqual(mine.get_buf_infos(), plain.get_buf_infos())
        plain.output_ids[2, 0] = 7
        self.assertEqual(int(mine.get_buf(2)[0][0]), 7)


class TestPrefillSide(TailCase):
    def run_chunks(self, tail, prompt, chunks, begin=0):
        req = make_req(prompt)
        for extent in chunks:
            hidden = states_of(begin, extent)
            tail.take(make_batch((req, begin, extent)), hidden)
            begin += extent
        tail.finish(req)
        return states_in(tail, 0)

    def test_tail_of_every_chunking(self):
        """The tail may straddle chunks, and a prompt may be shorter than it."""
        cases = {
            "one chunk": (20, [20]),
            "straddles two": (20, [15, 5]),
            "straddles many": (20, [10, 3, 3, 3, 1]),
            "last chunk is the tail": (20, [12, 8]),
            "one token chunks": (9, [1] * 9),
            "shorter than the tail": (5, [5]),
            "as long as the tail": (8, [8]),
            "one token": (1, [1]),
        }
        for name, (prompt, chunks) in cases.items():
            with self.subTest(name):
                tail = self.prefill()
                header, states = self.run_chunks(tail, prompt, chunks)
                count = min(prompt, 8)
                self.assertEqual((header.start, header.count), (prompt - count, count))
                self.assertEqual(header.prompt_tokens, prompt)
                self.assertEqual(header.room, 77)
                torch.testing.assert_close(states, states_of(prompt - count, count))

    def test_cached_prefix_before_the_tail(self):
        tail = self.prefill()
        header, states = self.run_chunks(tail, 20, [8], begin=12)
        self.assertEqual(header.count, 8)
        torch.testing.assert_close(states, states_of(12, 8))

    def test_gap_sends_an_empty_tail(self):
        """Hidden states not computed for this request must never be announced."""
        for begin, chunks in ((14, [6]), (0, [13])):
            with self.subTest(begin=begin):
                tail = self.prefill()
                with self.assertLogs(tails.logger, "ERROR"):
                    header, states = self.run_chunks(tail, 20, chunks, begin)
                self.assertEqual((header.start, header.count), (20, 0))
                self.assertEqual(states.shape[0], 0)
                self.assertEqual(tail.num_incomplete, 1)

    def test_row_of_an_aborted_request_is_reused(self):
        """The next owner is shorter: what lies behind its own belongs to the other."""
        tail = self.prefill()
        gone = make_req(20, rid="gone")
        tail.take(make_batch((gone, 0, 16)), states_of(0, 16, salt=7))
        kept = make_req(3, rid="kept", room=78)
        tail.take(make_batch((kept, 0, 3)), states_of(0, 3))
        tail.finish(kept)
        header, states = states_in(tail, 0)
        self.assertEqual((header.count, header.room), (3, 78))
        torch.testing.assert_close(states, states_of(0, 3))

    def test_retry_recomputes_its_tail(self):
        """A retry with its first run in the prefix cache takes the tail again."""
        tail = self.prefill()
        req = make_req(20)
        tail.take(make_batch((req, 0, 20)), states_of(0, 20, salt=5))
        tail.take(make_batch((req, 12, 8)), states_of(12, 8))
        tail.finish(req)
        torch.testing.assert_close(states_in(tail, 0)[1], states_of(12, 8))

    def test_batch_of_mixed_requests(self):
        tail = self.prefill()
        long, short = make_req(20, row=1, rid="l"), make_req(3, row=2, rid="s")
        hidden = torch.cat(
            [states_of(10, 10, 1), states_of(0, 3, 3), states_of(0, 5, 9)]
        )
        tail.take(make_batch((long, 10, 10), (short, 0, 3)), hidden)
        for req, salt in ((long, 1), (short, 3)):
            tail.finish(req)
            header, states = states_in(tail, req.kv.req_pool_idx)
            expected = states_of(header.start, header.count, salt)
            torch.testing.assert_close(states, expected)

    def test_dropped_layer_is_refused(self):
        tail = self.prefill()
        with self.assertRaisesRegex(RuntimeError, r"expected at least 3 tokens of 12"):
            tail.take(make_batch((make_req(3), 0, 3)), torch.zeros(3, WIDTH - HIDDEN))

    def test_room_keeps_64_bits(self):
        tail = self.prefill()
        req = make_req(2, room=(1 << 64) - 5)
        tail.take(make_batch((req, 0, 2)), states_of(0, 2))
        tail.finish(req)
        header = tail.header(0)
        self.assertTrue(tails.same_room(header, (1 << 64) - 5))
        self.assertFalse(tails.same_room(header, 77))

    def test_set_buf_writes_header(self):
        """Every backend and every retry writes its metadata through this method."""
        tail = self.prefill()
        req = make_req(3)
        tail.take(make_batch((req, 0, 3)), states_of(0, 3))
        for field in ("cached_tokens", "cached_tokens_device", "cached_tokens_host"):
            setattr(req, field, 0)
        req.cached_tokens_storage, req.output_ids = 0, [5]
        req.get_mm_token_counts = lambda: (0, 0, 0)
        req.return_logprob = req.return_sampling_mask = False
        req.hidden_states_tensor = None
        make_buffers().set_buf(req)
        self.assertEqual(tail.header(0).count, 3)

    def test_worker_takes_hidden_states(self):
        """The forward's hidden states end here: none travels on with the result."""
        tail = self.prefill()
        req = make_req(3)
        output = SimpleNamespace(
            hidden_states=states_of(0, 3), hidden_states_token_indices=None
        )
        worker = object.__new__(TpModelWorker)
        worker.pp_group = SimpleNamespace(is_last_rank=True)
        worker.is_dllm = lambda: False
        worker.set_hicache_consumer = lambda _: None
        worker._model_runner = SimpleNamespace(
            forward=lambda *_, **__: SimpleNamespace(
                logits_output=output,
                can_run_graph=False,
                expert_distribution_metrics=None,
                routed_experts_output=None,
                indexer_topk_output=None,
            )
        )
        batch = make_batch((req, 0, 3))
        batch.hicache_consumer_index = 0
        module = "sglang.srt.managers.tp_worker."
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        with (
            mock.patch(module + "ForwardBatch.init_new"),
            mock.patch(module + "get_exec", lambda: SimpleNamespace(features=features)),
            mock.patch(module + "capture_pre_sample_logits"),
        ):
            worker.forward_batch_generation(batch, is_verify=True)
        self.assertIsNone(output.hidden_states)
        tail.finish(req)
        torch.testing.assert_close(states_in(tail, 0)[1], states_of(0, 3))

    def test_ranks_of_dp_attention(self):
        """An idle rank runs dummy tokens for nobody; padding follows real tokens."""
        tail = self.prefill()
        idle = SimpleNamespace(reqs=[], prefix_lens=None, extend_lens=None)
        for dummy_tokens in (0, 5):
            output = SimpleNamespace(hidden_states=states_of(0, dummy_tokens))
            tails.take_hidden_states(idle, output)
            self.assertIsNone(output.hidden_states)
        self.assertEqual(tail.storage.count_nonzero(), 0)
        req = make_req(3)
        padded = torch.cat([states_of(0, 3), states_of(90, 5)])
        output = SimpleNamespace(hidden_states=padded)
        tails.take_hidden_states(make_batch((req, 0, 3)), output)
        tail.finish(req)
        torch.testing.assert_close(states_in(tail, 0)[1], states_of(0, 3))

    def test_other_engines_keep_their_hidden_states(self):
        output = SimpleNamespace(hidden_states=states_of(0, 3))
        tails.take_hidden_states(make_batch((make_req(3), 0, 3)), output)
        self.assertIsNotNone(output.hidden_states)
        activate(tail=tails.TailBuffer(make_spec(), SLOTS))
        tails.take_hidden_states(make_batch((make_req(3), 0, 3)), output)
        self.assertIsNotNone(output.hidden_states)

    def test_prefix_match_is_capped(self):
        """Cached tokens produce no hidden states, so the tail may not be matched."""
        req = object.__new__(Req)
        req.dllm_config, req.return_logprob = None, False
        req.logprob_start_len, req.is_dllm = -1, lambda: False
        self.assertEqual(req._compute_max_prefix_len(20), 19)
        self.prefill(make_spec(tail_tokens=8))
        self.assertEqual(req._compute_max_prefix_len(20), 12)
        self.assertEqual(req._compute_max_prefix_len(8), 0)
        self.assertEqual(req._compute_max_prefix_len(3), 0)

    def test_stage_without_a_tail_caps_alike(self):
        """All pipeline stages must agree on what is computed."""
        activate(spec=make_spec(tail_tokens=8))
        self.assertEqual(tails.cap_prefix_match(19, 20), 12)

    def test_decode_is_not_capped(self):
        activate(tail=tails.TailBuffer(make_spec(), SLOTS))
        self.assertEqual(tails.cap_prefix_match(19, 20), 19)


class TestWire(TailCase):
    """One finished request of ``prompt`` tokens is sent from slot 1 to slot 2."""

    def finished(self, prompt, spec=None):
        tail = self.prefill(spec)
        req = make_req(prompt, row=3, slot=1)
        tail.take(make_batch((req, 0, prompt)), states_of(0, prompt))
        tail.finish(req)
        return tail

    def nixl_blocks(self, peer="d"):
        manager = manager_of(NixlKVManager)
        manager.agent = Agent()
        manager._post_xfer = lambda *_: None
        pointers = make_buffers().get_buf_infos()[0]
        sources, targets = manager.send_aux(peer, 1, pointers, 2)
        return [(s[0], t[0], s[1]) for s, t in zip(sources, targets, strict=True)]

    def mooncake_blocks(self, peer="d"):
        manager = manager_of(MooncakeKVManager)
        manager.enable_custom_mem_pool = False
        manager._transfer_data = lambda _session, blocks: blocks
        req = SimpleNamespace(mooncake_session_id=peer, dst_aux_index=2)
        return manager.send_aux(req, 1, make_buffers().get_buf_infos()[0])

    def check_existing_part(self, blocks_of):
        for prompt, room in ((3, 8), (8, 8), (20, 8), (20, 11)):
            with self.subTest(prompt=prompt, room=room):
                self.finished(prompt)
                receiver = tails.TailBuffer(make_spec(tail_tokens=room), SLOTS)
                self.announce("d", receiver)
                *others, block = blocks_of()
                count = min(prompt, 8)
                self.assertEqual(block[2], HEADER_BYTES + count * WIDTH * 4)
                self.assertEqual(len(others), len(make_buffers().get_buf_infos()[0]))
                move([block])
                header, states = states_in(receiver, 2)
                self.assertEqual(header.count, count)
                torch.testing.assert_close(states, states_of(prompt - count, count))
                for slot in (0, 1, 3):
                    self.assertIsNone(receiver.header(slot))

    def test_nixl_sends_the_existing_part(self):
        self.check_existing_part(self.nixl_blocks)

    def test_mooncake_sends_the_existing_part(self):
        self.check_existing_part(self.mooncake_blocks)

    def test_what_does_not_fit_is_never_written(self):
        """Too little room or other layers: an error with both values, no write."""
        others = {
            "tail length": make_spec(tail_tokens=7),
            "layers": make_spec(layer_ids=(0, 1, 3)),
        }
        for name, other in others.items():
            own = make_spec()
            message = (
                f"sends {own.slot_bytes} .*{own.fingerprint:x}.*"
                f"expects at most {other.slot_bytes} .*{other.fingerprint:x}"
            )
            with self.subTest(name, backend="nixl"):
                self.finished(20)
                self.announce("d", tails.TailBuffer(other, SLOTS))
                with self.assertRaisesRegex(RuntimeError, message):
                    self.nixl_blocks()
            with self.subTest(name, backend="mooncake"):
                with self.assertLogs(tails.logger, "ERROR") as logs:
                    self.assertEqual(self.mooncake_blocks(), -1)
                self.assertRegex(logs.output[0], message)

    def test_nothing_is_written_for_an_unknown_decode(self):
        self.finished(20)
        with self.assertRaisesRegex(RuntimeError, "announced no memory"):
            self.nixl_blocks()

    def test_mooncake_thread_survives_what_does_not_fit(self):
        """A status fails the room; an exception would end the thread for all rooms."""
        self.finished(20)
        self.announce("d", tails.TailBuffer(make_spec(tail_tokens=7), SLOTS))
        manager = manager_of(MooncakeKVManager)
        concluded = []
        run_one_chunk(manager, make_buffers().get_buf_infos()[0], concluded)
        (outcome,) = concluded
        self.assertEqual(outcome["bootstrap_room"], 77)
        self.assertEqual(outcome["status"], KVPoll.Failed)
        self.assertIn("aux data", outcome["failure_reason"])

    def test_decode_without_memory_for_a_tail_is_refused(self):
        """Its draft would start without context; a stage without a tail refuses too."""
        self.finished(20)
        self.assertIn("announced no memory", self.announce("d", None))
        activate(tail=None)
        self.assertIn("announced no memory", self.announce("d", None))

    def test_a_prefill_that_does_not_capture_refuses_no_decode(self):
        for receiver in (None, tails.TailBuffer(make_spec(), SLOTS)):
            self.assertIsNone(self.announce("d", receiver))

    def test_prefill_registers_its_rows_before_the_first_transfer(self):
        tail = self.finished(20)
        manager = SimpleNamespace(agent=Agent())
        for peer in ("d", "e"):
            frames = self.registration(tails.TailBuffer(make_spec(), SLOTS), peer)
            self.assertIsNone(tails.read_layout(manager, frames))
        region = (tail.storage.data_ptr(), tail.storage.nbytes, "DRAM")
        self.assertEqual(manager.agent.registered, [region])

    def test_stage_before_the_last_leaves_the_tail_alone(self):
        """All stages write the same slot; only the last one owns a tail."""
        activate(spec=make_spec())
        self.announce("d", tails.TailBuffer(make_spec(), SLOTS))
        for blocks_of in (self.nixl_blocks, self.mooncake_blocks):
            self.assertEqual(len(blocks_of()), len(make_buffers().get_buf_infos()[0]))

    def test_registration_carries_layout(self):
        """The memory is registered before the message that names what is registered."""
        tail = tails.TailBuffer(make_spec(), SLOTS)
        activate(tail=tail, draft=drafting())
        sent = []
        handle = object.__new__(CommonKVReceiver)
        handle.bootstrap_infos = [{"rank_ip": "127.0.0.1"}]
        vars(handle).update(vars(receiver_of("tail")))
        handle.kv_mgr.agent = Agent()

        def build():
            self.assertEqual(len(handle.kv_mgr.agent.registered), 1)
            return [b"x"] * 25

        handle.kv_mgr.build_receiver_registration_message = build
        handle._send_bootstrap_message = lambda *, message, **_: (
            sent.append(message) or True
        )
        self.assertTrue(handle._register_kv_args())
        frames = [b"None", b"127.0.0.1", b"1", b"d", *sent[0][4:]]
        self.assertIsNone(tails.read_layout(None, frames))
        spec = make_spec()
        layout = (tail.storage.data_ptr(), spec.slot_bytes, spec.fingerprint)
        self.assertEqual(current().peers["d"], layout)

    def test_admission_has_registrations_read(self):
        """The frame is gone, and the layout known, before SGLang sees a registration."""
        self.finished(20)
        tails.read_registrations()
        tails.read_registrations()
        self.assertEqual(admission.registration_readers.count(tails.read_layout), 1)
        for guard in ([], [GUARD]):
            current().peers.clear()
            handler = admission.PrefillAdmission(SimpleNamespace())
            receiver = tails.TailBuffer(make_spec(), SLOTS)
            frames = [*guard, *self.registration(receiver)]
            with mock.patch.object(
                admission, "registration_readers", [tails.read_layout]
            ):
                self.assertTrue(handler.admits(frames))
                self.assertFalse(any(f.startswith(tails.FRAME_MAGIC) for f in frames))
                self.assertEqual(
                    current().peers["d"].slot_bytes, make_spec().slot_bytes
                )
                self.assertFalse(handler.admits(self.registration(None)))
            self.assertNotIn("d", current().peers)

    def test_malformed_frame_is_refused(self):
        for words in (b"1,x", b"1,2", b""):
            frames = [*self.registration(None), tails.FRAME_MAGIC + words]
            with self.subTest(words):
                self.assertIn("cannot be read", tails.read_layout(None, frames))
                self.assertNotIn("d", current().peers)

    def test_layout_is_found_behind_few_frames(self):
        """A release with fewer frames of its own must not lose the layout."""
        for own in (4, 5, 19, 20, 24):
            frames = self.registration(tails.TailBuffer(make_spec(), SLOTS))
            frames = frames[:own] + frames[-1:]
            current().peers.clear()
            with self.subTest(own=own):
                self.assertIsNone(tails.read_layout(None, frames))
                self.assertEqual(
                    current().peers["d"].slot_bytes, make_spec().slot_bytes
                )

    def test_live_peers_are_not_forgotten(self):
        """However many register after it, a decode keeps its tail."""
        tail = tails.TailBuffer(make_spec(), SLOTS)
        for number in range(5000):
            self.announce(f"d{number}", tail)
        self.assertIn("d0", current().peers)


class Stop(BaseException):
    """Ends an endless receive loop; nothing that guards a thread may swallow it."""


def run_one_chunk(manager, peer_pointers, concluded):
    """A Mooncake transfer thread's loop over one last chunk, to slot 2 of decode "d"."""
    target = SimpleNamespace(
        requires_dcp_relayout=False, dst_aux_ptrs=peer_pointers, dst_state_data_ptrs=[]
    )
    request = SimpleNamespace(
        room=77, is_dummy=False, mooncake_session_id="d", dst_aux_index=2,
        dst_kv_indices=[], dst_device_kv_indices=None, endpoint="127.0.0.1",
        dst_port=1, required_dst_info_num=1, dst_state_indices=[],
    )  # fmt: skip
    chunk = SimpleNamespace(
        room=77, prefill_aux_index=1, is_last_chunk=True, index_slice=slice(0, 0),
        prefill_kv_indices=[], state_indices=None, trace_ctx=None,
        staging_counted=False, wait_event=None, indices_event=None,
    )  # fmt: skip
    manager.__dict__.update(
        session_lock=threading.Lock(), state_layout_rejections={},
        failed_sessions=set(), failed_session_probes={}, enable_staging=False,
        enable_trace=False, enable_deferred_decode_kv_release=False,
        enable_custom_mem_pool=False, request_status={77: KVPoll.Transferring},
        transfer_infos={77: {"d": request}}, decode_kv_args_table={"d": target},
        _staging_outstanding={77: 0}, req_to_decode_prefix_len={}, bootstrap_port=1,
    )  # fmt: skip
    manager._get_dsa_cache_transfer_skip_flags = lambda _: (True, True)
    manager._poison_unsettled_send = manager.poison_deferred_ack_room = lambda _: None
    manager.conclude_transfer = lambda **outcome: concluded.append(outcome)
    queue = mock.Mock()
    queue.get.side_effect = [chunk, Stop]
    with contextlib.suppress(Stop):
        manager.transfer_worker(queue, mock.Mock())


def move(blocks):
    for source, target, length in blocks:
        ctypes.memmove(int(target), int(source), int(length))


if __name__ == "__main__":
    unittest.main()
