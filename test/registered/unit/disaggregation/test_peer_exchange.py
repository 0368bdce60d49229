"""How the two engines get each other's description, and how decode refuses.

Contract: the bootstrap server hands prefill's description on without changing its
answers' bodies; decode checks on first contact, never raises for a disagreement, fails
each request of a refused prefill with a reason that names both values, tells prefill,
and looks again after a second; decode's description travels in its registration.
"""

from __future__ import annotations

import dataclasses
import functools
import http.client
import http.server
import inspect
import json
import socket
import threading
import time
import unittest
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import numpy as np
import requests
from peer_fixtures import (
    NATIVE,
    PLAIN,
    Wire,
    close,
    nixl_decode,
    nixl_prefill,
    open_receiver,
    open_sender,
    patch_existing,
    wait_for,
)

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import (
    conn,
    engine_facts,
    peer_agreement,
    peer_background,
    prefill_check,
    prefill_refusal,
    prefill_restart,
)
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    PrefillServerInfo,
)
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.environ import envs
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

REFUSED_TAG = peer_agreement.REFUSED_TAG
TOPOLOGY = {
    "attn_tp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "follow_bootstrap_room": True,
}
TOPOLOGY_QUERY = (
    "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
)


def serve(port: int = 0) -> CommonKVBootstrapServer:
    server = CommonKVBootstrapServer("127.0.0.1", port or get_free_port())
    url = f"http://127.0.0.1:{server.port}/health"

    def up():
        try:
            return requests.get(url, timeout=1).status_code == 200
        except requests.RequestException:
            return False

    assert wait_for(up, 10), "the bootstrap server did not start"
    return server


def stop(server: CommonKVBootstrapServer) -> None:
    server.close()


def parallel_context(**changes):
    sizes = {
        "enable_cp_tp_group_sharing": False,
        "load_balance_method": "round_robin",
        "enable_dsa_cache_layer_split": False,
        "enable_kv_cache_sharding": False,
    }
    return SimpleNamespace(**(sizes | changes))


def register(manager, server, *, pp_rank=0, pp_size=1, page_size=1) -> None:
    """Run upstream's own registration of one prefill rank."""
    manager.__dict__.update(
        dist_init_addr=None,
        bootstrap_host="127.0.0.1",
        bootstrap_port=server.port,
        attn_dp_size=1,
        system_dp_size=1,
        system_dp_rank=0,
        pp_size=pp_size,
        pp_rank=pp_rank,
    )
    manager.kv_args.page_size = page_size
    disagg = SimpleNamespace(disaggregation_decode_allocation_policy="early")
    with (
        mock.patch.object(conn, "get_parallel", return_value=parallel_context()),
        mock.patch.object(conn, "get_disagg", return_value=disagg),
        mock.patch.object(conn, "get_serving", return_value=SimpleNamespace(port=1)),
    ):
        CommonKVManager.register_to_bootstrap(manager)


def topology_of(server) -> requests.Response:
    return requests.get(
        f"http://127.0.0.1:{server.port}/route?{TOPOLOGY_QUERY}", timeout=5
    )


class _WithServer(CustomTestCase):
    def setUp(self):
        # A busy machine must not turn an answer into none.
        patched = mock.patch.object(prefill_check, "_PATIENCE_S", 10.0)
        patched.start()
        self.addCleanup(patched.stop)
        self.server = serve()
        self.addCleanup(stop, self.server)
        self.addr = f"127.0.0.1:{self.server.port}"

    def prefill(self, description=NATIVE, **registration):
        manager = nixl_prefill(description)
        self.addCleanup(close, manager)
        register(manager, self.server, **registration)
        return manager

    def decode(self, description=NATIVE, **kv_args):
        manager = nixl_decode(description, **kv_args)
        self.addCleanup(close, manager)
        return manager


class TestBootstrapExchange(_WithServer):
    def shown(self):
        """What the server says of its engine, but for which start of it this is."""
        kept = json.loads(topology_of(self.server).headers[peer_agreement.HEADER])
        self.assertEqual(kept.pop("instance"), self.server.peer_instance)
        return kept

    def test_prefill_registers_with_its_description(self):
        with mock.patch.object(conn.requests, "put") as put:
            put.return_value.status_code = 200
            self.prefill({**NATIVE, "kv_entries": 12})
        sent = put.call_args.kwargs["json"][peer_agreement.PAYLOAD_KEY]
        self.assertEqual(sent, NATIVE, "facts of one rank stay with the rank")

    def test_server_answers_with_the_description(self):
        self.prefill()
        self.assertEqual(self.shown(), NATIVE)

    def test_the_body_is_what_an_old_decode_understands(self):
        self.prefill()
        known = {field.name for field in dataclasses.fields(PrefillServerInfo)}
        body = topology_of(self.server).json()
        self.assertLessEqual(set(body), known)
        self.assertEqual(PrefillServerInfo(**body).page_size, 1)

    def test_ranks_that_differ_are_told_apart(self):
        self.prefill(pp_rank=0, pp_size=2)
        self.prefill({**NATIVE, "draft_weights": "bbbb"}, pp_rank=1, pp_size=2)
        kept = self.shown()
        self.assertEqual(kept["conflict"], "draft_weights: aaaa and bbbb")

    def test_a_rank_started_again_clears_its_old_conflict(self):
        self.prefill(pp_rank=0, pp_size=2)
        self.prefill({**NATIVE, "draft_weights": "bbbb"}, pp_rank=1, pp_size=2)
        self.prefill(pp_rank=1, pp_size=2)
        self.assertEqual(self.shown(), NATIVE)

    def test_what_one_rank_does_not_know_is_not_known_and_no_conflict(self):
        unreadable = {k: v for k, v in NATIVE.items() if k != "draft_weights"}
        self.prefill({**NATIVE, "allow_cold_draft": True}, pp_rank=0, pp_size=2)
        self.prefill({**unreadable, "allow_cold_draft": False}, pp_rank=1, pp_size=2)
        self.assertEqual(self.shown(), {**unreadable, "allow_cold_draft": False})

    def test_a_payload_that_is_no_description_is_ignored(self):
        server = SimpleNamespace()
        for payload in ([], None, {}, {peer_agreement.PAYLOAD_KEY: [1]}):
            peer_agreement._keep(server, payload)
        self.assertFalse(hasattr(server, "peer_description"))

    def test_a_prefill_without_description_gets_no_header(self):
        self.prefill(None)
        self.assertNotIn(peer_agreement.HEADER, topology_of(self.server).headers)


class TestDecodeRefuses(_WithServer):
    def request(self, decode, room=7):
        receiver = open_receiver(decode, self.addr, room)
        receiver.init(0)
        return receiver

    def reason(self, decode, room=7):
        return decode.failure_records[room]

    def test_an_agreeing_prefill_is_accepted(self):
        self.prefill()
        decode = self.decode()
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        self.assertIsNone(prefill_check.refusal_of(decode, self.addr))
        self.assertEqual(decode.prefill_info_table[self.addr].target_pp_ranks, [0])

    def test_a_prefills_mode_is_kept_for_its_requests(self):
        """A slot without rows means draft KV from one prefill, nothing from another."""
        allowed = {**NATIVE, "allow_cold_draft": True}
        cold = {**NATIVE, "mode": "none", "algorithm": None}
        for theirs, mode in ((NATIVE, "native"), (cold, "none"), (None, None)):
            with self.subTest(mode=mode):
                self.setUp()
                self.prefill(theirs)
                decode = self.decode(allowed)
                self.assertTrue(decode.try_ensure_parallel_info(self.addr))
                self.assertIsNone(prefill_check.refusal_of(decode, self.addr))
                info = decode.prefill_info_table[self.addr]
                self.assertEqual(info.peer_description.get("mode"), mode)

    def test_page_size_is_refused_not_raised(self):
        self.prefill({**NATIVE, "page_size": 64}, page_size=64)
        decode = self.decode()
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        refused = prefill_check.refusal_of(decode, self.addr)
        self.assertIn(
            "prefill has page_size=64, decode has page_size=1", refused.reason
        )

    def test_page_size_of_an_unpatched_prefill_is_refused_not_raised(self):
        self.prefill(None, page_size=64)
        decode = self.decode(PLAIN)
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        refused = prefill_check.refusal_of(decode, self.addr)
        self.assertIn("[PD-PAGE-SIZE]", refused.reason)
        self.assertFalse(refused.admits)

    def test_what_only_upstream_checks_is_refused_not_raised(self):
        self.prefill()
        decode = self.decode()
        decode.dcp_size = 2  # upstream raises: decode DCP needs an MLA pool
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        refused = prefill_check.refusal_of(decode, self.addr)
        self.assertIn("[PD-UPSTREAM] PD decode DCP requires", refused.reason)

    def test_refused_request_fails_with_both_values(self):
        prefill = self.prefill({**NATIVE, "draft_weights": "bbbb"})
        decode = self.decode()
        decode.try_ensure_parallel_info(self.addr)
        receiver = self.request(decode)
        self.assertEqual(receiver.poll(), KVPoll.Failed)
        self.assertIn("[PD-DRAFT-WEIGHTS]", self.reason(decode))
        self.assertIn("draft_weights=bbbb", self.reason(decode))
        self.assertIn("draft_weights=aaaa", self.reason(decode))
        self.assertEqual(decode.connection_pool, {}, "a refused peer got registered")
        told = prefill.server_socket.recv_multipart()
        self.assertEqual(told[:2], [peer_agreement.REFUSED_TAG, b"7"])
        self.assertIn(b"[PD-DRAFT-WEIGHTS]", told[2])

    def test_prefill_that_does_not_admit_is_told_in_its_own_words(self):
        """One that describes itself may still lack the component that reads refusals."""
        prefill = self.prefill(
            {k: v for k, v in PLAIN.items() if k != "admits"} | {"page_size": 64},
            page_size=64,
        )
        decode = self.decode()
        decode.try_ensure_parallel_info(self.addr)
        self.request(decode)
        self.assertTrue(prefill.server_socket.poll(5000))
        self.assertEqual(prefill.server_socket.recv_multipart(), [b"ABORT", b"7"])

    def test_an_unpatched_prefill_shows_when_it_wants_decode_to_allocate(self):
        """From its topology; upstream itself would leave prefill waiting."""
        topology = PrefillServerInfo(1, 1, 1, 1, None, None, True)
        theirs = prefill_check._description_from(None, topology)
        policy = getattr(topology, "decode_allocation_policy", None)
        self.assertEqual(theirs["allocation_policy"], policy)
        if policy is None:
            self.skipTest("this release has one policy")
        topology.decode_allocation_policy = "prefill_complete"
        theirs = prefill_check._description_from(None, topology)
        ours = {**PLAIN, "allocation_policy": "early"}
        codes = [v.code for v in peer_agreement.judge(decode=ours, prefill=theirs)]
        self.assertIn("PD-ALLOCATION", codes)

    def test_contacts_are_kept_for_the_next_refusal(self):
        self.prefill({**NATIVE, "draft_weights": "bbbb"})
        decode = self.decode()
        decode.try_ensure_parallel_info(self.addr)
        self.request(decode)
        before = prefill_check.refusal_of(decode, self.addr)
        self.assertTrue(wait_for(lambda: before.contacts.get(0, (0, []))[1]))
        before.since -= 60
        decode.try_ensure_parallel_info(self.addr)
        after = prefill_check.refusal_of(decode, self.addr)
        self.assertIsNot(after, before)
        self.assertEqual(after.contacts, before.contacts)

    def test_unpatched_prefill_is_told_in_its_own_words(self):
        prefill = self.prefill(None)
        decode = self.decode()
        decode.try_ensure_parallel_info(self.addr)
        self.request(decode)
        self.assertIn("[PD-UNPATCHED-PREFILL]", self.reason(decode))
        for _ in range(1 + len(prefill_refusal._ABORT_AGAIN_S)):
            told = prefill.server_socket
            self.assertTrue(told.poll(5000), "an early abort is dropped upstream")
            self.assertEqual(told.recv_multipart(), [b"ABORT", b"7"])

    def test_cold_draft_is_refused_with_three_ways_out(self):
        self.prefill(PLAIN)
        decode = self.decode()
        decode.try_ensure_parallel_info(self.addr)
        self.request(decode)
        for way in (
            "--speculative-algorithm DSPARK",
            "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1",
            "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT=1",
        ):
            self.assertIn(way, self.reason(decode))

    def test_opt_out_accepts_a_cold_draft_and_says_so_once(self):
        self.prefill(PLAIN)
        decode = self.decode({**NATIVE, "allow_cold_draft": True})
        with self.assertLogs(peer_agreement.logger, "WARNING") as logs:
            for _ in range(3):
                decode.prefill_info_table.clear()
                self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        self.assertEqual(sum("COLD-DRAFT-ALLOWED" in line for line in logs.output), 1)
        self.assertIsNone(prefill_check.refusal_of(decode, self.addr))

    def test_a_prefill_restarted_with_other_flags_is_looked_at_again(self):
        self.prefill({**NATIVE, "draft_weights": "bbbb"})
        decode = self.decode()
        decode.try_ensure_parallel_info(self.addr)
        self.server.peer_description = NATIVE
        refused = prefill_check.refusal_of(decode, self.addr)
        refused.since -= prefill_refusal._LOOK_AGAIN_S + 0.1
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        self.assertIsNone(prefill_check.refusal_of(decode, self.addr))

    def test_a_request_looks_at_an_old_refusal_again(self):
        self.prefill({**NATIVE, "draft_weights": "bbbb"})
        decode = self.decode()
        decode.try_ensure_parallel_info(self.addr)
        self.server.peer_description = NATIVE
        refused = prefill_check.refusal_of(decode, self.addr)
        refused.since -= prefill_refusal._LOOK_AGAIN_S + 0.1
        receiver = open_receiver(decode, self.addr, 9)
        self.assertFalse(prefill_check.refuse_request(receiver, 0))

    def test_a_prefill_that_is_down_is_asked_again(self):
        decode = self.decode()
        self.assertFalse(decode.try_ensure_parallel_info("127.0.0.1:9"))
        self.assertEqual(decode.prefill_info_table, {})

    def test_a_malformed_description_is_refused(self):
        self.prefill({**NATIVE, "tp": "two"})
        decode = self.decode()
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        refused = prefill_check.refusal_of(decode, self.addr)
        self.assertIn("[PD-MALFORMED]", refused.reason)

    def test_an_engine_without_description_behaves_as_upstream(self):
        self.prefill(None, page_size=64)
        decode = self.decode(None)
        with self.assertRaisesRegex(RuntimeError, "Page size mismatch"):
            decode.try_ensure_parallel_info(self.addr)


class TestLostRegistration(_WithServer):
    """Prefill forgets a decode, as after a restart that no heartbeat noticed."""

    def test_the_request_after_the_failed_one_is_served(self):
        prefill, decode = self.prefill(), self.decode()
        prefill._start_bootstrap_thread()
        decode._start_decode_listener_thread()
        decode.agent.name = "decode-a"
        decode.agent.get_agent_metadata = lambda: b"metadata of decode-a"
        lists = "kv_data_mem_kinds state_data_ptrs state_item_lens state_data_lens"
        empty = {name: [] for name in (*lists.split(), "state_layer_ids")}
        decode.kv_args.__dict__.update(empty, gpu_id=0)
        self.assertTrue(decode.try_ensure_parallel_info(self.addr))
        self.assertTrue(self.is_served(prefill, decode, 1))
        prefill.decode_kv_args_table.clear()
        self.assertFalse(self.is_served(prefill, decode, 2))
        self.assertTrue(wait_for(lambda: 2 in decode.failure_records))
        self.assertIn("[PD-NOT-REGISTERED]", decode.failure_records[2])
        self.assertTrue(wait_for(lambda: decode.connection_pool == {}))
        self.assertTrue(self.is_served(prefill, decode, 3))

    def is_served(self, prefill, decode, room) -> bool:
        """Whether prefill is ready to send, once decode asked for this room."""
        open_sender(prefill, room)
        early = SimpleNamespace(disaggregation_decode_allocation_policy="early")
        with patch_existing(conn, get_disagg=lambda: early):
            receiver = open_receiver(decode, self.addr, room)
            receiver.init(0)
            receiver.send_metadata(np.array([1, 2], dtype=np.int32), aux_index=0)
        status = prefill.request_status
        final = (KVPoll.WaitingForInput, KVPoll.Failed)
        self.assertTrue(wait_for(lambda: status.get(room) in final))
        return status[room] == KVPoll.WaitingForInput


class _Liar(http.server.BaseHTTPRequestHandler):
    """Answers any question with `body` and `header`, in a time of its own."""

    body, header = b"", None

    def do_GET(self):
        self.send_response(200)
        if self.header is not None:
            self.send_header(peer_agreement.HEADER, self.header)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args):
        pass


class TestHostilePrefill(CustomTestCase):
    """Decode's scheduler asks the address that a request names, whoever answers."""

    def setUp(self):
        self.decode = nixl_decode()
        self.addCleanup(close, self.decode)

    def serve(self, body: bytes, header: str | None = None) -> str:
        handler = type("Liar", (_Liar,), {"body": body, "header": header})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return f"127.0.0.1:{server.server_port}"

    def topology(self, **changes) -> bytes:
        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
        rest = {"page_size": 1, "kv_cache_dtype": "auto", "follow_bootstrap_room": True}
        return json.dumps(sizes | rest | changes).encode()

    def test_an_answer_that_is_no_topology_is_not_ready(self):
        deep = b"[" * 30_000
        for body in (b"[]", b"null", b"3", b"{}", b"", deep, b'{"attn_tp_size": []}'):
            with self.subTest(body[:20]):
                found = self.decode.try_ensure_parallel_info(self.serve(body))
                self.assertIs(found, False)
        self.assertEqual(self.decode.prefill_info_table, {})

    def test_addresses_that_are_none_are_not_ready(self):
        for address in ("", "x", "127.0.0.1:http", "a b:1", "\udcff:1", "[::1:9"):
            with self.subTest(address):
                self.assertIs(self.decode.try_ensure_parallel_info(address), False)

    def test_a_header_that_is_no_description_counts_as_none(self):
        for header in ("[" * 30_000, "[" * 9000, "[]", "null", "{", "7" * 60_000):
            address = self.serve(self.topology(), header)
            with self.subTest(header[:20]):
                self.assertTrue(self.decode.try_ensure_parallel_info(address))
                refused = prefill_check.refusal_of(self.decode, address)
                self.assertIn("[PD-UNPATCHED-PREFILL]", refused.reason)

    def test_descriptions_of_wrong_types_are_refused(self):
        for change in ({"aux": 3}, {"tp": {}}, {"dspark": 1, "mode": "tail"}):
            header = json.dumps({**NATIVE, **change})
            address = self.serve(self.topology(), header)
            with self.subTest(change):
                self.assertTrue(self.decode.try_ensure_parallel_info(address))
                self.assertIsNotNone(prefill_check.refusal_of(self.decode, address))

    def test_an_error_of_our_own_refuses_and_does_not_raise(self):
        address = self.serve(self.topology())
        broken = mock.patch.object(prefill_check, "_disagreement", side_effect=KeyError)
        with broken:
            self.assertTrue(self.decode.try_ensure_parallel_info(address))
        refused = prefill_check.refusal_of(self.decode, address)
        self.assertIn("[PD-INTERNAL]", refused.reason)
        receiver = open_receiver(self.decode, address, 5)
        receiver.init(0)
        self.assertEqual(receiver.poll(), KVPoll.Failed)


class TestMutePrefill(CustomTestCase):
    """An address that accepts connections and says nothing, or too little at a time."""

    def setUp(self):
        self.decode = nixl_decode()
        self.addCleanup(close, self.decode)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.listener.close)
        self.addr = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.asked = []
        asks = peer_background.ask

        def counted(*args, **kwargs):
            self.asked.append(args)
            return asks(*args, **kwargs)

        for module in (prefill_check, prefill_refusal):
            patch = mock.patch.object(module, "ask", counted)
            patch.start()
            self.addCleanup(patch.stop)

    def refuse(self, **changes):
        info = prefill_check._placeholder()
        refused = prefill_check.Refusal("no", time.monotonic() - 60, True, **changes)
        info.peer_refusal = refused
        self.decode.prefill_info_table[self.addr] = info
        return refused

    def test_refused_requests_do_not_wait_for_it(self):
        refused = self.refuse()
        began = time.monotonic()
        for room in range(5):
            receiver = open_receiver(self.decode, self.addr, room)
            receiver.init(0)
            self.assertEqual(receiver.poll(), KVPoll.Failed)
        self.assertLess(time.monotonic() - began, 3)
        time.sleep(peer_background.ANSWER_S + 0.5)
        self.assertLessEqual(len(self.asked), 2, "one look and one try to tell")
        self.assertGreater(refused.look_again_s, prefill_refusal._LOOK_AGAIN_S)

    def test_a_mute_one_is_never_waited_for_again(self):
        self.refuse()
        prefill_check.ensure_prefill(self.decode, self.addr)
        time.sleep(peer_background.ANSWER_S + 0.5)
        refused = prefill_check.refusal_of(self.decode, self.addr)
        for _ in range(3):
            refused.since -= 60
            began = time.monotonic()
            self.assertTrue(prefill_check.ensure_prefill(self.decode, self.addr))
            self.assertLess(time.monotonic() - began, 0.2)
        self.assertGreaterEqual(len(self.asked), 2, "asked, but not waited for")

    def test_one_that_was_slow_once_is_waited_for_again_when_it_answers(self):
        """Or its refusal would stay: looks get rare, and answers old before they."""
        gate = threading.Event()
        answer = peer_background.Answer(None, TOPOLOGY)

        def ask(*args, **kwargs):
            gate.wait(10)
            time.sleep(0.05)  # no answer is there at once
            return answer

        refused = self.refuse()
        with mock.patch.object(prefill_check, "ask", ask):
            self.assertIsNone(prefill_check._look(self.decode, self.addr))
            [future] = self.decode.peer_looks.values()
            gate.set()
            future.result(5)
            looked = prefill_check._look(self.decode, self.addr)
            self.assertEqual(looked.info.page_size, 1)
            gate.clear()
            self.assertIsNone(prefill_check._look(self.decode, self.addr))
            [future] = self.decode.peer_looks.values()
            gate.set()
            future.result(5)
            looked = prefill_check._look(self.decode, self.addr, max_age_s=-1.0)
            self.assertIsNotNone(looked, "too old, and not waited for a new one")
        self.assertEqual(refused.reason, "no")

    def test_a_prefill_that_answers_again_is_told_of_all_that_waited(self):
        refused, info = self.refuse(), prefill_check._placeholder()
        receivers = [open_receiver(self.decode, self.addr, room) for room in range(3)]
        body = {"rank_ip": "127.0.0.1", "rank_port": 1}
        answers = [OSError("mute"), peer_background.Answer(None, body)]
        with (
            mock.patch.object(prefill_refusal, "ask", side_effect=answers),
            mock.patch.object(prefill_refusal, "_TELL_AGAIN_S", (0.3,)),
            mock.patch.object(prefill_refusal, "_send_refusal") as send,
        ):
            for receiver in receivers:
                prefill_refusal.tell(refused, info, [(receiver, 0)])
            self.assertTrue(wait_for(lambda: send.call_count == 3))
            self.assertEqual([c.args[0] for c in send.call_args_list], receivers)
            self.assertTrue(wait_for(lambda: not refused.untold))

    def test_a_prefill_that_stays_mute_is_given_up(self):
        refused, info = self.refuse(), prefill_check._placeholder()
        receiver = open_receiver(self.decode, self.addr, 1)
        with (
            mock.patch.object(prefill_refusal, "ask", side_effect=OSError) as ask,
            mock.patch.object(prefill_refusal, "_TELL_AGAIN_S", (0.01, 0.01)),
            self.assertLogs(prefill_refusal.logger, "WARNING") as logs,
        ):
            prefill_refusal.tell(refused, info, [(receiver, 0)] * 5)
            self.assertTrue(wait_for(lambda: logs.output))
            self.assertEqual(ask.call_count, 3)
        self.assertIn("not told about 5 refused request(s)", logs.output[0])

    def test_a_request_of_a_rank_that_is_not_there_holds_up_no_other(self):
        """Its rank may come from the client."""
        refused, info = self.refuse(), prefill_check._placeholder()
        receivers = [open_receiver(self.decode, self.addr, room) for room in range(3)]

        def ask(address, ranks):
            if ranks[0] == 99:
                raise ValueError("status 404")
            return peer_background.Answer(None, {"rank_ip": "a", "rank_port": 1})

        with (
            mock.patch.object(prefill_refusal, "ask", ask),
            mock.patch.object(prefill_refusal, "_send_refusal") as send,
        ):
            requests = list(zip(receivers, [0, 99, 0], strict=True))
            prefill_refusal.tell(refused, info, requests)
            self.assertTrue(wait_for(lambda: send.call_count == 2))
            told = [call.args[0] for call in send.call_args_list]
            self.assertEqual(told, [receivers[0], receivers[2]])

    def test_many_mute_ones_are_waited_for_once(self):
        began = time.monotonic()
        for _ in range(4):
            look = prefill_check._look(self.decode, self.addr, again=True)
            self.assertIsNone(look)
            self.decode.peer_looks.clear()
        waited = time.monotonic() - began
        self.assertLess(waited, 2 * prefill_check._PATIENCE_S)
        self.assertGreaterEqual(waited, prefill_check._PATIENCE_S)

    def test_a_failure_does_not_count_for_a_later_question(self):
        failed = Future()
        failed.set_exception(OSError("mute then"))
        self.decode.peer_looks = {self.addr: failed}
        answer = peer_background.Answer(None, TOPOLOGY)
        with (
            mock.patch.object(prefill_check, "ask", return_value=answer),
            mock.patch.object(prefill_check, "_PATIENCE_S", 10.0),
        ):
            look = prefill_check._look(self.decode, self.addr, again=True)
            self.assertIsNotNone(look)

    def test_first_contact_is_waited_for_once(self):
        began = time.monotonic()
        for _ in range(5):
            self.assertIs(self.decode.try_ensure_parallel_info(self.addr), False)
        self.assertLess(time.monotonic() - began, 1.5)
        self.assertEqual(len(self.asked), 1)

    def test_a_dribbling_answer_is_cut(self):
        def dribble():
            connection, _ = self.listener.accept()
            with connection:
                while True:
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return
                    time.sleep(0.1)

        threading.Thread(target=dribble, daemon=True).start()
        began = time.monotonic()
        with self.assertRaises((OSError, http.client.HTTPException)):
            peer_background.ask(self.addr)
        self.assertLess(time.monotonic() - began, peer_background.ANSWER_S + 1)

    def test_a_prefill_of_absurd_size_is_not_asked_rank_by_rank(self):
        self.refuse()
        info = self.decode.prefill_info_table[self.addr]
        info.attn_tp_size = 10**9
        receiver = open_receiver(self.decode, self.addr, 1)
        with self.assertRaisesRegex(ValueError, "ranks"):
            prefill_refusal._contacts(receiver, info.peer_refusal, 0, info)
        self.assertEqual(self.asked, [])

    def test_background_work_is_bounded(self):
        work = peer_background.Background(max_keys=1, max_waiting=2)
        release = threading.Event()
        first = work.submit("a", release.wait)
        self.assertTrue(wait_for(lambda: not work._queues["a"]))
        waiting = [work.submit("a", lambda: 1) for _ in range(3)]
        self.assertEqual([f is None for f in waiting], [False, False, True])
        self.assertIsNone(work.submit("b", lambda: 1))
        release.set()
        self.assertEqual([f.result(5) for f in (first, *waiting[:2])], [True, 1, 1])
        self.assertTrue(wait_for(lambda: work._queues == {}), "a queue was left")

    def test_no_thread_to_be_had_is_too_much_to_do(self):
        work = peer_background.Background()
        full = RuntimeError("can't start new thread")
        with mock.patch.object(threading.Thread, "start", side_effect=full):
            self.assertIsNone(work.submit("a", lambda: 1))
        self.assertEqual(work.submit("a", lambda: 1).result(5), 1)


class TestRestartedPrefill(_WithServer):
    """A prefill that comes back on its address before a heartbeat misses it."""

    def setUp(self):
        super().setUp()
        self.prefill()
        self.client = self.decode()
        self.client.__dict__.update(
            heartbeat_interval=0.02,
            heartbeat_failures={},
            transfer_statuses={},  # of NIXL before 0.5.23
            # Only another instance is to be noticed here.
            max_failures=1 << 30,
            _heartbeat_shutdown=threading.Event(),
            session_pool_lock=threading.Lock(),
            session_pool=defaultdict(requests.Session),
        )
        self.addCleanup(self.client.prefill_info_table.clear)
        self.assertTrue(self.client.try_ensure_parallel_info(self.addr))

    def info(self):
        return self.client.prefill_info_table.get(self.addr)

    def heartbeats(self):
        """Run upstream's own loop."""
        self.addCleanup(self.client._heartbeat_shutdown.set)
        self.client._start_heartbeat_checker_thread()

    def without_heartbeats(self):
        """Each request asks, as where heartbeats are rare."""
        patched = mock.patch.object(prefill_restart, "FRESH_S", 0.0)
        patched.start()
        self.addCleanup(patched.stop)

    def begin(self, room):
        """A request that has turned to its prefill."""
        receiver = self.waiting(room)
        self.assertFalse(prefill_check.refuse_request(receiver, 0))
        self.client.update_status(room, KVPoll.WaitingForInput)
        return receiver

    def begin_deferred(self, room):
        """One whose KV is allocated when its prefill has ended."""
        receiver = self.waiting(room)
        self.assertFalse(prefill_check.refuse_request(receiver, 0))
        self.client.required_prefill_response_num_table[room] = 1
        return receiver

    def waiting(self, room):
        return open_receiver(self.client, self.addr, room)

    def restart(self, description=NATIVE, **registration):
        stop(self.server)
        self.server = serve(self.server.port)
        return self.prefill(description, **registration)

    def has_failed(self, room):
        return self.client.check_status(room) == KVPoll.Failed

    def assert_lost(self, *rooms):
        """Upstream notes the reason first, then the status."""
        for room in rooms:
            self.assertTrue(wait_for(functools.partial(self.has_failed, room)), room)
            self.assertIn("Lost connection", self.client.failure_records[room])

    def assert_new(self):
        """What decode knows and keeps is of the new engine."""
        known = self.info().peer_description
        self.assertEqual(known["instance"], self.server.peer_instance)
        self.assertEqual(
            self.client.connection_pool, {}, "the old one's ports are kept"
        )

    def saw(self, info, instance):
        return prefill_restart.saw(
            self.client, self.addr, info, instance, spare_waiting=True
        )

    def keep_ports(self):
        self.client.connection_pool[f"{self.addr}_0_0_0"] = []

    def test_a_heartbeat_notices_it(self):
        self.begin(1)
        self.begin_deferred(2)
        self.waiting(3)
        self.keep_ports()
        self.heartbeats()
        time.sleep(0.3)
        self.assertEqual(self.client.failure_records, {})
        self.restart()
        records = self.client.failure_records
        self.assertTrue(wait_for(lambda: records.keys() >= {1, 2, 3}, 10))
        self.assert_lost(1, 2, 3)
        self.assertIsNone(self.info())
        self.assertTrue(self.client.try_ensure_parallel_info(self.addr))
        self.assert_new()
        time.sleep(0.3)
        self.assertIsNotNone(self.info(), "the new one is taken for another")

    def test_a_prefill_without_a_description_is_not_taken_for_another(self):
        """Its bootstrap server names an instance all the same."""
        stop(self.server)
        self.server = serve(self.server.port)
        self.prefill(None)
        own = self.client.kv_args.peer_description = dict(PLAIN)
        self.client.prefill_info_table.clear()
        self.assertTrue(self.client.try_ensure_parallel_info(self.addr), own)
        self.assertIsNone(prefill_check.refusal_of(self.client, self.addr))
        before = self.info()
        self.begin(1)
        self.heartbeats()
        time.sleep(0.3)
        self.assertNotIn(1, self.client.failure_records)
        self.assertIs(self.info(), before)

    def test_a_heartbeat_notices_it_before_its_ranks_have_registered(self):
        self.begin(1)
        self.heartbeats()
        stop(self.server)
        self.server = serve(self.server.port)
        self.assertTrue(wait_for(lambda: 1 in self.client.failure_records, 10))

    def test_without_heartbeats_the_next_request_goes_to_the_new_one(self):
        self.begin(1)
        self.begin_deferred(2)
        self.waiting(3)
        cleared = self.waiting(4)
        cleared.clear()
        self.keep_ports()
        self.restart()
        self.without_heartbeats()
        with mock.patch.object(prefill_check, "ask", wraps=prefill_check.ask) as ask:
            self.begin(5)
        self.assertEqual(ask.call_count, 1, "its answer is at hand")
        self.assert_lost(1, 2)
        self.assert_new()
        self.assertEqual(self.client.failure_records.keys(), {1, 2})
        self.assertEqual(self.client.addr_to_rooms_tracker[self.addr], {3, 5})

    def test_a_request_that_begins_meanwhile_is_not_forgotten(self):
        """It may have taken the old one's ports before they were dropped."""
        self.waiting(1)
        ended = self.waiting(2)
        handle = self.client._handle_node_failure

        def begun(address):
            self.client.required_prefill_response_num_table[1] = 1
            ended.clear()
            handle(address)

        self.client._handle_node_failure = begun
        self.saw(self.info(), "other")
        self.assertEqual(self.client.check_status(1), KVPoll.Failed)
        self.assertEqual(self.client.failure_records.keys(), {1})
        self.assertEqual(self.client.addr_to_rooms_tracker[self.addr], set())

    def test_an_answer_that_comes_late_still_counts(self):
        self.begin(1)
        new = self.restart()
        self.without_heartbeats()
        gate = threading.Event()
        real_ask = prefill_check.ask

        def slow_ask(*args, **kwargs):
            gate.wait(10)
            return real_ask(*args, **kwargs)

        with (
            mock.patch.object(prefill_check, "ask", slow_ask),
            mock.patch.object(prefill_check, "_PATIENCE_S", 0.05),
        ):
            self.begin(2)
            self.begin(3)  # not asked about again, and in doubt as well
            self.assertEqual(self.client.failure_records, {})
            gate.set()
            records = self.client.failure_records
            self.assertTrue(wait_for(lambda: records.keys() >= {1, 2, 3}, 10))
            for room in (2, 3):  # which may have asked the new prefill
                self.assertTrue(new.server_socket.poll(5000), "prefill was not told")
                tag, told, reason = new.server_socket.recv_multipart()
                self.assertEqual((tag, told), (REFUSED_TAG, str(room).encode()))
                self.assertIn(b"[PD-RESTARTED]", reason)
            self.assertFalse(new.server_socket.poll(200), "more than the doubtful")
        self.assertIsNone(self.info())

    def test_doubt_ends_when_the_same_one_answers(self):
        self.without_heartbeats()
        info = self.info()
        with mock.patch.object(prefill_check, "_look", return_value=None):
            self.client.peer_looks = {}
            self.begin(1)
        self.assertEqual(len(info.peer_doubted), 1)
        instance = {prefill_restart.INSTANCE_HEADER: self.server.peer_instance}
        answer = SimpleNamespace(headers=instance)
        prefill_check.heed_heartbeat(self.client, self.addr, answer)
        self.begin(2)
        self.assertFalse(prefill_restart.take_doubted(info))
        self.begin(3)
        self.assertFalse(prefill_restart.take_doubted(info))

    def test_the_doubtful_are_told_when_a_heartbeat_notices(self):
        self.begin(1)
        info = self.info()
        with mock.patch.object(prefill_check, "_look", return_value=None):
            self.without_heartbeats()
            self.client.peer_looks = {}
            self.begin(2)
        self.waiting(3)
        for unseen_s, spared in ((100.0, True), (0.0, False)):
            info.peer_seen = time.monotonic() - unseen_s
            self.client.prefill_info_table[self.addr] = info
            headers = {prefill_restart.INSTANCE_HEADER: f"other {spared}"}
            answer = SimpleNamespace(headers=headers)
            with (
                mock.patch.object(prefill_restart, "FRESH_S", 6.0),
                mock.patch.object(prefill_check, "FRESH_S", 6.0),
                mock.patch.object(prefill_check, "tell") as tell,
            ):
                prefill_check.heed_heartbeat(self.client, self.addr, answer)
            refused, _, requests = tell.call_args.args
            rooms = [(receiver.bootstrap_room, rank) for receiver, rank in requests]
            self.assertEqual(rooms, [(2, 0)] if spared else [])
            self.assertTrue(refused.admits)
            self.assertEqual(3 in self.client.failure_records, not spared)

    def test_first_contact_takes_no_answer_of_a_former_engine(self):
        late = prefill_check._ask_for_all(self.addr)
        self.restart({**NATIVE, "page_size": 16}, page_size=16)
        future = Future()
        future.set_result((late[0] - prefill_check._FRESH_ANSWER_S - 1, late[1]))
        self.client.peer_looks = {self.addr: future}
        self.client.prefill_info_table.clear()
        self.assertTrue(self.client.try_ensure_parallel_info(self.addr))
        refused = prefill_check.refusal_of(self.client, self.addr)
        self.assertIn("[PD-PAGE-SIZE]", refused.reason)

    def test_one_that_is_lost_while_it_is_contacted_is_not_refused(self):
        self.client.prefill_info_table.clear()
        original = type(self.client).try_ensure_parallel_info

        def lost(address):
            if not self.client.__dict__.get("peer_check_is_on"):
                return original(self.client, address)
            original(self.client, address)
            self.client.prefill_info_table.clear()
            return True

        self.client.try_ensure_parallel_info = lost
        lost(self.addr)
        self.assertIsNone(prefill_check.refusal_of(self.client, self.addr))

    def test_one_that_answers_once_and_no_more_is_refused(self):
        self.begin(1)
        self.restart()
        self.without_heartbeats()

        def gone(manager, address, prefill=None):
            return False

        with mock.patch.object(prefill_check, "ensure_prefill", gone):
            self.assertTrue(prefill_check.refuse_request(self.waiting(2), 0))
        self.assertIn("[PD-RESTARTED]", self.client.failure_records[2])
        self.assertTrue(prefill_check.refusal_of(self.client, self.addr).admits)

    def test_an_error_in_looking_does_not_reach_the_scheduler(self):
        self.without_heartbeats()
        with mock.patch.object(prefill_check, "_look", side_effect=OSError("full")):
            self.begin(1)

    def test_without_heartbeats_one_with_other_flags_is_refused_as_such(self):
        self.begin(1)
        self.restart({**NATIVE, "page_size": 16}, page_size=16)
        self.without_heartbeats()
        self.assertTrue(prefill_check.refuse_request(self.waiting(2), 0))
        self.assert_lost(1)
        self.assertIn("[PD-PAGE-SIZE]", self.client.failure_records[2])

    def test_a_request_for_a_dp_rank_that_is_gone_is_refused(self):
        for follows, room, told, admits in (
            (True, 7, [1], True),
            (False, 8, [0, 1], False),
        ):
            self.restart(NATIVE if admits else None)
            self.client.prefill_info_table.clear()
            own = NATIVE if admits else PLAIN
            self.client.kv_args.peer_description = dict(own)
            self.assertTrue(self.client.try_ensure_parallel_info(self.addr))
            before, now = self.info(), dataclasses.replace(self.info())
            now.peer_description = before.peer_description
            now.dp_size, now.follow_bootstrap_room = 2, follows

            def look(receiver, dp_rank, info, now=now):
                self.client.prefill_info_table[self.addr] = now

            with (
                self.subTest(follows=follows),
                mock.patch.object(prefill_check, "_look_again", look),
                mock.patch.object(prefill_check, "tell") as tell,
            ):
                receiver = self.waiting(room)
                self.assertTrue(prefill_check.refuse_request(receiver, 0))
                refused, topology, requests = tell.call_args.args
                self.assertIs(topology, now)
                self.assertEqual(requests, [(receiver, rank) for rank in told])
                self.assertEqual(refused.admits, admits)
                reason = self.client.failure_records[room]
                self.assertIn("[PD-RESTARTED]", reason)
                self.assertIn("dp_size 2", reason)
                self.client.prefill_info_table[self.addr] = now
                self.assertFalse(prefill_check.refuse_request(self.waiting(99), 0))

    def test_one_restarted_without_this_set_is_noticed(self):
        self.begin(1)
        self.without_heartbeats()
        body = topology_of(self.server).json()
        with mock.patch.object(prefill_check, "ask") as ask:
            ask.return_value = peer_background.Answer(None, body)
            self.assertTrue(prefill_check.refuse_request(self.waiting(2), 0))
        self.assert_lost(1)
        self.assertIn("[PD-UNPATCHED-PREFILL]", self.client.failure_records[2])

    def test_a_health_answer_that_names_no_instance_says_nothing(self):
        self.begin(1)
        silent = SimpleNamespace(headers={})
        prefill_check.heed_heartbeat(self.client, self.addr, silent)
        self.assertIsNotNone(self.info())
        self.assertNotIn(1, self.client.failure_records)

    def test_one_that_is_down_is_left_to_the_heartbeat(self):
        stop(self.server)
        self.without_heartbeats()
        self.begin(1)
        self.assertNotIn(1, self.client.failure_records)
        self.assertIsNotNone(self.info())

    def test_a_refused_one_is_none_of_the_heartbeats_business(self):
        self.restart({**NATIVE, "page_size": 16}, page_size=16)
        self.without_heartbeats()
        prefill_check.refuse_request(self.waiting(1), 0)
        refused = self.info()
        self.assertIsNotNone(refused.peer_refusal)
        other = SimpleNamespace(headers={prefill_restart.INSTANCE_HEADER: "other"})
        prefill_check.heed_heartbeat(self.client, self.addr, other)
        self.assertIs(self.info(), refused)

    def test_both_that_notice_it_forget_it_once(self):
        info = self.info()
        self.begin(1)
        self.assertTrue(self.saw(info, "new"))
        self.assertTrue(self.client.try_ensure_parallel_info(self.addr))
        self.begin(2)
        self.assertTrue(self.saw(info, "new"))
        self.assert_lost(1)
        self.assertNotIn(2, self.client.failure_records)

    def test_requests_ask_rarely(self):
        with (
            mock.patch.object(prefill_check, "ask", wraps=prefill_check.ask) as ask,
            # Longer than forty requests take on any machine.
            mock.patch.multiple(prefill_restart, FRESH_S=60.0, _ASK_AGAIN_S=50.0),
        ):
            for room in range(40):
                self.begin(room)
            self.assertEqual(ask.call_count, 0, "it was seen a moment ago")
            self.info().peer_seen -= 60.0
            for room in range(40, 80):
                self.begin(room)
            self.assertEqual(ask.call_count, 1)
            stop(self.server)
            self.info().peer_seen -= 60.0
            for room in range(80, 120):
                self.begin(room)
            self.assertEqual(ask.call_count, 2, "one that is down is asked rarely, too")

    def test_one_that_stays_mute_is_asked_ever_less_often(self):
        info = SimpleNamespace(peer_description={"instance": "a"}, peer_seen=0.0)
        asked = []
        with mock.patch.object(prefill_restart.time, "monotonic") as clock:
            for now in range(100, 220):
                clock.return_value = float(now)
                if prefill_restart.is_due(info):
                    asked.append(now - 100)
            self.assertEqual(asked, [0, 1, 3, 7, 15, 31, 61, 91])
            prefill_restart.saw(None, "", info, "a", spare_waiting=True)
            clock.return_value = now + 5.0
            self.assertFalse(prefill_restart.is_due(info))
            clock.return_value = now + 32.0
            self.assertTrue(prefill_restart.is_due(info))
            clock.return_value = now + 33.0
            self.assertTrue(prefill_restart.is_due(info))


class TestRegistrationFrame(CustomTestCase):
    def registered(self, description):
        """What reaches prefill when upstream's receiver registers."""
        decode = nixl_decode(description)
        self.addCleanup(close, decode)
        decode.agent.get_agent_metadata = lambda: b"metadata"
        decode.kv_args.__dict__.update(
            kv_data_mem_kinds=[],
            state_data_ptrs=[],
            state_item_lens=[],
            state_data_lens=[],
            state_layer_ids=[],
            gpu_id=0,
        )
        wire = Wire(decode)
        self.addCleanup(wire.close)
        receiver = object.__new__(NixlKVReceiver)
        receiver.kv_mgr, receiver.bootstrap_room = decode, 3
        receiver.bootstrap_infos = [{"rank_ip": "127.0.0.1", "rank_port": wire.port}]
        self.assertTrue(receiver._register_kv_args())
        return wire.answer()

    def test_decode_registers_with_its_description(self):
        frames = self.registered(NATIVE)
        magic = peer_agreement.FRAME_MAGIC
        self.assertEqual(frames[1], b"None")
        self.assertTrue(frames[-1].startswith(magic))
        self.assertEqual(json.loads(frames[-1][len(magic) :]), NATIVE)

    def test_backends_that_do_not_look_for_it_do_not_get_it(self):
        frames = self.registered({**NATIVE, "backend": "mori"})
        self.assertFalse(frames[-1].startswith(peer_agreement.FRAME_MAGIC))


class _Stop(Exception):
    """Ends a constructor where the KV manager would be built."""


class TestDescribe(CustomTestCase):
    def describe_in(self, queue_class, module):
        """Run upstream's `_init_kv_manager` up to the manager's class."""
        queue = mock.MagicMock()
        queue.scheduler = mock.MagicMock()
        queue.metadata_buffers = SimpleNamespace(get_buf_infos=lambda: ([], [], []))
        queue.draft_token_to_kv_pool = None
        queue.token_to_kv_pool = mock.MagicMock()
        queue.token_to_kv_pool.get_contiguous_buf_infos.return_value = ([], [], [])
        # The value of this option that means "off" was turned around in 0.5.22.
        off = int("threshold < 1" in inspect.getsource(module))
        queue.tp_rank = queue.pp_rank = 0
        queue.scheduler.enable_hisparse = False
        seen = []

        def end_here(*args):
            raise _Stop

        patches = {
            "get_kv_class": lambda backend, kind: (
                (lambda: SimpleNamespace(state_types=[]))
                if "KVARGS" in str(kind)
                else end_here()
            ),
            "get_kv_transfer_buf_infos": lambda pool: ([], [], []),
            "build_kv_layer_ids": lambda **kwargs: [],
            "setup_state_kv_args": lambda *args, **kwargs: None,
            "get_pd_kv_layout": lambda pool: None,
            "get_parallel": lambda: mock.MagicMock(attn_tp_size=1),
            "get_disagg": lambda: mock.MagicMock(
                disaggregation_decode_host_receive_threshold=off
            ),
            "get_device": lambda: mock.MagicMock(),
        }
        with (
            patch_existing(module, **patches),
            mock.patch.object(
                engine_facts, "_describe_rank", lambda *args: seen.append(args) or {}
            ),
            self.assertRaises(_Stop),
        ):
            queue_class._init_kv_manager(queue)
        self.assertEqual(len(seen), 1, "the engine was not described")
        self.assertIs(seen[0][0], queue.scheduler)
        self.assertIs(seen[0][3], queue, "the queue holds pools and buffers")
        return seen[0][1]

    def test_prefill_queue_describes_its_engine(self):
        from sglang.srt.disaggregation import prefill

        role = self.describe_in(PrefillBootstrapQueue, prefill)
        self.assertEqual(role, "prefill")

    def test_decode_queue_describes_its_engine(self):
        from sglang.srt.disaggregation import decode

        self.assertEqual(self.describe_in(DecodePreallocQueue, decode), "decode")

    def test_server_info_shows_the_description(self):
        """Both roles; what is true of one rank only stays out."""
        try:
            from sglang.srt.managers.scheduler_components import internal_state
        except ImportError:
            self.skipTest("this release builds its state in the scheduler (< 0.5.22)")
        controller_class = internal_state.SchedulerInternalStateController
        for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
            kv_args = SimpleNamespace(peer_description={**NATIVE, "kv_entries": 8})
            manager = SimpleNamespace(kv_args=kv_args)
            scheduler = SimpleNamespace(**{queue: SimpleNamespace(kv_manager=manager)})
            controller = mock.MagicMock(scheduler=scheduler)
            context = mock.MagicMock()
            context.resolved_server_args_dict.return_value = {}
            with mock.patch.object(internal_state, "get_context", lambda c=context: c):
                answer = controller_class.get_internal_state(controller, None)
            shown = answer.internal_state["peer_description"]
            self.assertEqual(
                shown, {k: v for k, v in NATIVE.items() if k != "kv_entries"}
            )

    def test_opt_out_is_declared(self):
        self.assertFalse(envs.SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT.get())
        with envs.SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT.override(True):
            self.assertTrue(envs.SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT.get())

    def test_an_engine_that_cannot_describe_itself_still_starts(self):
        kv_args = SimpleNamespace()
        with self.assertLogs(engine_facts.logger, "ERROR"):
            engine_facts.describe_engine(object(), "prefill", kv_args, None)
        self.assertIsNone(kv_args.peer_description)


if __name__ == "__main__":
    unittest.main()
