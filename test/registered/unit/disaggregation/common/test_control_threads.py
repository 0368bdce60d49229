"""Control threads survive a message that raises; a dead thread ends the engine.

Contract: an error in handling a message fails that message and nothing else; the thread
goes on with the next one; a thread that has died ends its engine with the signal that
upstream uses, and a teardown does not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import unittest
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import zmq
from kv_managers import (
    ThreadCase,
    close,
    ended,
    mooncake_decode,
    mooncake_prefill,
    nixl_decode,
    nixl_metadata,
    nixl_prefill,
    open_sender,
    real_end_engine,
    wait_for,
)

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import admission, conn, control_threads
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
)
from sglang.srt.disaggregation.common.control_threads import (
    GuardedSocket,
    log_once,
    should_log,
    survives,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=25, suite="base-a-test-cpu")


class Handler:
    """Admits what does not start with "no"; remembers what raised."""

    def __init__(self):
        self.failed = []

    def admits(self, message):
        if message == [b"raise"]:
            raise ValueError("not to be judged")
        return message[0] != b"no"

    def on_error(self, message, error):
        self.failed.append((message, str(error)))


class GuardedCase(CustomTestCase):
    def setUp(self):
        context = zmq.Context()
        self.addCleanup(context.destroy, linger=0)
        self.socket = context.socket(zmq.PULL)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.out = context.socket(zmq.PUSH)
        self.out.connect(f"tcp://127.0.0.1:{port}")
        self.manager = SimpleNamespace(
            server_socket=self.socket,
            _stopped=False,
            deferred_bootstrap=None,
            server_args=SimpleNamespace(enable_pd_role_switch=True),
        )
        self.handler = Handler()
        GuardedSocket.guard(self.manager, self.handler)
        ended.clear()

    def send(self, *words):
        for word in words:
            self.out.send_multipart([word])

    def run_loop(self, loop):
        """Run a guarded loop that stops its manager when it is done."""
        thread = threading.Thread(target=survives(self.manager)(loop), daemon=True)
        thread.start()
        thread.join(timeout=20)
        self.assertFalse(thread.is_alive())


class TestGuardedSocket(GuardedCase):
    def test_the_loop_gets_what_its_handler_admits(self):
        self.send(b"no", b"no", b"one", b"no", b"two")
        received = [self.socket.recv_multipart() for _ in range(2)]
        self.assertEqual(received, [[b"one"], [b"two"]])

    def test_a_switch_of_roles_is_not_held_up_by_a_message_that_is_not_admitted(self):
        """As Mooncake receives then: it polls, and asks whether it is stopped."""
        if not hasattr(CommonKVManager, "_make_worker_recv"):
            self.skipTest("this release cannot switch roles")
        receive = CommonKVManager._make_worker_recv(self.manager, self.socket, 10)
        self.assertIsNone(receive())
        self.send(b"one")
        self.assertEqual(wait_for(receive), [b"one"])

        def loop():
            while not self.manager._stopped:
                receive()

        self.send(b"no")
        threading.Timer(0.3, setattr, (self.manager, "_stopped", True)).start()
        self.run_loop(loop)
        self.assertEqual(ended, [])


class TestSurvives(GuardedCase):
    def test_an_error_costs_its_message_only(self):
        """Whether the loop or the handler raised; later messages are worked on."""
        received = []

        def loop():
            while True:
                message = self.socket.recv_multipart()
                if message == [b"bad"]:
                    raise KeyError("broke")
                received.append(message)
                self.manager._stopped = message == [b"last"]
                if self.manager._stopped:
                    return

        self.send(b"one", b"bad", b"raise", b"two", b"last")
        self.run_loop(loop)
        self.assertEqual(received, [[b"one"], [b"two"], [b"last"]])
        self.assertEqual(
            self.handler.failed,
            [([b"bad"], "'broke'"), ([b"raise"], "not to be judged")],
        )
        self.assertEqual(ended, [])

    def test_a_handler_that_raises_does_not_end_the_thread(self):
        self.handler.on_error = mock.Mock(side_effect=RuntimeError("cannot"))

        def loop():
            if self.socket.recv_multipart() == [b"last"]:
                self.manager._stopped = True
            raise KeyError

        self.send(b"one", b"two", b"last")
        self.run_loop(loop)
        self.assertEqual(self.handler.on_error.call_count, 2)

    def test_an_error_while_receiving_does_not_fail_the_last_message(self):
        def loop():
            self.socket.recv_multipart()
            self.socket.recv_multipart(zmq.NOBLOCK)  # raises: there is none

        self.send(b"one")
        with mock.patch.object(control_threads, "MAX_QUICK_FAILURES", 1):
            thread = threading.Thread(target=survives(self.manager)(loop))
            thread.start()
            thread.join(timeout=10)
        self.assertEqual(self.handler.failed, [])
        self.assertIn("cannot receive any more", ended[0])

    def test_a_context_that_is_torn_down_does_not_end_the_engine(self):
        def loop():
            raise zmq.ContextTerminated

        self.run_loop(loop)
        self.assertEqual(ended, [])

    def test_a_thread_without_messages_is_not_charged_for_those_of_another(self):
        """As a heartbeat checker beside a listener."""
        self.send(b"one")
        self.socket.recv_multipart()
        runs = iter(range(3))

        def loop():
            self.manager._stopped = next(runs) == 2
            raise KeyError

        self.run_loop(loop)
        self.assertEqual(self.handler.failed, [])


class TestLoops(ThreadCase):
    """Upstream's own loops. A thread that ended would work on no later message."""

    def outlives_bad_metadata(self, manager, start):
        self.start(manager, start)
        manager.decode_kv_args_table["decode-a"] = mock.Mock()
        for room in (1, 2):
            open_sender(manager, room)
        bad = nixl_metadata(1, self.wire.port)
        bad[5] = b"abc"  # not a whole number of indices
        guard = 0 if manager.kv_status_msg_tag else 1  # Mooncake has no first frame
        self.wire.send(*bad[guard:])
        self.wire.send(b"ABORT", b"2", b"127.0.0.1", str(self.wire.port).encode())
        self.assertTrue(self.fails(1, "[PD-METADATA]"))
        self.assertTrue(self.fails(2))

    def outlives_a_bad_status(self, manager, start):
        self.start(manager, start)
        apply = manager.apply_prefill_status

        def break_on_room_1(*, bootstrap_room, **rest):
            if bootstrap_room == 1:
                raise RuntimeError("broke here")
            apply(bootstrap_room=bootstrap_room, **rest)

        manager.apply_prefill_status = break_on_room_1
        manager.request_status.update(dict.fromkeys((1, 2), KVPoll.Bootstrapping))
        tag = [manager.kv_status_msg_tag] if manager.kv_status_msg_tag else []
        for room, status in ((b"1", KVPoll.Success), (b"2", KVPoll.Failed)):
            self.wire.send(*tag, room, str(int(status)).encode(), b"0", b"why")
        self.assertTrue(self.fails(1, "[PD-STATUS]", "broke here"))
        self.assertTrue(self.fails(2, "why"))

    def test_nixl_threads_outlive_a_message_that_raises(self):
        with self.subTest("prefill"):
            manager = nixl_prefill()
            self.outlives_bad_metadata(manager, manager._start_bootstrap_thread)
        with self.subTest("decode"):
            manager = nixl_decode()
            self.outlives_a_bad_status(manager, manager._start_decode_listener_thread)

    def test_mooncake_threads_outlive_a_message_that_raises(self):
        with self.subTest("prefill"):
            manager = mooncake_prefill()
            self.outlives_bad_metadata(manager, manager.start_prefill_thread)
        with self.subTest("decode"):
            manager = mooncake_decode()
            self.outlives_a_bad_status(manager, manager.start_decode_thread)


class SlowTable(dict):
    """Statuses of rooms; its first reader pauses, so that others get their turn."""

    def __init__(self):
        super().__init__()
        self.was_read = threading.Event()

    def get(self, room, default=None):
        found = super().get(room, default)
        if not self.was_read.is_set():
            self.was_read.set()
            time.sleep(0.5)
        return found


class TestStatus(ThreadCase):
    def test_metadata_that_arrives_while_the_request_opens_counts(self):
        manager = nixl_prefill()
        self.start(manager, manager._start_bootstrap_thread)
        manager.decode_kv_args_table["decode-a"] = mock.Mock()
        table = manager.request_status = SlowTable()
        opener = threading.Thread(target=open_sender, args=(manager, 1))
        opener.start()
        self.assertTrue(table.was_read.wait(5))
        self.wire.send(*nixl_metadata(1, self.wire.port))
        opener.join()
        self.assertIsNotNone(wait_for(lambda: 1 in manager.transfer_infos))
        self.assertTrue(self.is_ready(1))


class TestHeartbeat(CustomTestCase):
    def test_it_goes_on_after_an_error_with_a_lost_prefill(self):
        """Upstream forgets a lost prefill before anything can raise."""
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
            prefill_info_table={"first": mock.Mock(), "second": mock.Mock()},
            addr_to_rooms_tracker=defaultdict(set, {"first": {1}, "second": {2}}),
            request_status=dict.fromkeys((1, 2), KVPoll.Transferring),
        )
        record = manager.record_failure

        def break_on_room_1(room, reason):
            if room == 1:
                raise KeyError("always")
            record(room, reason)

        manager.record_failure = break_on_room_1
        ended.clear()
        manager._start_heartbeat_checker_thread()
        failed = wait_for(lambda: manager.request_status[2] == KVPoll.Failed)
        manager._heartbeat_shutdown.set()
        self.assertTrue(failed, "the second prefill was never missed")
        self.assertEqual(manager.prefill_info_table, {})
        time.sleep(0.1)
        self.assertEqual(ended, [], "a teardown ends no engine")


# -- what ends an engine, in real processes ---------------------------------------------

ENDED_BY_SIGNAL = 7


def front_end(scheduler, in_scheduler: bool) -> None:
    """A front end as upstream's: it ends on SIGQUIT, and has a scheduler below it."""
    signal.signal(signal.SIGQUIT, lambda *_: os._exit(ENDED_BY_SIGNAL))
    control_threads.end_engine = admission.end_engine = real_end_engine
    if not in_scheduler:
        scheduler()
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        scheduler()
        os._exit(0)
    os.waitpid(pid, 0)
    os._exit(0)


class TestDeath(CustomTestCase):
    def ends(self, body, in_scheduler=True):
        """Whether the engine whose process runs `body` ends."""
        context = multiprocessing.get_context("fork")
        engine = context.Process(target=front_end, args=(body, in_scheduler))
        engine.start()
        engine.join(timeout=30)
        if engine.is_alive():
            engine.kill()
            self.fail("the engine hangs")
        return engine.exitcode == ENDED_BY_SIGNAL

    def thread_ends(self, loop, stopped=False):
        def body():
            manager = SimpleNamespace(_stopped=stopped)
            thread = threading.Thread(target=survives(manager)(lambda: loop(manager)))
            thread.start()
            thread.join()

        return self.ends(body)

    def test_an_exit_in_a_thread_ends_the_engine(self):
        def loop(_):
            raise SystemExit(3)

        self.assertTrue(self.thread_ends(loop))

    def test_a_thread_that_cannot_receive_ends_it_within_seconds(self):
        def loop(_):
            raise OSError("socket is gone")

        began = time.monotonic()
        self.assertTrue(self.thread_ends(loop))
        self.assertLess(time.monotonic() - began, 10)

    def test_a_loop_that_returns_ends_it(self):
        self.assertTrue(self.thread_ends(lambda _: None))

    def test_a_teardown_does_not_end_the_engine(self):
        def loop(manager):
            manager._stopped = True
            raise OSError("socket was closed on purpose")

        self.assertFalse(self.thread_ends(loop))
        self.assertFalse(self.thread_ends(lambda _: None, stopped=True))

    def test_a_control_thread_of_upstream_that_exits_ends_it(self):
        """The real loop, killed between two messages."""

        def body():
            manager = nixl_prefill()
            manager.server_socket.handler.admits = mock.Mock(side_effect=SystemExit)
            sender = manager._zmq_ctx.socket(zmq.PUSH)
            sender.connect(f"tcp://127.0.0.1:{manager.rank_port}")
            sender.send(b"any")
            with mock.patch.object(threading, "Thread") as thread:
                manager._start_bootstrap_thread()
            thread.call_args.kwargs["target"]()

        self.assertTrue(self.ends(body))

    def test_a_prefill_that_cannot_register_ends_its_engine(self):
        def body():
            with (
                mock.patch.object(conn.requests, "put", side_effect=OSError("refused")),
                mock.patch.object(conn.time, "sleep"),
            ):
                CommonKVManager._register_topology_row(mock.Mock(), "http://x", {})

        self.assertTrue(self.ends(body))

    def port_is_taken(self, role):
        """Whether a front end of this role ends when another has its bootstrap port."""

        def body():
            disagg = SimpleNamespace(disaggregation_mode=role)
            with mock.patch.object(control_threads, "get_disagg", lambda: disagg):
                server = CommonKVBootstrapServer("127.0.0.1", port)
                server.thread.join(timeout=10)

        with socket.create_server(("127.0.0.1", 0)) as occupant:
            port = occupant.getsockname()[1]
            return self.ends(body, in_scheduler=False)

    def test_a_bootstrap_server_without_its_port_ends_its_process(self):
        self.assertTrue(self.port_is_taken("prefill"))

    def test_a_decode_that_may_switch_its_role_serves_without_a_bootstrap_server(self):
        self.assertFalse(self.port_is_taken("decode"))

    def test_the_reason_is_in_the_log(self):
        with (
            mock.patch.object(control_threads.os, "kill") as kill,
            mock.patch.object(control_threads.os, "_exit") as leave,
            self.assertLogs(control_threads.logger, "CRITICAL") as logs,
        ):
            real_end_engine("Control thread 'x' is dead: it broke")
        kill.assert_called_once_with(os.getppid(), signal.SIGQUIT)
        leave.assert_called_once_with(1)
        self.assertIn("'x' is dead: it broke", logs.output[0])


class TestLog(CustomTestCase):
    def test_a_subject_is_logged_in_full_and_then_once_per_interval(self):
        clock = mock.patch.object(control_threads.time, "monotonic", return_value=100.0)
        with clock as now:
            logged = [should_log("subject of this test", 3) for _ in range(10)]
            self.assertEqual(logged, [True] * 3 + [False] * 7)
            self.assertTrue(should_log("another subject of this test", 3))
            now.return_value += control_threads.LOG_INTERVAL_S
            self.assertTrue(should_log("subject of this test", 3))

    def test_a_line_is_logged_once(self):
        lines = []
        for text in ("one line", "one line", "another line", "one line"):
            log_once(lines.append, text)
        self.assertEqual(lines, ["one line", "another line"])


if __name__ == "__main__":
    unittest.main()
