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
import threading
import tracemalloc
import unittest
from types import SimpleNamespace
from unittest import mock

import psutil
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
from sglang.srt.disaggregation.common import conn, control_thread_guard
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
)
from sglang.srt.disaggregation.common.control_thread_guard import (
    health_failure,
    health_response,
    survives,
)
from sglang.srt.disaggregation.common.early_rooms import EarlyRooms
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
        self.assertTrue(self.serves_a_good_decode(10**7))
        with mock.patch.object(control_thread_guard.logger, "error"):
            self._throw(dice, FRAMES // 2, "warm")
            before = self._footprint(process)
            self._throw(dice, FRAMES, "real")
            after = self._footprint(process)
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

    def _footprint(self, process):
        gc.collect()
        wait_for(lambda: process.num_fds() < 200, 5)
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
        shape = dice.randrange(6)
        if shape == 0:
            frames = nixl_registration(port, name, dice.randrange(4), PLAIN)
        elif shape == 1:
            frames = nixl_metadata(room, port, dice.choice([name, "decode-good"]))
        elif shape == 2:
            frames = [b"ABORT", str(room).encode()]
        elif shape == 3:
            frames = [b"PEER_REFUSED", str(room).encode(), dice.randbytes(40)]
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


class TestHeartbeat(CustomTestCase):
    def test_survives_an_error_in_node_failure(self):
        manager = nixl_decode()
        self.addCleanup(close, manager)
        manager.__dict__.update(
            heartbeat_interval=0.01,
            _heartbeat_shutdown=threading.Event(),
            heartbeat_failures={},
            max_failures=1,
            session_pool_lock=threading.Lock(),
            session_pool={"down": mock.Mock(get=mock.Mock(side_effect=OSError))},
            prefill_info_table={"down": object()},
        )
        self.addCleanup(manager._heartbeat_shutdown.set)
        manager._handle_node_failure = mock.Mock(
            side_effect=[KeyError("x"), None, None]
        )
        before = set(threading.enumerate())
        manager._start_heartbeat_checker_thread()
        [thread] = set(threading.enumerate()) - before
        self.assertTrue(wait_for(lambda: manager._handle_node_failure.call_count >= 2))
        self.assertTrue(thread.is_alive())
        manager._heartbeat_shutdown.set()
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
        self.addCleanup(self._clean)

    def _clean(self):
        path = control_thread_guard._flag_path(self.port, os.getpid())
        if os.path.exists(path):
            os.unlink(path)

    def report(self, port):
        manager = SimpleNamespace(server_args=SimpleNamespace(port=port))
        control_thread_guard.report_dead_thread(manager, "a thread", "it broke")

    def test_red_with_the_reason_for_this_port_only(self):
        self.assertIsNone(health_failure(self.port))
        self.report(self.port)
        self.assertIn("'a thread' is dead: it broke", health_failure(self.port))
        self.assertIsNone(health_failure(self.port + 1))
        self.assertEqual(health_response(self.port).status_code, 503)

    def test_a_flag_of_a_process_that_is_gone_is_removed(self):
        with mock.patch.object(
            control_thread_guard.os, "getpid", return_value=2**22 + 5
        ):
            self.report(self.port)
        self.assertIsNone(health_failure(self.port))
        self.assertFalse(
            os.path.exists(control_thread_guard._flag_path(self.port, 2**22 + 5))
        )

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

    def test_bootstrap_server_that_dies_is_red(self):
        server = object.__new__(CommonKVBootstrapServer)
        server.prefill_http_port = self.port
        server.app = mock.MagicMock()
        server._background_tasks = set()
        server.entry_cleanup_interval = 1
        with mock.patch.object(
            conn.web, "AppRunner", side_effect=OSError("port taken")
        ):
            server._runner = mock.MagicMock(cleanup=self._nothing)
            server._run_server()
        self.assertIn("port taken", health_failure(self.port))

    async def _nothing(self):
        return None


if __name__ == "__main__":
    unittest.main()
