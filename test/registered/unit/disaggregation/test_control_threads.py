"""Control threads outlive whatever one message or one peer does to them.

Contract: an error in handling a message costs that message's peer or room and nothing
else; the thread works on the next message; a half-made registration leaves nothing
behind; hostile frames neither end a thread nor fill memory; a thread that is really
gone turns ``/health`` red with the reason.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import stat
import subprocess
import tempfile
import threading
import tracemalloc
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import psutil
import zmq
from peer_fixtures import (
    NATIVE,
    PLAIN,
    Wire,
    close,
    make_manager,
    mooncake_metadata,
    mooncake_registration,
    nixl_decode,
    nixl_metadata,
    nixl_prefill,
    nixl_registration,
    open_sender,
    wait_for,
)

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import (
    conn,
    control_thread_guard,
    control_thread_health,
    log_limits,
)
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
)
from sglang.srt.disaggregation.common.control_thread_guard import (
    note_message,
    survives,
)
from sglang.srt.disaggregation.common.control_thread_health import (
    find_process,
    flag_path,
    health_failure,
    health_response,
    report_dead_thread,
)
from sglang.srt.disaggregation.common.early_rooms import EarlyRooms
from sglang.srt.disaggregation.common.peer_agreement import FRAME_MAGIC
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

FRAMES = 10_000
MOONCAKE = {**NATIVE, "backend": "mooncake"}


class _Threads(CustomTestCase):
    def start(self, manager, start_thread):
        self.manager = manager
        self.addCleanup(close, manager)
        start_thread()
        self.wire = Wire(manager)
        self.addCleanup(self.wire.close)

    def status_becomes(self, room, status):
        table = self.manager.request_status
        return bool(wait_for(lambda: table.get(room) == status))

    def fails(self, room):
        return self.status_becomes(room, KVPoll.Failed)

    def is_ready(self, room):
        return self.status_becomes(room, KVPoll.WaitingForInput)


class TestNixlBootstrapThread(_Threads):
    def setUp(self):
        manager = nixl_prefill({**PLAIN, "kv_entries": 0})
        self.start(manager, manager._start_bootstrap_thread)

    def serves_a_good_decode(self, room, agent="decode-good"):
        open_sender(self.manager, room)
        self.wire.send(*nixl_registration(self.wire.port, agent, description=PLAIN))
        self.wire.send(*nixl_metadata(room, self.wire.port, agent))
        return self.is_ready(room)

    def test_survives_a_registration_that_raises(self):
        """Upstream's own geometry error: fewer regions on decode than on prefill."""
        self.manager.kv_args.kv_item_lens = [8] * 4
        open_sender(self.manager, 1)
        bad = nixl_registration(self.wire.port, "decode-bad", 2, PLAIN)
        self.wire.send(*bad)
        self.wire.send(*nixl_metadata(1, self.wire.port, "decode-bad"))
        self.assertTrue(self.fails(1))
        self.assertIn(
            "decode registered fewer KV regions", self.manager.failure_records[1]
        )
        self.assertIn(b"fewer KV regions", self.wire.answer()[4])
        self.assertEqual(self.manager.decode_kv_args_table, {}, "half-made peer left")
        self.assertEqual(self.manager.agent.peers, [])
        self.manager.kv_args.kv_item_lens = []
        self.assertTrue(self.serves_a_good_decode(2))

    def test_survives_metadata_that_raises(self):
        self.assertTrue(self.serves_a_good_decode(1))
        open_sender(self.manager, 2)
        frames = nixl_metadata(2, self.wire.port, "decode-good")
        frames[5] = b"abc"  # not a whole number of indices
        self.wire.send(*frames)
        self.assertTrue(self.fails(2))
        self.assertIn("[PD-METADATA]", self.manager.failure_records[2])
        self.assertTrue(self.serves_a_good_decode(3))

    def test_survives_foreign_traffic(self):
        for frames in ([b""], [b"GET / HTTP/1.1"], [b"\xff\xfe"] * 5, [b"ABORT"]):
            self.wire.send(*frames)
        self.assertTrue(self.serves_a_good_decode(1))

    def test_fuzz_leaves_threads_alive_and_memory_flat(self):
        """Hostile frames of every kind, most of them almost right."""
        dice = random.Random(7)
        process = psutil.Process(os.getpid())
        self.manager.early_rooms = EarlyRooms(max_rooms=256)
        # It slows the whole process down.
        self.addCleanup(tracemalloc.stop)
        self.assertTrue(self.serves_a_good_decode(10**7))
        with mock.patch.object(log_limits.logger, "error"):
            self._throw(dice, FRAMES // 2, "warm")
            before = self._footprint(process)
            self._throw(dice, FRAMES, "real")
            after = self._footprint(process, before[1] + 32)
        open_sender(self.manager, 10**8 + 7)
        self.wire.send(*nixl_metadata(10**8 + 7, self.wire.port, "decode-good"))
        self.assertTrue(self.is_ready(10**8 + 7), "a good decode lost its registration")
        self.assertTrue(self.serves_a_good_decode(10**9))
        manager = self.manager
        for name, table in (
            ("peers", manager.decode_kv_args_table),
            ("rooms", manager.transfer_infos),
            ("status", manager.request_status),
            ("failures", manager.failure_records),
            ("rejections", manager.peer_rejections),
            ("verdicts said", manager.peer_verdicts_said),
        ):
            with self.subTest(name):
                self.assertLessEqual(len(table), 4096)
        self.assertLess(after[0] - before[0], 24 << 20, "Python heap grew")
        self.assertLess(after[1] - before[1], 32, "sockets or files were left open")

    def _footprint(self, process, few=200):
        """(heap bytes, open files), once sockets to made-up addresses have lingered."""
        gc.collect()
        wait_for(lambda: process.num_fds() < few, 15)
        return tracemalloc.get_traced_memory()[0], process.num_fds()

    def _throw(self, dice, count, label):
        tracemalloc.start()
        for number in range(count):
            self.wire.send(*self._hostile(dice, f"{label}-{number}"))
        marker = 10**8 + (label == "warm")
        open_sender(self.manager, marker)
        self.wire.send(b"ABORT", str(marker).encode())
        table = self.manager.request_status
        done = wait_for(lambda: table.get(marker) == KVPoll.Failed, 60)
        self.assertTrue(done, "the bootstrap thread is deaf")

    def _hostile(self, dice, name):
        room, port = dice.randrange(10**6), dice.randrange(1, 65536)
        shape = dice.randrange(7)
        if shape == 0:
            frames = nixl_registration(port, name, dice.randrange(4), PLAIN)
        elif shape == 1:
            frames = nixl_metadata(room, port, dice.choice([name, "decode-good"]))
        elif shape == 2:
            frames = [b"ABORT", str(room).encode()]
        elif shape == 3:
            frames = [b"PEER_REFUSED", str(room).encode(), dice.randbytes(40)]
        elif shape == 5:  # in a good decode's name, what no JSON reader gets through
            frames = nixl_registration(port, "decode-good")
            return [*frames, FRAME_MAGIC + b"[" * dice.randrange(9000, 70_000)]
        elif shape == 4:
            frames = nixl_registration(
                port, name, 1, {"version": dice.randbytes(2).hex()}
            )
        else:
            return [
                dice.randbytes(dice.randrange(64)) for _ in range(dice.randrange(1, 30))
            ]
        for _ in range(dice.randrange(3)):  # damage a good message
            index = dice.randrange(len(frames))
            frames[index] = dice.choice([b"", dice.randbytes(9), frames[index][:-1]])
        return (
            frames[: dice.randrange(1, len(frames) + 1)]
            if dice.random() < 0.2
            else frames
        )


class TestNixlDecodeListener(_Threads):
    def setUp(self):
        manager = nixl_decode()
        self.start(manager, manager._start_decode_listener_thread)

    def status_message(self, room, status=KVPoll.Failed):
        self.wire.send(
            b"KV_STATUS", str(room).encode(), str(int(status)).encode(), b"0", b"why"
        )

    def test_survives_a_status_that_raises(self):
        self.manager.request_status.update(
            {1: KVPoll.Bootstrapping, 2: KVPoll.Bootstrapping}
        )
        self.wire.send(b"CHUNK_READY", b"1", b"0", b"0", b"1", b"w", b"0")
        with mock.patch.object(
            self.manager, "_staging_handler", mock.MagicMock(), create=True
        ) as handler:
            handler.handle_chunk_arrived.side_effect = RuntimeError("staging broke")
            self.wire.send(b"CHUNK_READY", b"1", b"0", b"0", b"1", b"w", b"0")
            self.status_message(2)
            self.assertTrue(self.fails(2))
        self.assertEqual(self.manager.failure_records[2], "why")

    def test_failing_status_fails_its_room(self):
        table = self.manager.request_status
        table.update({1: KVPoll.Bootstrapping, 2: KVPoll.Bootstrapping})
        original = self.manager.apply_prefill_status

        def apply(*, bootstrap_room, **rest):
            if bootstrap_room == 1:
                raise RuntimeError("broke here")
            original(bootstrap_room=bootstrap_room, **rest)

        self.manager.apply_prefill_status = apply
        self.status_message(1, KVPoll.Success)
        self.status_message(2)
        self.assertTrue(self.fails(2))
        self.assertEqual(table[1], KVPoll.Failed)
        self.assertIn("broke here", self.manager.failure_records[1])

    def test_a_failing_chunk_or_request_for_staging_fails_its_room(self):
        table = self.manager.request_status
        table.update(dict.fromkeys((1, 2, 3), KVPoll.Transferring))
        handler = mock.MagicMock()
        handler.handle_chunk_arrived.side_effect = RuntimeError("staging broke")
        self.manager._staging_handler = handler
        self.manager.enable_staging = True
        self.manager._handle_staging_req = mock.Mock(side_effect=RuntimeError("no"))
        self.wire.send(b"CHUNK_READY", b"1", b"0", b"0", b"1", b"w", b"0")
        self.wire.send(b"STAGING_REQ", b"2", b"0")
        self.assertTrue(self.fails(2))
        if hasattr(self.manager, "handle_chunk_ready"):  # from 0.5.21 on
            self.assertTrue(self.fails(1))
            self.assertIn("staging broke", self.manager.failure_records[1])
        self.assertEqual(table[3], KVPoll.Transferring)

    def test_fuzz_leaves_the_thread_alive(self):
        """Hostile frames of every kind; good messages in between are worked on."""
        dice = random.Random(11)
        table = self.manager.request_status
        with (
            mock.patch.object(log_limits.logger, "error"),
            mock.patch.object(conn.logger, "warning"),
        ):
            for number in range(FRAMES // 2):
                self.wire.send(*self._hostile(dice))
                if number % 500 == 0:
                    room = 10**7 + number
                    table[room] = KVPoll.Transferring
                    self.status_message(room)
                    self.assertTrue(self.fails(room), number)
        self.assertLess(len(table), 50)
        self.assertLessEqual(len(self.manager.failure_records), len(table))

    def _hostile(self, dice):
        room = str(dice.randrange(10**6)).encode()
        frames = dice.choice(
            [
                [b"KV_STATUS", room, b"0", b"0", b"[PD-NOT-REGISTERED] who?"],
                [b"KV_STATUS", room, b"4", b"0", dice.randbytes(20)],
                [b"CHUNK_READY", room, b"0", b"0", b"1", b"w", b"0"],
                [b"STAGING_REQ", room, b"0"],
                [b"ABORT_ACK", room, b"0", b"1"],
                [
                    dice.randbytes(dice.randrange(40))
                    for _ in range(dice.randrange(1, 9))
                ],
            ]
        )
        for _ in range(dice.randrange(3)):
            index = dice.randrange(len(frames))
            frames[index] = dice.choice([b"", dice.randbytes(9), b"[" * 5000])
        return frames[: dice.randrange(1, len(frames) + 1)]


class TestLostRegistration(_Threads):
    """Prefill may forget a decode; the decode's next request registers again."""

    def listen(self, manager, start):
        self.start(manager, start)
        manager.connection_pool.update({"a:1_0_0_0": [], "a:12_0_0_0": []})
        manager.addr_to_rooms_tracker["a:1"].add(1)
        manager.request_status[1] = KVPoll.Transferring

    def test_nixl_forgets_the_connection(self):
        manager = nixl_decode()
        self.listen(manager, manager._start_decode_listener_thread)
        failed = str(int(KVPoll.Failed)).encode()
        self.wire.send(b"KV_STATUS", b"1", failed, b"0", b"another reason")
        self.assertTrue(self.fails(1))
        self.assertEqual(len(manager.connection_pool), 2)
        manager.request_status[1] = KVPoll.Transferring
        self.wire.send(b"KV_STATUS", b"1", failed, b"0", b"[PD-NOT-REGISTERED] who?")
        self.assertTrue(self.fails(1))
        self.assertEqual(list(manager.connection_pool), ["a:12_0_0_0"])

    def test_mooncake_forgets_it_at_any_failure_without_a_reason(self):
        manager = make_manager(MooncakeKVManager, DisaggregationMode.DECODE, MOONCAKE)
        manager._start_heartbeat_checker_thread = mock.Mock()
        self.listen(manager, manager.start_decode_thread)
        manager._worker_threads[:] = [
            t for t in manager._worker_threads if isinstance(t, threading.Thread)
        ]
        self.wire.send(b"1", str(int(KVPoll.Failed)).encode(), b"0")
        self.assertTrue(self.fails(1))
        self.assertEqual(list(manager.connection_pool), ["a:12_0_0_0"])


class TestMooncakeBootstrapThread(_Threads):
    def setUp(self):
        manager = make_manager(MooncakeKVManager, DisaggregationMode.PREFILL, MOONCAKE)
        manager._publish_peer_registration = self.publish
        self.start(manager, manager.start_prefill_thread)

    def publish(self, session, registration):
        self.manager.decode_kv_args_table[session] = registration

    def test_survives_a_registration_that_raises(self):
        for room, session in ((1, "bad:1"), (2, "good:1")):
            open_sender(self.manager, room)
            frames = mooncake_registration(
                self.wire.port, session, description=MOONCAKE
            )
            if session == "bad:1":
                frames[7] = b"no rank"
            self.wire.send(*frames)
            self.wire.send(*mooncake_metadata(room, self.wire.port, session))
        self.assertTrue(self.is_ready(2))
        self.assertTrue(self.fails(1))
        reason = self.manager.failure_records[1]
        self.assertIn("[PD-REGISTRATION]", reason)
        self.assertIn("no rank", reason)


class TestMooncakeDecodeThread(_Threads):
    def setUp(self):
        manager = make_manager(MooncakeKVManager, DisaggregationMode.DECODE, MOONCAKE)
        manager._start_heartbeat_checker_thread = mock.Mock()
        self.start(manager, manager.start_decode_thread)
        threads = self.manager._worker_threads
        threads[:] = [t for t in threads if isinstance(t, threading.Thread)]
        self.manager.request_status.update(
            {1: KVPoll.Bootstrapping, 2: KVPoll.Bootstrapping}
        )

    def test_survives_a_status_that_raises(self):
        self.manager._handle_aux_data = mock.Mock(side_effect=ValueError("bad aux"))
        self.wire.send(MooncakeKVManager.AUX_DATA_HEADER, b"x")
        self.wire.send(b"2", str(int(KVPoll.Failed)).encode(), b"0")
        self.assertTrue(self.fails(2))

    def test_failing_status_fails_its_room(self):
        original = self.manager.apply_prefill_status

        def apply(*, bootstrap_room, **rest):
            if bootstrap_room == 1:
                raise RuntimeError("broke here")
            original(bootstrap_room=bootstrap_room, **rest)

        self.manager.apply_prefill_status = apply
        self.wire.send(b"1", str(int(KVPoll.Success)).encode(), b"0")
        self.wire.send(b"2", str(int(KVPoll.Failed)).encode(), b"0")
        self.assertTrue(self.fails(2))
        self.assertTrue(self.fails(1))
        self.assertIn("broke here", self.manager.failure_records[1])


class TestMooncakeTransferWorker(CustomTestCase):
    def test_survives_a_chunk_that_raises(self):
        manager = make_manager(MooncakeKVManager, DisaggregationMode.PREFILL, MOONCAKE)
        self.addCleanup(close, manager)
        for room in (1, 2):
            open_sender(manager, room)
            # No peer of this name: upstream's lookup raises inside the worker.
            manager.transfer_infos[room] = {"x": mock.MagicMock(is_dummy=False)}
            manager.req_to_decode_prefix_len[room] = 0
        chunks = [SimpleNamespace(room=room) for room in (1, 2)]
        manager.__dict__.update(
            state_layout_rejections={}, failed_sessions=set(), failed_session_probes={}
        )
        queue = mock.Mock()
        queue.get.side_effect = [*chunks, SystemExit]
        with self.assertRaises(SystemExit):
            manager.transfer_worker(queue, mock.Mock())
        self.assertEqual(
            queue.get.call_count, 3, "the worker stopped at the first error"
        )
        self.assertEqual(set(manager.request_status.values()), {KVPoll.Failed})
        self.assertIn("[PD-TRANSFER]", manager.failure_records[1])
        self.assertEqual(manager.transfer_infos, {})
        self.assertEqual(manager.req_to_decode_prefix_len, {})
        self.assertEqual(dict(manager._staging_outstanding), {})


class TestHeartbeat(CustomTestCase):
    def check(self, *addresses, handle, table=dict):
        """A heartbeat thread over prefills that are down, and how one is handled."""
        manager = nixl_decode()
        self.addCleanup(close, manager)
        down = mock.Mock(get=mock.Mock(side_effect=OSError))
        manager.__dict__.update(
            heartbeat_interval=0.01,
            _heartbeat_shutdown=threading.Event(),
            heartbeat_failures={},
            max_failures=1,
            session_pool_lock=threading.Lock(),
            session_pool=defaultdict(lambda: down),
            prefill_info_table=table.fromkeys(addresses),
        )
        self.addCleanup(self.end, manager)
        manager._handle_node_failure = mock.Mock(side_effect=handle)
        before = set(threading.enumerate())
        manager._start_heartbeat_checker_thread()
        [thread] = set(threading.enumerate()) - before
        return manager, thread

    def end(self, manager):
        """Older releases' loops do not ask for the event: make them raise as well."""
        manager._heartbeat_shutdown.set()
        manager.prefill_info_table = None

    def test_an_error_with_one_prefill_does_not_hide_the_next(self):
        def handle(address):
            if address == "first":
                raise KeyError("always")

        manager, _ = self.check("first", "second", handle=handle)
        asked = manager._handle_node_failure
        self.assertTrue(wait_for(lambda: mock.call("second") in asked.mock_calls))
        self.assertIn(mock.call("first"), asked.mock_calls)

    def test_survives_an_error_between_prefills(self):
        class Table(dict):
            asked = 0

            def keys(self):
                Table.asked += 1
                if Table.asked == 1:
                    raise RuntimeError("changed size during iteration")
                return super().keys()

        manager, thread = self.check("down", handle=None, table=Table)
        asked = manager._handle_node_failure
        self.assertTrue(wait_for(lambda: asked.call_count >= 2))
        self.assertGreater(Table.asked, 1)
        self.assertTrue(thread.is_alive())
        self.end(manager)
        thread.join(timeout=5)
        self.assertFalse(thread.is_alive())


class TestGuard(CustomTestCase):
    def manager(self):
        return SimpleNamespace(server_args=SimpleNamespace(port=0), _stopped=False)

    def run_guarded(self, loop, manager=None):
        manager = manager or self.manager()
        with mock.patch.object(control_thread_guard, "report_dead_thread") as report:
            survives(manager, "a thread")(loop)()
        return report

    def test_a_thread_that_cannot_receive_is_reported_in_seconds(self):
        def loop():
            raise OSError("socket is gone")

        report = self.run_guarded(loop)
        self.assertIn("socket is gone", report.call_args.args[2])

    def test_a_loop_that_ends_is_reported(self):
        self.assertEqual(self.run_guarded(lambda: None).call_count, 1)

    def test_a_stopped_manager_is_not(self):
        manager = self.manager()

        def loop():
            manager._stopped = True
            raise OSError("socket was closed on purpose")

        self.assertEqual(self.run_guarded(loop, manager).call_count, 0)

    def test_an_error_in_receiving_blames_nobody(self):
        messages, blamed = [[b"good"]], []

        def loop():
            while True:
                note_message(None)
                if not messages:
                    raise OSError("receiving failed")
                note_message(messages.pop())

        with mock.patch.object(control_thread_guard, "report_dead_thread"):
            survives(self.manager(), "a thread", lambda *args: blamed.append(args))(
                loop
            )()
        self.assertEqual(blamed, [])

    def test_upstreams_loops_clear_the_note_before_they_receive(self):
        """Real loops: a message that was worked on is not blamed for the next receive."""
        for manager, loop in (
            (nixl_prefill(), "_start_bootstrap_thread"),
            (nixl_decode(), "_start_decode_listener_thread"),
        ):
            self.addCleanup(close, manager)
            received = iter([[b"WATERMARK"]])

            def receive(received=received):
                for message in received:
                    return message
                raise SystemExit(str(control_thread_guard.message_in_flight()))

            with mock.patch.object(threading, "Thread") as thread:
                getattr(manager, loop)()
            inbox = SimpleNamespace(recv_multipart=receive)
            with (
                mock.patch.object(manager, "server_socket", inbox),
                mock.patch.object(control_thread_guard, "report_dead_thread") as report,
                self.assertRaises(SystemExit),
            ):
                thread.call_args.kwargs["target"]()
            self.assertEqual(report.call_args.args[2], "SystemExit: None")

    def test_a_context_that_is_torn_down_is_no_dead_thread(self):
        def loop():
            raise zmq.ContextTerminated

        self.assertEqual(self.run_guarded(loop).call_count, 0)

    def test_a_thread_killed_by_an_exit_is_reported(self):
        def loop():
            raise SystemExit(3)

        with mock.patch.object(control_thread_guard, "report_dead_thread") as report:
            with self.assertRaises(SystemExit):
                survives(self.manager(), "a thread")(loop)()
        self.assertIn("SystemExit", report.call_args.args[2])


class TestHealth(CustomTestCase):
    port = 45871

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        patch = mock.patch.object(
            control_thread_health, "flag_folder", lambda: self.folder.name
        )
        patch.start()
        self.addCleanup(patch.stop)

    def report(self, port, name="a thread"):
        manager = SimpleNamespace(server_args=SimpleNamespace(port=port))
        report_dead_thread(manager, name, "it broke")

    def flags(self):
        return sorted(os.listdir(self.folder.name))

    def test_red_with_the_reason_for_this_port_only(self):
        self.assertIsNone(health_failure(self.port))
        self.report(self.port)
        self.assertIn("'a thread' is dead: it broke", health_failure(self.port))
        self.assertIsNone(health_failure(self.port + 1))
        self.assertEqual(health_response(self.port).status_code, 503)
        [name] = self.flags()
        mode = os.stat(os.path.join(self.folder.name, name)).st_mode
        self.assertEqual(stat.S_IMODE(mode), 0o600)

    def flag_of(self, pid, start):
        """A flag as a process with this identity would have left it."""
        process = control_thread_health.Process(pid, start, 1)
        with mock.patch.object(
            control_thread_health, "find_process", return_value=process
        ):
            self.report(self.port)

    def test_a_flag_of_a_process_that_is_gone_is_removed(self):
        self.flag_of(2**22 + 5, 1)
        self.assertIsNone(health_failure(self.port))
        self.assertEqual(self.flags(), [])

    def test_a_flag_of_a_process_whose_id_was_used_again_is_removed(self):
        """The engine was killed; an unrelated program has its id by now."""
        other = subprocess.Popen(["sleep", "60"])
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        living = find_process(other.pid)
        self.assertEqual(living.parent, os.getpid())
        self.flag_of(other.pid, living.start - 1)
        self.assertIsNone(health_failure(self.port))
        self.assertEqual(self.flags(), [])
        self.flag_of(other.pid, living.start)
        self.assertIsNotNone(health_failure(self.port), "that process lives")

    def test_a_process_that_nobody_reaped_is_gone(self):
        """As under a container's first process that does not wait for its children."""
        ended = subprocess.Popen(["sleep", "60"])
        self.addCleanup(ended.wait)
        start = find_process(ended.pid).start
        ended.kill()
        self.assertTrue(wait_for(lambda: find_process(ended.pid) is None))
        self.assertTrue(os.path.exists(f"/proc/{ended.pid}"), "its remains")
        self.flag_of(ended.pid, start)
        self.assertIsNone(health_failure(self.port))
        self.assertEqual(self.flags(), [])

    def test_a_thread_that_starts_again_clears_its_flag_and_stale_ones(self):
        manager = SimpleNamespace(server_args=SimpleNamespace(port=self.port))
        self.report(self.port, "one thread")
        self.report(self.port, "another")
        self.flag_of(2**22 + 5, 1)
        self.assertEqual(len(self.flags()), 3)

        def loop():
            manager._stopped = True

        survives(manager, "one thread")(loop)()
        [kept] = self.flags()
        self.assertIn("another", kept)

    def test_a_link_or_a_file_of_another_kind_is_not_read_nor_written_through(self):
        path = flag_path(self.port, find_process(os.getpid()), "a thread")
        victim = os.path.join(self.folder.name, "victim")
        with open(victim, "w") as file:
            file.write('{"thread": "no", "reason": "flag"}')
        os.symlink(victim, path)
        self.assertIsNone(health_failure(self.port))
        self.report(self.port)
        self.assertFalse(os.path.islink(path))
        with open(victim) as file:
            self.assertIn("flag", file.read())
        os.unlink(path)
        os.mkfifo(path)
        self.assertIsNone(health_failure(self.port), "a pipe must not block health")

    def test_endpoint_is_red_with_the_reason(self):
        import asyncio

        from sglang.srt.entrypoints import http_server

        state = mock.MagicMock()
        state.tokenizer_manager.gracefully_exit = False
        state.tokenizer_manager.server_args.port = self.port
        state.tokenizer_manager.server_status = http_server.ServerStatus.Starting
        self.report(self.port)
        with mock.patch.object(http_server, "_global_state", state):
            response = asyncio.run(http_server.health_generate(mock.MagicMock()))
        self.assertEqual(response.status_code, 503)
        self.assertIn(b"it broke", response.body)

    def test_prefill_that_cannot_register_is_red(self):
        manager = SimpleNamespace(server_args=SimpleNamespace(port=self.port))
        with (
            mock.patch.object(conn.requests, "put", side_effect=OSError("refused")),
            mock.patch.object(conn.time, "sleep"),
        ):
            CommonKVManager._register_topology_row(manager, "http://x/route", {})
        self.assertIn("registration", health_failure(self.port))

    def dead_bootstrap_server(self):
        """A real server on a port that somebody else has."""
        with socket.create_server(("127.0.0.1", 0)) as occupant:
            server = CommonKVBootstrapServer("127.0.0.1", occupant.getsockname()[1])
            server.thread.join(timeout=10)
        self.assertFalse(server.thread.is_alive())

    def test_bootstrap_server_that_dies_is_red(self):
        try:
            from sglang.srt import runtime_context
        except ImportError:
            self.skipTest("this release keeps serving arguments elsewhere")
        serving = SimpleNamespace(port=self.port)
        with mock.patch.object(runtime_context, "get_serving", lambda: serving):
            self.dead_bootstrap_server()
        self.assertIn("'bootstrap server'", health_failure(self.port))
        self.assertIsNone(health_failure(self.port + 1))

    def test_bootstrap_server_that_knows_no_port_is_its_own_process_s(self):
        with mock.patch.object(
            control_thread_health, "_serving_port", return_value=None
        ):
            self.dead_bootstrap_server()
        self.assertIn("'bootstrap server'", health_failure(self.port))
        for stranger in ({"getpid": 1, "getppid": 1}, {"getpid": 2, "getppid": 1}):
            others = {name: (lambda v=value: v) for name, value in stranger.items()}
            with mock.patch.multiple(control_thread_health.os, **others):
                self.assertIsNone(health_failure(self.port))
        with mock.patch.object(
            control_thread_health.os, "getpid", return_value=os.getppid()
        ):
            self.assertIsNotNone(health_failure(self.port), "a scheduler's parent")


if __name__ == "__main__":
    unittest.main()
