"""The tail of hidden states as metadata: what prefill writes, sends and decode finds.

Two sets of metadata buffers stand for the two engines, and a memmove over their
registered addresses stands for the transfer, so strides, order and lengths are those
of the real send.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import threading
import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import admission
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.nixl.conn import GUARD, NixlKVManager
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails
from sglang.srt.speculative.dspark_components.dspark_handoff import (
    TailSpec,
    activate,
    current,
    deactivate,
)
from sglang.srt.speculative.dspark_components.handoff_refusals import HEADER_BYTES
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

HIDDEN, LAYERS, SLOTS = 4, (0, 1, 2), 4
WIDTH = HIDDEN * len(LAYERS)


def make_spec(tail_tokens=8, layer_ids=LAYERS) -> TailSpec:
    return TailSpec(
        layer_ids=layer_ids,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        tail_tokens=tail_tokens,
        window_need=tail_tokens,
    )


def make_buffers(spec=None, **options) -> MetadataBuffers:
    buffers = MetadataBuffers(
        SLOTS,
        hidden_size=16,
        hidden_states_dtype=torch.float32,
        max_sampling_mask_tokens=8,
        **options,
    )
    if spec is None:
        return buffers
    return tails.TailMetadataBuffers.of(buffers, tails.TailBuffer(spec, SLOTS))


def make_req(prompt_tokens, slot=0, rid="a", room=77):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=list(range(prompt_tokens)),
        metadata_buffer_index=slot,
        bootstrap_room=room,
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


def manager_of(buffers, cls=SimpleNamespace):
    pointers, lengths, item_lengths = buffers.get_buf_infos()
    manager = object.__new__(cls) if cls is not SimpleNamespace else cls()
    manager.kv_args = SimpleNamespace(
        aux_data_ptrs=pointers, aux_data_lens=lengths, aux_item_lens=item_lengths
    )
    return manager


class TailCase(CustomTestCase):
    def setUp(self):
        self.addCleanup(deactivate)
        deactivate()

    def prefill(self, spec=None, **options):
        spec = spec or make_spec()
        buffers = make_buffers(spec, **options)
        activate(tail=buffers.tail, cap_tokens=spec.tail_tokens)
        return buffers

    def registration(self, buffers, peer="d"):
        """What a decode with these buffers sends first."""
        frames = [b"None", b"127.0.0.1", b"1", peer.encode()] + [b""] * 20
        here = current()
        activate(tail=tails.tail_of(buffers), cap_tokens=0)
        tails.append_tail_frame(manager_of(buffers), frames)
        activate(tail=here.tail, cap_tokens=here.cap_tokens)
        return frames

    def announce(self, peer, buffers):
        """Register a decode with prefill."""
        return tails.read_layout(None, self.registration(buffers, peer))


class TestMetadataBuffers(TailCase):
    def test_tail_is_last(self):
        """Peers pair buffers by position: all others must keep theirs."""
        for checksum in (False, True):
            with self.subTest(checksum=checksum):
                plain = make_buffers(kv_checksum_enabled=checksum)
                spec = make_spec()
                mine = make_buffers(spec, kv_checksum_enabled=checksum)
                _, plain_lengths, plain_items = plain.get_buf_infos()
                pointers, lengths, items = mine.get_buf_infos()
                self.assertEqual(lengths[:-1], plain_lengths)
                self.assertEqual(items[:-1], plain_items)
                self.assertEqual(items[-1], spec.slot_bytes)
                self.assertEqual(pointers[-1], mine.tail.storage.data_ptr())

    def test_slot_holds_header_and_hidden_states(self):
        spec = make_spec(tail_tokens=5)
        self.assertEqual(spec.slot_bytes, HEADER_BYTES + 5 * WIDTH * 4)
        tail = tails.TailBuffer(spec, SLOTS)
        self.assertEqual(tuple(tail.hidden_states.shape), (SLOTS, 5, WIDTH))
        tail.hidden_states[1, 0, 0] = 3.0
        self.assertEqual(tail.header(1), None)

    def test_clear_slot_clears_header(self):
        """The next owner of a slot must not inherit a header."""
        buffers = self.prefill()
        req = make_req(3)
        buffers.tail.take(make_batch((req, 0, 3)), states_of(0, 3))
        buffers.tail.finish(req)
        self.assertEqual(buffers.tail.header(0).count, 3)
        buffers.clear_slot(0)
        self.assertIsNone(buffers.tail.header(0))

    def test_scheduler_gets_its_tail(self):
        """Both roles have it before anything is registered with the transfer."""
        source = inspect.getsource(inspect.unwrap(Scheduler.init_disaggregation))
        place = 0
        for queue in ("DecodeTransferQueue(", "PrefillBootstrapQueue("):
            built = source.index(".disagg_metadata_buffers = MetadataBuffers(", place)
            attached = source.index(".disagg_metadata_buffers = with_tail(", built)
            place = source.index(queue, built)
            self.assertLess(attached, place)
            self.assertNotIn("disagg_metadata_buffers.", source[built:attached])

    def test_everything_else_is_upstreams(self):
        """Slots are written and read through the methods that upstream has."""
        plain = make_buffers()
        mine = tails.TailMetadataBuffers.of(plain, tails.TailBuffer(make_spec(), SLOTS))
        self.assertIsInstance(mine, MetadataBuffers)
        plain.output_ids[2, 0] = 7
        self.assertEqual(int(mine.get_buf(2)[0][0]), 7)
        self.assertIsNone(tails.tail_of(plain))


class TestPrefillSide(TailCase):
    def read(self, buffers, slot):
        header = buffers.tail.header(slot)
        return header, buffers.tail.read(slot, header)

    def run_chunks(self, buffers, prompt, chunks, begin=0):
        req = make_req(prompt)
        for extent in chunks:
            hidden = states_of(begin, extent)
            buffers.tail.take(make_batch((req, begin, extent)), hidden)
            begin += extent
        buffers.tail.finish(req)
        return self.read(buffers, 0)

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
                buffers = self.prefill()
                header, states = self.run_chunks(buffers, prompt, chunks)
                count = min(prompt, 8)
                self.assertEqual((header.start, header.count), (prompt - count, count))
                self.assertEqual(header.prompt_tokens, prompt)
                self.assertEqual(header.room, 77)
                torch.testing.assert_close(states, states_of(prompt - count, count))

    def test_cached_prefix_before_the_tail(self):
        buffers = self.prefill()
        header, states = self.run_chunks(buffers, 20, [8], begin=12)
        self.assertEqual(header.count, 8)
        torch.testing.assert_close(states, states_of(12, 8))

    def test_gap_sends_an_empty_tail(self):
        """Hidden states not computed for this request must never be announced."""
        for begin, chunks in ((14, [6]), (0, [13])):
            with self.subTest(begin=begin):
                buffers = self.prefill()
                with self.assertLogs(tails.logger, "ERROR"):
                    header, states = self.run_chunks(buffers, 20, chunks, begin)
                self.assertEqual((header.start, header.count), (20, 0))
                self.assertEqual(states.shape[0], 0)
                self.assertEqual(buffers.tail.num_incomplete, 1)

    def test_slot_of_an_aborted_request_is_reused(self):
        """The next owner is shorter: what lies behind its own belongs to the other."""
        buffers = self.prefill()
        gone = make_req(20, rid="gone")
        buffers.tail.take(make_batch((gone, 0, 16)), states_of(0, 16, salt=7))
        kept = make_req(3, rid="kept", room=78)
        buffers.tail.take(make_batch((kept, 0, 3)), states_of(0, 3))
        buffers.tail.finish(kept)
        header, states = self.read(buffers, 0)
        self.assertEqual((header.count, header.room), (3, 78))
        torch.testing.assert_close(states, states_of(0, 3))

    def test_retry_recomputes_its_tail(self):
        """A retry with its first run in the prefix cache takes the tail again."""
        buffers = self.prefill()
        req = make_req(20)
        buffers.tail.take(make_batch((req, 0, 20)), states_of(0, 20, salt=5))
        buffers.tail.take(make_batch((req, 12, 8)), states_of(12, 8))
        buffers.tail.finish(req)
        torch.testing.assert_close(self.read(buffers, 0)[1], states_of(12, 8))

    def test_batch_of_mixed_requests(self):
        buffers = self.prefill()
        long, short = make_req(20, slot=1, rid="l"), make_req(3, slot=2, rid="s")
        other = make_req(30, slot=-1, rid="no slot")
        hidden = torch.cat(
            [
                states_of(10, 10, 1),
                states_of(0, 30, 2),
                states_of(0, 3, 3),
                states_of(0, 5, 9),
            ]
        )
        batch = make_batch((long, 10, 10), (other, 0, 30), (short, 0, 3))
        buffers.tail.take(batch, hidden)
        for req, salt in ((long, 1), (short, 3)):
            buffers.tail.finish(req)
            header, states = self.read(buffers, req.metadata_buffer_index)
            expected = states_of(header.start, header.count, salt)
            torch.testing.assert_close(states, expected)

    def test_dropped_layer_is_refused(self):
        buffers = self.prefill()
        with self.assertRaisesRegex(RuntimeError, r"expected at least 3 tokens of 12"):
            buffers.tail.take(
                make_batch((make_req(3), 0, 3)), torch.zeros(3, WIDTH - HIDDEN)
            )

    def test_room_keeps_64_bits(self):
        buffers = self.prefill()
        req = make_req(2, room=(1 << 64) - 5)
        buffers.tail.take(make_batch((req, 0, 2)), states_of(0, 2))
        buffers.tail.finish(req)
        header = buffers.tail.header(0)
        self.assertTrue(tails.same_room(header, (1 << 64) - 5))
        self.assertFalse(tails.same_room(header, 77))

    def test_set_buf_writes_header(self):
        """Every backend and every retry writes its metadata through this method."""
        buffers = self.prefill()
        req = make_req(3)
        buffers.tail.take(make_batch((req, 0, 3)), states_of(0, 3))
        for field in ("cached_tokens", "cached_tokens_device", "cached_tokens_host"):
            setattr(req, field, 0)
        req.cached_tokens_storage, req.output_ids = 0, [5]
        req.get_mm_token_counts = lambda: (0, 0, 0)
        req.return_logprob = req.return_sampling_mask = False
        req.hidden_states_tensor = None
        buffers.set_buf(req)
        self.assertEqual(buffers.tail.header(0).count, 3)

    def test_worker_takes_hidden_states(self):
        """The forward's hidden states end here: none travels on with the result."""
        buffers = self.prefill()
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
        buffers.tail.finish(req)
        torch.testing.assert_close(self.read(buffers, 0)[1], states_of(0, 3))

    def test_ranks_of_dp_attention(self):
        """An idle rank runs dummy tokens for nobody; padding follows real tokens."""
        buffers = self.prefill()
        idle = SimpleNamespace(reqs=[], prefix_lens=None, extend_lens=None)
        for dummy_tokens in (0, 5):
            output = SimpleNamespace(hidden_states=states_of(0, dummy_tokens))
            tails.take_hidden_states(idle, output)
            self.assertIsNone(output.hidden_states)
        self.assertEqual(buffers.tail.storage.count_nonzero(), 0)
        req = make_req(3)
        padded = torch.cat([states_of(0, 3), states_of(90, 5)])
        output = SimpleNamespace(hidden_states=padded)
        tails.take_hidden_states(make_batch((req, 0, 3)), output)
        buffers.tail.finish(req)
        torch.testing.assert_close(self.read(buffers, 0)[1], states_of(0, 3))

    def test_other_engines_keep_their_hidden_states(self):
        output = SimpleNamespace(hidden_states=states_of(0, 3))
        tails.take_hidden_states(make_batch((make_req(3), 0, 3)), output)
        self.assertIsNotNone(output.hidden_states)
        decode = make_buffers(make_spec())
        activate(tail=decode.tail)
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
        activate(cap_tokens=8)
        self.assertEqual(tails.cap_prefix_match(19, 20), 12)

    def test_decode_is_not_capped(self):
        activate(tail=make_buffers(make_spec()).tail)
        self.assertEqual(tails.cap_prefix_match(19, 20), 19)


class FakeAgent:
    def get_xfer_descs(self, blocks, _kind):
        return blocks

    def initialize_xfer(self, _verb, sources, targets, _peer):
        return sources, targets


class TestWire(TailCase):
    """One finished request of ``prompt`` tokens is sent from slot 1 to slot 2."""

    def finished(self, prompt, spec=None):
        buffers = self.prefill(spec)
        req = make_req(prompt, slot=1)
        buffers.tail.take(make_batch((req, 0, prompt)), states_of(0, prompt))
        buffers.tail.finish(req)
        return buffers

    def nixl_blocks(self, buffers, peer_buffers, peer="d"):
        manager = manager_of(buffers, NixlKVManager)
        manager.agent = FakeAgent()
        manager._post_xfer = lambda *_: None
        pointers = peer_buffers.get_buf_infos()[0]
        sources, targets = manager.send_aux(peer, 1, pointers, 2)
        return [(s[0], t[0], s[1]) for s, t in zip(sources, targets, strict=True)]

    def mooncake_blocks(self, buffers, peer_buffers, peer="d"):
        manager = manager_of(buffers, MooncakeKVManager)
        manager.enable_custom_mem_pool = False
        manager._transfer_data = lambda _session, blocks: blocks
        req = SimpleNamespace(mooncake_session_id=peer, dst_aux_index=2)
        return manager.send_aux(req, 1, peer_buffers.get_buf_infos()[0])

    def check_existing_part(self, blocks_of):
        for prompt in (3, 8, 20):
            with self.subTest(prompt=prompt):
                sender, receiver = self.finished(prompt), make_buffers(make_spec())
                self.announce("d", receiver)
                blocks = blocks_of(sender, receiver)
                count = min(prompt, 8)
                self.assertEqual(blocks[-1][2], HEADER_BYTES + count * WIDTH * 4)
                self.assertEqual(len(blocks), len(sender.get_buf_infos()[0]))
                move(blocks)
                header = receiver.tail.header(2)
                self.assertEqual(header.count, count)
                states = receiver.tail.read(2, header)
                torch.testing.assert_close(states, states_of(prompt - count, count))
                for slot in (0, 1, 3):
                    self.assertIsNone(receiver.tail.header(slot))

    def test_nixl_sends_the_existing_part(self):
        self.check_existing_part(self.nixl_blocks)

    def test_mooncake_sends_the_existing_part(self):
        self.check_existing_part(self.mooncake_blocks)

    def test_other_layouts_are_never_written(self):
        """Another tail length or other layers: an error with both values, no write."""
        others = {
            "tail length": make_spec(tail_tokens=9),
            "layers": make_spec(layer_ids=(0, 1, 3)),
        }
        for name, other in others.items():
            message = f"sends .*{make_spec().slot_bytes}.*expects .*{other.slot_bytes}"
            with self.subTest(name, backend="nixl"):
                sender, receiver = self.finished(20), make_buffers(other)
                self.announce("d", receiver)
                with self.assertRaisesRegex(RuntimeError, message):
                    self.nixl_blocks(sender, receiver)
            with self.subTest(name, backend="mooncake"):
                with self.assertLogs(tails.logger, "ERROR") as logs:
                    self.assertEqual(self.mooncake_blocks(sender, receiver), -1)
                self.assertRegex(logs.output[0], message)

    def test_mooncake_thread_survives_another_layout(self):
        """A status fails the room; an exception would end the thread for all rooms."""
        sender, receiver = self.finished(20), make_buffers(make_spec(tail_tokens=9))
        self.announce("d", receiver)
        manager = manager_of(sender, MooncakeKVManager)
        concluded = []
        run_one_chunk(manager, receiver.get_buf_infos()[0], concluded)
        (outcome,) = concluded
        self.assertEqual(outcome["bootstrap_room"], 77)
        self.assertEqual(outcome["status"], KVPoll.Failed)
        self.assertIn("aux data", outcome["failure_reason"])

    def test_decode_without_a_place_for_a_tail_is_refused(self):
        """Its draft would start without context; a stage without a tail refuses too."""
        self.finished(20)
        self.assertIn("announced no place", self.announce("d", make_buffers()))
        activate(tail=None)
        self.assertIn("announced no place", self.announce("d", make_buffers()))

    def test_a_prefill_that_does_not_capture_refuses_no_decode(self):
        """A native prefill serves decodes with and without a tail."""
        for receiver in (make_buffers(), make_buffers(make_spec())):
            self.assertIsNone(self.announce("d", receiver))

    def test_buffer_in_another_place_is_never_written(self):
        """With a checksum on one engine only, the tail's place is another buffer."""
        sender = self.finished(20)
        receiver = make_buffers(make_spec(), kv_checksum_enabled=True)
        self.announce("d", receiver)
        with self.assertRaisesRegex(RuntimeError, "disagree on the tail"):
            self.nixl_blocks(sender, receiver)

    def test_stage_before_the_last_leaves_the_tail_alone(self):
        """All stages write the same slot; only the last one owns a tail."""
        receiver = make_buffers(make_spec())
        stage = make_buffers()
        activate(cap_tokens=8)
        self.announce("d", receiver)
        for blocks_of in (self.nixl_blocks, self.mooncake_blocks):
            blocks = blocks_of(stage, receiver)
            self.assertEqual(len(blocks), len(stage.get_buf_infos()[0]))
            move(blocks)
            self.assertIsNone(receiver.tail.header(2))

    def test_mismatched_stride_would_hit_another_slot(self):
        """Why the layout is announced: the sender's stride misses the slot."""
        sender, receiver = self.finished(20), make_buffers(make_spec(tail_tokens=4))
        stride = sender.get_buf_infos()[2][-1]
        target = receiver.get_buf_infos()[0][-1] + 2 * stride
        own = receiver.tail.storage
        hit = (target - own.data_ptr()) // own.stride(0)
        self.assertNotEqual(hit, 2)

    def test_registration_carries_layout(self):
        receiver = make_buffers(make_spec())
        activate(tail=receiver.tail)
        sent = []
        handle = object.__new__(CommonKVReceiver)
        handle.bootstrap_infos = [{"rank_ip": "127.0.0.1"}]
        handle.kv_mgr = manager_of(receiver)
        handle.kv_mgr.build_receiver_registration_message = lambda: [b"x"] * 25
        handle._send_bootstrap_message = lambda *, message, **_: (
            sent.append(message) or True
        )
        self.assertTrue(handle._register_kv_args())
        self.assertIsNone(tails.read_layout(None, self.addressed(sent[0])))
        index = len(receiver.get_buf_infos()[0]) - 1
        layout = (index, make_spec().slot_bytes, make_spec().fingerprint)
        self.assertEqual(current().peers["d"], layout)

    def addressed(self, frames):
        return [b"None", b"127.0.0.1", b"1", b"d", *frames[4:]]

    def test_default_decode_sends_upstreams_message(self):
        message = [b"x"] * 25
        tails.append_tail_frame(manager_of(make_buffers()), message)
        self.assertEqual(len(message), 25)

    def test_admission_has_registrations_read(self):
        """The frame is gone, and the layout known, before upstream sees a registration."""
        self.finished(20)
        tails.read_registrations()
        tails.read_registrations()
        self.assertEqual(admission.registration_readers.count(tails.read_layout), 1)
        for guard in ([], [GUARD]):
            current().peers.clear()
            handler = admission.PrefillAdmission(SimpleNamespace())
            frames = [*guard, *self.registration(make_buffers(make_spec()))]
            with mock.patch.object(
                admission, "registration_readers", [tails.read_layout]
            ):
                self.assertTrue(handler.admits(frames))
                self.assertFalse(any(f.startswith(tails.FRAME_MAGIC) for f in frames))
                self.assertEqual(
                    current().peers["d"].slot_bytes, make_spec().slot_bytes
                )
                self.assertFalse(handler.admits(self.registration(make_buffers())))
            self.assertNotIn("d", current().peers)

    def test_malformed_frame_is_refused(self):
        for words in (b"1,x", b"1,2", b""):
            frames = [*self.registration(make_buffers()), tails.FRAME_MAGIC + words]
            with self.subTest(words):
                self.assertIn("cannot be read", tails.read_layout(None, frames))
                self.assertNotIn("d", current().peers)

    def test_layout_is_found_behind_few_frames(self):
        """A release with fewer frames of its own must not lose the layout."""
        for own in (4, 5, 19, 20, 24):
            frames = self.registration(make_buffers(make_spec()))
            frames = frames[:own] + frames[-1:]
            current().peers.clear()
            with self.subTest(own=own):
                self.assertIsNone(tails.read_layout(None, frames))
                self.assertEqual(
                    current().peers["d"].slot_bytes, make_spec().slot_bytes
                )

    def test_live_peers_are_not_forgotten(self):
        """However many register after it, a decode keeps its tail."""
        for number in range(5000):
            self.announce(f"d{number}", make_buffers(make_spec()))
        self.assertIn("d0", current().peers)

    def test_count_is_explained(self):
        """A stage without a tail is no misconfiguration; a checksum still is one."""
        manager = manager_of(make_buffers(), CommonKVManager)
        self.announce("d", make_buffers(make_spec()))
        remote = len(make_buffers(make_spec()).get_buf_infos()[0])
        logger = "sglang.srt.disaggregation.common.conn"
        with self.assertNoLogs(logger, "ERROR"):
            manager.check_peer_aux_buffer_count("d", remote)
        with self.assertLogs(logger, "ERROR"):
            manager.check_peer_aux_buffer_count("d", remote + 1)


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
