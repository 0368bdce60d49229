"""Which prefill decode works with, and what happens to the requests of another.

Contract: one fetch on first contact, which holds up the scheduler for half a second at
most and once; a disagreement never raises, fails each request with a reason that names
both values, and is told to prefill; a refusal is checked again after a second; a prefill
that was restarted is noticed by the next heartbeat; a request that decode refuses at its
intake is told to prefill.
"""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from types import SimpleNamespace
from unittest import mock

from agreement_fixtures import NATIVE, PLAIN, patch_existing
from agreement_managers import WithServer, make_decode, wait_for

from sglang.srt.disaggregation import decode as decode_queues
from sglang.srt.disaggregation.agreement import decode_side
from sglang.srt.disaggregation.agreement.decode_side import prefill_description
from sglang.srt.disaggregation.agreement.description import (
    HEADER,
    INSTANCE,
    INSTANCE_HEADER,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.admission import ROOM_REFUSED
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, TransferBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

OTHER_WEIGHTS = {**NATIVE, "draft_weights": "bbbb"}


class TestFirstContact(WithServer):
    def reason(self, decode, room=7):
        self.assertEqual(self.request(decode, room).poll(), KVPoll.Failed)
        return decode.failure_records[room]

    def test_a_prefill_that_fits_is_accepted(self):
        self.prefill()
        decode = self.decode()
        self.assertEqual(self.request(decode).poll(), KVPoll.WaitingForInput)
        self.assertEqual(decode.prefill_info_table[self.addr].target_pp_ranks, [0])
        self.assertEqual(prefill_description(decode, self.addr)["mode"], "native")

    def test_one_fetch_serves_contact_and_sglangs_checks(self):
        self.prefill()
        decode = self.decode()
        with mock.patch.object(conn.requests, "get", wraps=conn.requests.get) as get:
            self.assertTrue(decode.try_ensure_parallel_info(self.addr))
            self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        self.assertEqual(get.call_count, 1)

    def test_description_is_judged_before_sglangs_checks(self):
        self.prefill({**NATIVE, "page_size": 64}, page_size=64)
        reason = self.reason(self.decode())
        self.assertIn("[PD-PAGE-SIZE]", reason)
        self.assertIn("prefill has page_size=64, decode has page_size=1", reason)

    def test_what_sglang_raises_is_a_refusal(self):
        self.prefill()
        decode = self.decode()
        decode.dcp_size = 2  # SGLang raises: decode DCP needs an MLA pool
        with self.assertLogs(decode_side.logger, "ERROR"):
            reason = self.reason(decode)
        self.assertIn("[PD-TOPOLOGY] PD decode DCP requires", reason)

    def test_a_prefill_without_description_is_judged_by_its_topology(self):
        self.prefill(None, page_size=64)
        self.assertIn("[PD-PAGE-SIZE]", self.reason(self.decode(PLAIN)))

    def test_a_prefill_without_description_cannot_serve_dspark(self):
        self.prefill(None)
        self.assertIn("[PD-UNDESCRIBED-PREFILL]", self.reason(self.decode()))
        allowed = self.decode({**NATIVE, "allow_cold_draft": True})
        self.assertEqual(self.request(allowed).poll(), KVPoll.WaitingForInput)
        self.assertIsNone(prefill_description(allowed, self.addr))

    def test_topology_shows_when_prefill_reserves_decodes_kv(self):
        """SGLang itself fails each request and leaves prefill waiting."""
        info = PrefillServerInfo(1, 1, 1, 1, None, None, True)
        # export: only <0.5.22
        if not hasattr(info, "decode_allocation_policy"):
            self.skipTest("this release has one policy")
        info.decode_allocation_policy = "prefill_complete"
        decode = self.decode({**PLAIN, "allocation_policy": "early"})
        contact = decode_side.Contact()
        peers = decode_side.peers_of(decode)
        peers[self.addr] = decode_side.PrefillPeer(contact=contact)
        answer = SimpleNamespace(headers={})
        self.assertTrue(decode_side.disagrees(decode, self.addr, info, answer))
        self.assertIn("[PD-ALLOCATION]", contact.reason)

    def test_cold_draft_is_refused_with_the_ways_out(self):
        self.prefill(PLAIN)
        reason = self.reason(self.decode())
        for way in (
            "--speculative-algorithm DSPARK",
            "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT=1",
        ):
            self.assertIn(way, reason)

    def test_an_accepted_warning_is_logged_once(self):
        self.prefill(PLAIN)
        decode = self.decode({**NATIVE, "allow_cold_draft": True})
        with self.assertLogs(decode_side.logger, "WARNING") as logs:
            for _ in range(3):
                decode.prefill_info_table.clear()
                self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        self.assertEqual(sum("COLD-DRAFT-ALLOWED" in line for line in logs.output), 1)

    def test_an_engine_without_description_behaves_as_sglang(self):
        self.prefill(None, page_size=64)
        with self.assertRaisesRegex(RuntimeError, "Page size mismatch"):
            self.decode(None).try_ensure_parallel_info(self.addr)

    def test_a_prefill_that_is_down_is_asked_again(self):
        decode = self.decode()
        self.assertFalse(decode.try_ensure_parallel_info(self.addr))
        self.prefill()
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))


class TestRefusal(WithServer):
    def test_request_fails_with_both_values(self):
        prefill, decode = self.prefill(OTHER_WEIGHTS), self.decode()
        self.assertEqual(self.request(decode).poll(), KVPoll.Failed)
        reason = decode.failure_records[7]
        self.assertIn("[PD-DRAFT-WEIGHTS]", reason)
        self.assertIn("draft_weights=bbbb", reason)
        self.assertIn("draft_weights=aaaa", reason)
        self.assertEqual(decode.connection_pool, {}, "registered with a refused one")
        self.assertEqual(self.told(prefill), [ROOM_REFUSED, b"7", reason.encode()])

    def test_every_rank_of_prefill_is_told(self):
        ranks = [
            self.prefill(OTHER_WEIGHTS, pp_rank=rank, pp_size=2) for rank in range(2)
        ]
        decode = self.decode()
        self.request(decode)
        for rank in ranks:
            self.assertEqual(self.told(rank)[:2], [ROOM_REFUSED, b"7"])

    def test_a_prefill_without_description_gets_an_abort_when_it_has_the_request(self):
        """SGLang drops one that comes earlier, and holds the request for 300 s."""
        prefill, decode = self.prefill(None), self.decode()
        for room in (7, 8):
            self.request(decode, room)
        self.assertFalse(prefill.control.poll(50))
        told = [self.told(prefill) for _ in range(4)]
        self.assertEqual(sorted(told), [[b"ABORT", b"7"]] * 2 + [[b"ABORT", b"8"]] * 2)

    def test_prefill_is_told_of_each_request_once(self):
        prefill, decode = self.prefill(OTHER_WEIGHTS), self.decode()
        for room in (1, 2):
            self.request(decode, room)
        rooms = [self.told(prefill)[1] for _ in range(2)]
        self.assertEqual(sorted(rooms), [b"1", b"2"])
        self.assertFalse(prefill.control.poll(200))

    def test_a_refusal_that_cannot_be_sent_to_prefill_is_logged(self):
        self.prefill(OTHER_WEIGHTS)
        decode = self.decode()
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        self.server.close()
        with self.assertLogs(decode_side.logger, "WARNING") as logs:
            self.request(decode)
            self.assertTrue(wait_for(lambda: "was not told" in "".join(logs.output)))

    def test_prefill_started_with_other_flags_is_served_by_the_same_decode(self):
        self.prefill(OTHER_WEIGHTS)
        decode = self.decode()
        self.assertEqual(self.request(decode, 1).poll(), KVPoll.Failed)
        self.restart_server()
        self.prefill()
        time.sleep(decode_side._REFUSAL_AGE_S + 0.1)
        self.assertEqual(self.request(decode, 2).poll(), KVPoll.WaitingForInput)

    def test_an_old_refusal_of_a_prefill_that_is_down_is_dropped(self):
        self.prefill(OTHER_WEIGHTS)
        decode = self.decode()
        self.request(decode)
        self.server.close()
        time.sleep(decode_side._REFUSAL_AGE_S + 0.1)
        self.assertFalse(decode.try_ensure_parallel_info(self.addr))


class TestRefusedRequest(WithServer):
    """A request that decode refuses at its intake, or whose prefill never answers."""

    def queue(self, decode, **state):
        queue = object.__new__(DecodePreallocQueue)
        known = {"kv_manager": decode, "transfer_backend": TransferBackend.NIXL}
        queue.__dict__.update(known | state)
        return queue

    def refuse(self, decode, host="127.0.0.1", **finished):
        """SGLang's intake, which finds the request too long for its pool."""
        queue = self.queue(decode)
        req = SimpleNamespace(
            bootstrap_host=host,
            bootstrap_port=self.server.port,
            bootstrap_room=7,
            disagg_prefill_dp_rank=None,
            finished_reason=FINISH_ABORT("too long", HTTPStatus.BAD_REQUEST),
        )
        queue._check_if_req_exceed_kv_capacity = lambda req: True
        with patch_existing(decode_queues, is_unadmitted_reject=lambda req: False):
            queue.add(req)
        return queue

    def test_prefill_is_told_of_a_request_that_decode_refuses(self):
        prefill, decode = self.prefill(), self.decode()
        self.refuse(decode)
        told = [ROOM_REFUSED, b"7", b"[PD-BAD-REQUEST] too long"]
        self.assertEqual(self.told(prefill), told)
        self.assertEqual(decode.request_status, {}, "the room is still open")

    def test_a_prefill_without_description_gets_an_abort(self):
        prefill, decode = self.prefill(None), self.decode(PLAIN)
        self.refuse(decode)
        self.assertEqual(self.told(prefill), [b"ABORT", b"7"])

    def test_every_rank_that_may_hold_the_request_is_told(self):
        """Where the router spreads requests over DP ranks, decode does not know which."""
        sizes = {"attn_dp_size": 2, "attn_tp_size": 1}
        ranks = [self.prefill(attn_dp_rank=rank, **sizes) for rank in range(2)]
        self.refuse(self.decode())
        for rank in ranks:
            self.assertEqual(self.told(rank)[:2], [ROOM_REFUSED, b"7"])

    def test_nobody_is_told_of_a_request_without_a_prefill(self):
        decode = self.decode()
        self.refuse(decode)  # no prefill has registered
        self.prefill()
        with mock.patch.object(decode_side, "_tell") as tell:
            self.refuse(decode, host=FAKE_BOOTSTRAP_HOST)
        self.assertEqual(tell.call_count, 0)

    def test_a_room_that_another_request_uses_goes_on(self):
        self.prefill()
        decode = self.decode()
        decode.request_status[7] = KVPoll.WaitingForInput
        with mock.patch.object(decode_side, "_tell") as tell:
            self.refuse(decode)
        self.assertEqual(tell.call_count, 0)
        self.assertEqual(decode.request_status, {7: KVPoll.WaitingForInput})

    def test_a_prefill_that_does_not_answer_is_named(self):
        decode = self.decode()
        address = "127.0.0.1:1"
        receiver = NixlKVReceiver(decode, address, 7)
        queue = self.queue(
            decode,
            _ensure_last_attempt_time={},
            _ensure_retry_interval=0.0,
            _ensure_retry_count={},
            _max_ensure_retries=1,
        )
        held = SimpleNamespace(
            req=SimpleNamespace(bootstrap_room=7), kv_receiver=receiver
        )
        queue._ensure_prefill_info({address: [held]})
        self.assertEqual(receiver.poll(), KVPoll.Failed)
        for text in ("[PD-NO-PREFILL]", address, "after 1 attempts"):
            self.assertIn(text, decode.failure_records[7])


class _Answer(http.server.BaseHTTPRequestHandler):
    """Answers any question with `body` and `header`, once `gate` is open."""

    body, header = b"", None
    gate = threading.Event()

    def do_GET(self):
        self.gate.wait(10)
        self.send_response(200)
        if self.header is not None:
            self.send_header(HEADER, self.header)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args):
        pass


class TestOddPrefills(CustomTestCase):
    """Answers that are late, broken or none must not reach the scheduler."""

    def setUp(self):
        self.decode = make_decode(NATIVE)
        self.gate = threading.Event()
        self.gate.set()
        self.addCleanup(self.gate.set)

    def serve(self, body: bytes, header: str | None = None) -> str:
        answers = {"body": body, "header": header, "gate": self.gate}
        handler = type("Answer", (_Answer,), answers)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return f"127.0.0.1:{server.server_port}"

    def topology(self) -> bytes:
        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
        rest = {"page_size": 1, "kv_cache_dtype": "auto", "follow_bootstrap_room": True}
        return json.dumps(sizes | rest).encode()

    def asked(self, address):
        """(answer, seconds that the scheduler waited)"""
        began = time.monotonic()
        ready = self.decode.try_ensure_parallel_info(address)
        return ready, time.monotonic() - began

    def test_an_answer_without_a_topology_means_not_ready(self):
        for body in (b"[]", b"null", b"{}", b"", b'{"attn_tp_size": []}'):
            with self.subTest(body):
                self.assertFalse(self.asked(self.serve(body))[0])
        self.assertEqual(self.decode.prefill_info_table, {})

    def test_a_header_that_cannot_be_read_counts_as_no_description(self):
        for header in ("[]", "null", "{", "[" * 9000):
            address = self.serve(self.topology(), header)
            with self.subTest(header[:20]):
                with self.assertLogs(decode_side.logger, "ERROR") as logs:
                    self.assertTrue(self.asked(address)[0])
                self.assertIn("[PD-UNDESCRIBED-PREFILL]", "".join(logs.output))

    def test_values_of_a_wrong_type_are_refused(self):
        for change in (
            {"aux": 3},
            {"tp": {}},
        ):
            header = json.dumps({**NATIVE, "tp": 2, **change})
            address = self.serve(self.topology(), header)
            with self.subTest(change):
                self.assertTrue(self.asked(address)[0])
                refusal = decode_side.peers_of(self.decode)[address].refusal
                self.assertIsNotNone(refusal)

    def test_first_contact_holds_the_scheduler_once(self):
        self.gate.clear()
        address = self.serve(self.topology(), json.dumps(NATIVE))
        waits = [self.asked(address) for _ in range(5)]
        self.assertEqual([ready for ready, _ in waits], [False] * 5)
        self.assertLess(sum(seconds for _, seconds in waits), 1.5)
        self.gate.set()
        self.assertTrue(wait_for(lambda: self.asked(address)[0]), "answered late")
        self.asked(address)
        self.assertEqual(prefill_description(self.decode, address), NATIVE)

    def test_an_address_that_never_answers_is_waited_for_once(self):
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        address = "127.0.0.1:%d" % listener.getsockname()[1]
        get = conn.requests.get
        with mock.patch.object(
            conn.requests, "get", lambda url, timeout: get(url, timeout=0.6)
        ):
            began = time.monotonic()
            waited = [self.asked(address)[1] for _ in range(2)]
            while time.monotonic() - began < 2.0:  # some fetches fail meanwhile
                waited.append(self.asked(address)[1])
                time.sleep(0.1)
        self.assertLess(max(waited[1:]), 0.3)
        self.assertLess(waited[0], 1.0)

    def test_a_refusal_stands_while_prefill_is_slow_to_answer_again(self):
        address = self.serve(self.topology(), json.dumps(OTHER_WEIGHTS))
        self.assertTrue(self.asked(address)[0])
        self.gate.clear()
        time.sleep(decode_side._REFUSAL_AGE_S + 0.1)
        for _ in range(3):
            self.assertTrue(self.asked(address)[0])
            receiver = mock.MagicMock(kv_mgr=self.decode, bootstrap_addr=address)
            self.assertTrue(decode_side.refuse_request(receiver, 0))

    def test_a_refusal_stands_when_the_next_fetch_begins_late(self):
        """Other prefills keep all fetching threads until the request is refused again."""
        address = self.serve(self.topology(), json.dumps(OTHER_WEIGHTS))
        receiver = mock.MagicMock(kv_mgr=self.decode, bootstrap_addr=address)
        self.assertTrue(self.asked(address)[0])
        self.assertTrue(decode_side.refuse_request(receiver, 0))
        time.sleep(decode_side._REFUSAL_AGE_S + 0.1)
        peers, others_answer = decode_side.peers_of(self.decode), threading.Event()
        peers.fetching = ThreadPoolExecutor(1)
        peers.fetching.submit(others_answer.wait, 10)
        self.assertTrue(self.asked(address)[0])
        others_answer.set()
        peers.fetching.submit(int).result(10)
        for _ in range(2):
            self.assertTrue(decode_side.refuse_request(receiver, 0))
            self.assertTrue(self.asked(address)[0])

    def test_a_prefill_found_restarted_while_it_is_asked_again_is_judged(self):
        """A heartbeat and the scheduler meet at a refused prefill."""
        header = json.dumps({**OTHER_WEIGHTS, INSTANCE: "former"})
        address = self.serve(self.topology(), header)
        receiver = mock.MagicMock(kv_mgr=self.decode, bootstrap_addr=address)
        self.assertTrue(self.asked(address)[0])
        time.sleep(decode_side._REFUSAL_AGE_S + 0.1)
        self.gate.clear()

        def scheduler_goes_on(_):
            self.assertTrue(decode_side.refuse_request(receiver, 0))
            self.asked(address)

        answer = SimpleNamespace(headers={INSTANCE_HEADER: "new"})
        with (
            mock.patch.object(decode_side.logger, "error", scheduler_goes_on),
            mock.patch.object(self.decode, "_handle_node_failure"),
        ):
            decode_side.compare_instance(self.decode, address, answer)
        self.decode.prefill_info_table.clear()  # as that method does
        self.gate.set()
        accepted = wait_for(lambda: address in self.decode.prefill_info_table, 1.0)
        self.assertIsNone(accepted, "it was not judged")
        self.assertTrue(self.asked(address)[0])
        self.assertTrue(decode_side.refuse_request(receiver, 0))


class TestRestart(WithServer):
    """A prefill that comes back on its address before a heartbeat misses it."""

    def setUp(self):
        super().setUp()
        self.prefill()
        self.client = self.decode()
        self.assertEqual(self.request(self.client, 1).poll(), KVPoll.WaitingForInput)

    def is_known(self):
        return self.addr in self.client.prefill_info_table

    def test_next_heartbeat_notices_a_restarted_prefill(self):
        self.client._start_heartbeat_checker_thread()
        time.sleep(0.3)
        self.assertEqual(self.client.failure_records, {}, "the same one is left alone")
        self.client.max_failures = 1 << 30  # only another instance is noticed now
        self.restart_server()
        self.assertTrue(wait_for(lambda: 1 in self.client.failure_records))
        self.assertIn("Lost connection", self.client.failure_records[1])
        self.assertEqual(self.client.check_status(1), KVPoll.Failed)
        self.assertFalse(self.is_known())
        self.assertEqual(self.client.connection_pool, {}, "the old ports are kept")
        self.prefill(OTHER_WEIGHTS)
        self.assertEqual(self.request(self.client, 2).poll(), KVPoll.Failed)
        self.assertIn("[PD-DRAFT-WEIGHTS]", self.client.failure_records[2])

    def test_new_prefill_is_kept_after_a_restart(self):
        self.restart_server()
        self.prefill()
        self.heartbeat()
        self.assertFalse(self.is_known())
        self.assertEqual(self.request(self.client, 2).poll(), KVPoll.WaitingForInput)
        self.heartbeat()
        self.assertTrue(self.is_known())

    def heartbeat(self):
        answer = conn.requests.get(f"http://{self.addr}/health", timeout=5)
        self.assertIn(INSTANCE_HEADER, answer.headers)
        decode_side.compare_instance(self.client, self.addr, answer)

    def test_a_health_answer_without_instance_says_nothing(self):
        silent = SimpleNamespace(headers={})
        decode_side.compare_instance(self.client, self.addr, silent)
        self.assertTrue(self.is_known())

    def test_a_prefill_without_description_is_left_to_sglang(self):
        self.restart_server()
        self.prefill(None)
        self.client = self.decode(PLAIN)
        self.request(self.client, 1)
        self.heartbeat()
        self.assertTrue(self.is_known())


if __name__ == "__main__":
    unittest.main()
