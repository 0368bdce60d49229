"""A message that does not fit fails its own room, on both engines, with the reason.

Contract: rooms of a refused or half-registered decode fail on prefill, and decode learns
why; rooms of other decodes are served; a room that decode gave up before prefill had its
request fails as soon as the request arrives; a decode that prefill does not know
registers again; decode hears why prefill refused or failed a room.
"""

from __future__ import annotations

import inspect
import random
import threading
import unittest
from http import HTTPStatus
from types import SimpleNamespace
from unittest import mock

from kv_managers import (
    ThreadCase,
    close,
    ended,
    mooncake_decode,
    mooncake_metadata,
    mooncake_prefill,
    mooncake_registration,
    nixl_decode,
    nixl_metadata,
    nixl_prefill,
    nixl_registration,
    open_sender,
    patch_existing,
    wait_for,
)

from sglang.srt.disaggregation import prefill
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common import admission, conn, control_threads
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.common.control_threads import GuardedSocket
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import (
    FAKE_BOOTSTRAP_HOST,
    DisaggregationMode,
    prepare_abort,
)
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=16, suite="base-a-test-cpu")

FAILED = str(int(KVPoll.Failed)).encode()
FRAMES = 3000


class Made(Exception):
    """The constructor of a manager came as far as its socket."""


class _Ones:
    """Arguments of an engine: each is 1, or what a test needs."""

    def __init__(self, **known):
        self.__dict__.update(known)

    def __getattr__(self, name):
        return 1


class TestGuardSocket(CustomTestCase):
    def test_managers_make_a_guarded_socket(self):
        """SGLang's constructor, up to the line behind the socket."""
        args = KVArgs()
        args.__dict__.update(kv_item_lens=[], state_item_lens=[], engine_rank=0)
        args.__dict__.update(kv_cache_dtype_str="auto", kv_layout=None, pp_rank=0)
        args.__dict__.update(system_dp_rank=0, is_hybrid_mla_backend=False)
        manager = object.__new__(CommonKVManager)
        known = _Ones(dist_init_addr=None, enable_kv_cache_sharding=False)
        with (
            patch_existing(
                conn,
                get_serving=lambda: _Ones(host="127.0.0.1"),
                get_disagg=lambda: _Ones(),
                get_parallel=lambda: known,
                get_local_ip_auto=lambda: "127.0.0.1",
                get_attention_dp_size=lambda: 1,
                get_attention_dp_rank=lambda: 0,
                linear_attn_tp_size=lambda: 1,
                get_dsv41_spec_layout=lambda _: None,
            ),
            mock.patch.object(conn.logger, "debug", side_effect=Made),
            self.assertRaises(Made),
        ):
            CommonKVManager.__init__(
                manager, args, DisaggregationMode.PREFILL, _Ones(), False
            )
        self.addCleanup(manager._zmq_ctx.destroy, linger=0)
        self.assertIsInstance(manager.server_socket, GuardedSocket)


class TestNixlPrefill(ThreadCase):
    def setUp(self):
        manager = nixl_prefill()
        self.start(manager, manager._start_bootstrap_thread)

    def register(self, agent="decode-a", pointers=0):
        self.wire.send(*nixl_registration(self.wire.port, agent, pointers))

    def metadata(self, room, agent="decode-a"):
        self.wire.send(*nixl_metadata(room, self.wire.port, agent))

    def read_registrations(self, reader):
        patch = mock.patch.object(admission, "registration_readers", [reader])
        patch.start()
        self.addCleanup(patch.stop)

    def test_an_unregistered_decode_gets_an_answer_at_once(self):
        open_sender(self.manager, 1)
        self.metadata(1, "decode-unknown")
        self.assertTrue(self.fails(1, "[PD-NOT-REGISTERED] decode decode-unknown"))
        told = self.wire.answer()
        self.assertEqual(told[:3], [b"KV_STATUS", b"1", FAILED])
        self.assertIn(b"[PD-NOT-REGISTERED]", told[4])
        self.assertNotIn(1, self.manager.transfer_infos)

    def test_a_registration_that_raises_is_undone_and_fails_its_rooms(self):
        """SGLang's own error: fewer regions on decode than on prefill."""
        self.manager.kv_args.kv_item_lens = [8] * 4
        open_sender(self.manager, 1)
        self.register("decode-bad", 2)
        self.metadata(1, "decode-bad")
        self.assertTrue(
            self.fails(1, "[PD-REGISTRATION]", "decode registered fewer KV regions")
        )
        self.assertIn(b"fewer KV regions", self.wire.answer()[4])
        self.assertEqual(self.manager.decode_kv_args_table, {}, "half-made peer left")
        self.assertEqual(self.manager.agent.peers, [])
        self.manager.kv_args.kv_item_lens = []
        open_sender(self.manager, 2)
        self.register("decode-bad")
        self.metadata(2, "decode-bad")
        self.assertTrue(self.is_ready(2), "it may register again")

    def test_a_reader_refuses_a_decode_and_no_other(self):
        self.read_registrations(
            lambda manager, message: "[PD-X] no" if b"decode-bad" in message else None
        )
        for room in (1, 2):
            open_sender(self.manager, room)
        self.register("decode-bad")
        self.register("decode-good")
        self.metadata(1, "decode-bad")
        self.metadata(2, "decode-good")
        self.assertTrue(self.fails(1, "[PD-X] no"))
        self.assertIn(b"[PD-X] no", self.wire.answer()[4])
        self.assertTrue(self.is_ready(2))
        self.assertEqual(list(self.manager.decode_kv_args_table), ["decode-good"])

    def test_a_reader_takes_its_frame_off_the_message(self):
        seen = []

        def read(manager, message):
            seen.append((manager, message.pop()))

        self.read_registrations(read)
        open_sender(self.manager, 1)
        frames = nixl_registration(self.wire.port)
        with mock.patch.object(self.manager, "_add_remote_peer") as add:
            self.wire.send(*frames, b"a trailing frame")
            self.wire.send(b"ABORT", b"1")
            self.assertTrue(self.fails(1))
        self.assertEqual(seen, [(self.manager, b"a trailing frame")])
        self.assertEqual(add.call_count, 1)

    def test_a_reader_that_raises_fails_the_rooms_of_its_decode(self):
        self.read_registrations(mock.Mock(side_effect=ValueError("no layout")))
        open_sender(self.manager, 1)
        self.register()
        self.metadata(1)
        self.assertTrue(self.fails(1, "[PD-REGISTRATION]", "no layout"))

    def test_decode_that_refuses_a_room_fails_it_with_its_reason(self):
        for room in (1, 2):
            open_sender(self.manager, room)
        with self.assertLogs(admission.logger, "ERROR") as logs:
            for room in (b"1", b"2"):
                self.wire.send(admission.ROOM_REFUSED, room, b"[PD-Y] because")
            self.assertTrue(self.fails(1, "refused by decode: [PD-Y] because"))
            self.assertTrue(self.fails(2))
        self.assertEqual(len(logs.output), 1)

    def test_messages_of_another_kind_or_backend_are_sglangs_to_judge(self):
        guarded = [b"MoriMsgGuard", *nixl_metadata(1, 1, "a Mori decode")[1:]]
        for frames in ([b"WATERMARK", b"1"], [b"STAGING_RSP", b"1"], guarded):
            with self.subTest(frames[0]):
                self.assertTrue(self.manager.admission.admits(frames))
        self.assertEqual(self.manager.request_status, {})

    def test_hostile_frames_cost_only_themselves(self):
        """Frames of every kind, most of them almost right."""
        dice = random.Random(7)
        self.register("decode-good")
        with mock.patch.object(control_threads.logger, "error"):
            for number in range(FRAMES):
                self.wire.send(*damaged(dice, self.decode_message(dice, number)))
            # Numbers of rooms above those of the frames.
            open_sender(self.manager, 10**7)
            self.register("decode-new")
            self.metadata(10**7, "decode-new")
            self.assertTrue(self.is_ready(10**7))
        open_sender(self.manager, 10**8)
        self.metadata(10**8, "decode-good")
        self.assertTrue(self.is_ready(10**8), "a good decode lost its registration")
        self.assertEqual(ended, [])

    def decode_message(self, dice, number):
        room, port = dice.randrange(10**6), dice.randrange(1, 65536)
        name = f"decode-{number}"
        return dice.choice(
            [
                nixl_registration(port, name, dice.randrange(4)),
                nixl_metadata(room, port, dice.choice([name, "decode-good"])),
                [b"ABORT", str(room).encode()],
                [admission.ROOM_REFUSED, str(room).encode(), dice.randbytes(40)],
                [admission.ROOM_ENDED, str(room).encode(), dice.randbytes(40)],
                garbage(dice),
            ]
        )


def garbage(dice):
    return [dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(1, 30))]


def damaged(dice, frames):
    """One or two frames are others, and some at the end may be missing."""
    for _ in range(dice.randrange(3)):
        index = dice.randrange(len(frames))
        frames[index] = dice.choice([b"", dice.randbytes(9), frames[index][:-1]])
    return frames if dice.random() < 0.8 else frames[: dice.randrange(len(frames)) + 1]


class TestMooncakePrefill(ThreadCase):
    def setUp(self):
        manager = mooncake_prefill()
        self.start(manager, manager.start_prefill_thread)

    def test_a_registered_decode_is_served_and_another_is_told_why_not(self):
        for room in (1, 2):
            open_sender(self.manager, room)
        self.wire.send(*mooncake_metadata(1, self.wire.port, "unknown:1"))
        self.wire.send(*mooncake_registration(self.wire.port, "good:1"))
        self.wire.send(*mooncake_metadata(2, self.wire.port, "good:1"))
        self.assertTrue(self.fails(1, "[PD-NOT-REGISTERED]"))
        self.assertTrue(self.is_ready(2))
        told = self.wire.answer()
        self.assertEqual(told[:2], [b"1", FAILED])
        self.assertIn(b"[PD-NOT-REGISTERED]", told[3])

    def test_a_registration_that_raises_fails_its_rooms(self):
        open_sender(self.manager, 1)
        frames = mooncake_registration(self.wire.port, "bad:1")
        frames[7] = b"no rank"
        self.wire.send(*frames)
        self.wire.send(*mooncake_metadata(1, self.wire.port, "bad:1"))
        self.assertTrue(self.fails(1, "[PD-REGISTRATION]"))


class TestEarlyRooms(ThreadCase):
    """What decode says about a room before its request is here."""

    def setUp(self):
        manager = nixl_prefill()
        self.start(manager, manager._start_bootstrap_thread)

    def settle(self):
        """Wait until the bootstrap thread has worked on all messages sent so far."""
        open_sender(self.manager, 999)
        self.wire.send(b"ABORT", b"999")
        self.assertTrue(self.fails(999))

    def test_an_abort_before_the_request_fails_it(self):
        self.wire.send(b"ABORT", b"7")
        self.settle()
        sender = open_sender(self.manager, 7)
        self.assertEqual(sender.poll(), KVPoll.Failed)
        self.assertIn("Aborted by decode", self.manager.failure_records[7])

    def test_a_refusal_before_the_request_fails_it(self):
        self.wire.send(*nixl_metadata(5, self.wire.port, "decode-unknown"))
        self.wire.send(admission.ROOM_REFUSED, b"6", b"[PD-Y] because")
        self.settle()
        for room, reason in ((5, "[PD-NOT-REGISTERED]"), (6, "[PD-Y] because")):
            open_sender(self.manager, room)
            self.assertTrue(self.fails(room, reason))

    def test_an_abort_after_the_request_does_not_hit_the_next_of_its_number(self):
        open_sender(self.manager, 7).clear()
        self.wire.send(b"ABORT", b"7")
        self.settle()
        self.assertEqual(open_sender(self.manager, 7).poll(), KVPoll.Bootstrapping)

    def test_a_verdict_counts_for_one_request_and_for_a_limited_time(self):
        for age_s, polled in ((300, KVPoll.Failed), (-1, KVPoll.Bootstrapping)):
            self.manager.bootstrap_timeout = age_s
            self.manager.admission.fail_room(age_s + 10, "why")
            sender = open_sender(self.manager, age_s + 10)
            with self.subTest(age_s):
                self.assertEqual(sender.kv_mgr.request_status[age_s + 10], polled)
            sender.clear()
            open_sender(self.manager, age_s + 10)
            self.assertEqual(
                self.manager.request_status[age_s + 10], KVPoll.Bootstrapping
            )

    def test_rooms_that_never_come_are_forgotten(self):
        door = self.manager.admission
        with mock.patch.object(admission, "_MAX_ROOMS", 10):
            for room in range(100):
                door.fail_room(room, "why")
        for room, polled in ((0, KVPoll.Bootstrapping), (99, KVPoll.Failed)):
            open_sender(self.manager, room)
            self.assertEqual(self.manager.request_status[room], polled)

    def test_a_request_that_comes_while_its_verdict_is_kept_fails(self):
        """The control thread and the scheduler meet at a room."""
        real, manager = self.manager.admission.lock, self.manager

        class Opening:
            def __enter__(self):
                manager.admission.lock = real
                open_sender(manager, 7)
                return real.__enter__()

            def __exit__(self, *args):
                real.__exit__(*args)

        manager.admission.lock = Opening()
        manager.admission.fail_room(7, "why")
        self.assertTrue(self.fails(7, "why"))


def request(room=5, message=None, status=400, host="127.0.0.1"):
    """A request at an engine's intake, refused there if it has a message."""
    reason = message and FINISH_ABORT(message, HTTPStatus(status))
    return SimpleNamespace(
        bootstrap_room=room, bootstrap_host=host, finished_reason=reason
    )


class TestEndedRooms(ThreadCase):
    """What decode hears of rooms that prefill refuses or fails."""

    def setUp(self):
        manager = nixl_prefill()
        self.start(manager, manager._start_bootstrap_thread)
        self.wire.send(*nixl_registration(self.wire.port))

    def ask(self, room):
        self.wire.send(*nixl_metadata(room, self.wire.port))

    def refuse(self, room, message, **options):
        """SGLang's intake, on a queue that refuses."""
        scheduler = SimpleNamespace(retire_unadmitted_request=mock.Mock())
        queue = object.__new__(PrefillBootstrapQueue)
        queue.__dict__.update(kv_manager=self.manager, scheduler=scheduler, queue=[])
        queue.create_sender = lambda req, heads: False
        with patch_existing(prefill, is_unadmitted_reject=lambda req: False):
            queue.add(request(room, message, **options), 1)

    def answers(self, room, *texts):
        told = self.wire.answer()
        self.assertEqual(told[:3], [b"KV_STATUS", str(room).encode(), FAILED])
        for text in texts:
            self.assertIn(text, told[4].decode())

    def test_decode_hears_of_a_request_that_prefill_refuses(self):
        """Before it asks, and after; also a second time, as other ranks ask."""
        self.refuse(1, "too long")
        for _ in range(2):
            self.ask(1)
            self.answers(1, "refused by prefill: [PD-BAD-REQUEST] too long")
        self.ask(2)
        self.assertTrue(wait_for(lambda: 2 in self.manager.transfer_infos))
        self.refuse(2, "no memory", status=503)
        self.answers(2, "refused by prefill: no memory")

    def test_decode_hears_of_a_request_that_prefill_fails(self):
        """One that waited too long, and one that was aborted."""
        late, gone = open_sender(self.manager, 1), open_sender(self.manager, 2)
        late.init_time = 1.0
        self.assertEqual(late.poll(), KVPoll.Failed)
        self.ask(1)
        self.answers(1, "timed out")
        self.ask(2)
        self.assertTrue(self.is_ready(2))
        gone.abort()
        gone.clear()
        self.answers(2, "Aborted by AbortReq.")

    def test_decode_is_not_told_while_its_kv_may_be_written(self):
        """It would give the memory to another request; its timeout is what remains."""
        with mock.patch.object(admission, "end_room") as end:
            open_sender(self.manager, 1)
            self.manager.update_status(1, KVPoll.Transferring)
            self.manager.update_status(1, KVPoll.Failed)
            self.assertEqual(end.call_count, 0)
            del self.manager.agent  # another backend, which does not mark such rooms
            open_sender(self.manager, 2)
            self.manager.update_status(2, KVPoll.WaitingForInput)
            for waits in (False, True):
                self.manager.enable_deferred_decode_kv_release = waits
                admission.announce_failure(self.manager, 2)
                self.assertEqual(end.call_count, int(waits))

    def test_decode_that_gave_a_room_up_hears_nothing(self):
        for room in (1, 2):
            open_sender(self.manager, room)
            self.ask(room)
            self.assertTrue(self.is_ready(room))
        self.wire.send(b"ABORT", b"1")
        self.assertTrue(self.fails(1))
        self.manager.update_status(2, KVPoll.Failed)
        self.answers(2)

    def test_a_later_room_of_the_same_number_is_served(self):
        self.refuse(1, "too long")
        self.assertTrue(wait_for(lambda: 1 in self.manager.admission.ended))
        open_sender(self.manager, 1)
        self.ask(1)
        self.assertTrue(self.is_ready(1))
        self.manager.bootstrap_timeout = -1
        self.refuse(2, "too long")
        self.ask(2)
        self.assertTrue(wait_for(lambda: 2 in self.manager.transfer_infos))

    def test_requests_without_another_engine_end_no_room(self):
        with mock.patch.object(admission, "end_room") as end:
            self.refuse(1, "too long", host=FAKE_BOOTSTRAP_HOST)
            self.refuse(2, None)
        self.assertEqual(end.call_count, 0)

    def test_a_mistake_of_the_client_is_400_on_both_engines(self):
        for text, status in (
            ("failed: refused by prefill: [PD-BAD-REQUEST] too long", 400),
            ("failed: refused by prefill: no memory", 500),
        ):
            failed = SimpleNamespace(return_logprob=False)
            prepare_abort(failed, text, status_code=HTTPStatus(500))
            self.assertEqual(failed.finished_reason.status_code, status)

    def test_rooms_of_a_scheduler_that_raised_end(self):
        """All but the served ones, also of a pipelined prefill; and its process with them."""
        for room in (1, 2):
            open_sender(self.manager, room)
            self.ask(room)
            self.assertTrue(self.is_ready(room))
        self.manager.request_status[2] = KVPoll.Success
        statuses = self.manager.request_status
        self.manager.request_status = mock.Mock(spec=["get"], get=statuses.get)
        queue = SimpleNamespace(kv_manager=self.manager)
        exits = self.raise_in_scheduler("PREFILL", disagg_prefill_bootstrap_queue=queue)
        self.answers(1, "prefill's scheduler raised")
        self.assertTrue(wait_for(lambda: exits.call_args == mock.call(1)))

    def test_a_decode_whose_scheduler_raised_aborts_its_rooms(self):
        held = [mock.Mock(), mock.Mock(), mock.Mock(kv_receiver=None)]
        exits = self.raise_in_scheduler(
            "DECODE",
            disagg_decode_prealloc_queue=SimpleNamespace(queue=held[:1]),
            disagg_decode_transfer_queue=SimpleNamespace(queue=held[1:]),
        )
        for one in held[:2]:
            one.kv_receiver.abort.assert_called_once_with()
        self.assertTrue(wait_for(lambda: exits.called))
        self.assertFalse(self.raise_in_scheduler("NULL").called)

    def raise_in_scheduler(self, role, **queues):
        """SGLang's process around a scheduler that raises; how it is ended."""
        mode = DisaggregationMode[role]
        made = mock.MagicMock(**queues, gracefully_exit=False, disaggregation_mode=mode)
        exits = self.enterContext(mock.patch.object(admission.os, "_exit"))
        made.run_event_loop.side_effect = RuntimeError("broken")
        run = scheduler.run_scheduler_process
        given = inspect.signature(run).parameters.values()
        with patch_existing(
            scheduler,
            Scheduler=lambda *args: made,
            get_observability=lambda: SimpleNamespace(enable_trace=False),
            psutil=mock.Mock(),
            load_plugins=mock.Mock(),
            publish=mock.Mock(),
            configure_scheduler_process=mock.Mock(),
            resolve_spawn_dp_rank=mock.Mock(),
            spawn_world_rank=mock.Mock(),
            SpawnRanks=mock.Mock(),
        ):
            run(*[mock.Mock() for one in given if one.default is one.empty])
        return exits


class TestTransferWorker(CustomTestCase):
    def run_worker(self, *taken):
        manager = mooncake_prefill()
        self.addCleanup(close, manager)
        manager.__dict__.update(
            state_layout_rejections={},
            failed_sessions=set(),
            failed_session_probes={},
            bootstrap_port=1,
        )
        for room in (1, 2):
            open_sender(manager, room)
            # No peer of this name: SGLang's lookup raises inside the worker.
            manager.transfer_infos[room] = {"x": mock.MagicMock(is_dummy=False)}
            manager.req_to_decode_prefix_len[room] = 0
        queue = mock.Mock()
        queue.get.side_effect = [*taken, SystemExit]
        with self.assertRaises((SystemExit, RuntimeError)):
            manager.transfer_worker(queue, mock.Mock())
        return manager, queue

    def test_it_outlives_a_chunk_that_raises(self):
        chunks = [SimpleNamespace(room=room) for room in (1, 2)]
        manager, queue = self.run_worker(*chunks)
        self.assertEqual(queue.get.call_count, 3, "it stopped at the first error")
        self.assertEqual(set(manager.request_status.values()), {KVPoll.Failed})
        self.assertIn("[PD-TRANSFER]", manager.failure_records[1])
        self.assertEqual(manager.transfer_infos, {})
        self.assertEqual(manager.req_to_decode_prefix_len, {})
        self.assertEqual(dict(manager._staging_outstanding), {})

    def test_one_that_cannot_take_chunks_ends_the_engine(self):
        ended.clear()
        self.assertFalse(admission.fail_chunk(mock.Mock(), None, OSError("queue")))
        self.assertIn("A transfer worker is dead: OSError: queue", ended[0])


class TestDecode(ThreadCase):
    def listen(self, manager, start):
        self.start(manager, start)
        manager._worker_threads[:] = [
            t for t in manager._worker_threads if isinstance(t, threading.Thread)
        ]
        manager.connection_pool.update({"a:1_0_0_0": [], "a:12_0_0_0": []})
        manager.addr_to_rooms_tracker["a:1"].add(1)
        manager.request_status.update(dict.fromkeys((1, 2, 3), KVPoll.Transferring))

    def test_a_decode_that_prefill_does_not_know_registers_again(self):
        """The next request of that prefill does: its connection is forgotten."""
        for manager, start, tag in (
            (nixl_decode(), "_start_decode_listener_thread", [b"KV_STATUS"]),
            (mooncake_decode(), "start_decode_thread", []),
        ):
            self.listen(manager, getattr(manager, start))
            with self.subTest(type(manager).__name__):
                self.wire.send(*tag, b"2", FAILED, b"0", b"another reason")
                self.assertTrue(self.fails(2, "another reason"))
                self.assertEqual(len(manager.connection_pool), 2)
                self.wire.send(*tag, b"1", FAILED, b"0", b"[PD-NOT-REGISTERED] who?")
                self.assertTrue(self.fails(1, "[PD-NOT-REGISTERED]"))
                self.assertEqual(list(manager.connection_pool), ["a:12_0_0_0"])

    def test_a_chunk_or_a_request_for_staging_that_raises_fails_its_room(self):
        manager = nixl_decode()
        self.listen(manager, manager._start_decode_listener_thread)
        handler = mock.MagicMock()
        handler.handle_chunk_arrived.side_effect = RuntimeError("staging broke")
        manager._staging_handler, manager.enable_staging = handler, True
        manager._handle_staging_req = mock.Mock(side_effect=RuntimeError("no"))
        self.wire.send(b"CHUNK_READY", b"1", b"0", b"0", b"1", b"w", b"0")
        self.wire.send(b"STAGING_REQ", b"2", b"0")
        self.assertTrue(self.fails(2, "[PD-STATUS]"))
        self.assertEqual(manager.request_status[3], KVPoll.Transferring)
        # export: only <0.5.21
        if not hasattr(manager, "handle_chunk_ready"):
            return
        self.assertTrue(self.fails(1, "staging broke"))

    def test_hostile_frames_cost_only_themselves(self):
        dice = random.Random(11)
        manager = nixl_decode()
        self.listen(manager, manager._start_decode_listener_thread)
        room = b"1"
        with (
            mock.patch.object(control_threads.logger, "error"),
            mock.patch.object(conn.logger, "warning"),
        ):
            for _ in range(FRAMES):
                kinds = [
                    [b"KV_STATUS", room, b"0", b"0", b"[PD-NOT-REGISTERED] who?"],
                    [b"CHUNK_READY", room, b"0", b"0", b"1", b"w", b"0"],
                    [b"STAGING_REQ", room, b"0"],
                    [b"ABORT_ACK", room, b"0", b"1"],
                    garbage(dice),
                ]
                self.wire.send(*damaged(dice, dice.choice(kinds)))
            self.wire.send(b"KV_STATUS", b"2", FAILED, b"0", b"why")
            self.assertTrue(self.fails(2, "why"))
        self.assertEqual(manager.request_status[3], KVPoll.Transferring)
        self.assertEqual(ended, [])


if __name__ == "__main__":
    unittest.main()
