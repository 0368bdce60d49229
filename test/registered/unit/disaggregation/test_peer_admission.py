"""Prefill's door: a decode that does not fit fails its own rooms, with the reason.

Contract: a refused or half-registered decode is never added as a peer; its rooms fail
on prefill and decode learns why; rooms of other decodes go on; what decode gave up
before prefill had the request fails as soon as the request arrives; every memory is
bounded.
"""

from __future__ import annotations

import logging
import time
import unittest
from unittest import mock

from peer_fixtures import (
    NATIVE,
    PLAIN,
    Wire,
    close,
    make_manager,
    mooncake_metadata,
    mooncake_registration,
    nixl_metadata,
    nixl_prefill,
    nixl_registration,
    open_sender,
    wait_for,
)

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import (
    log_limits,
    peer_admission,
    peer_agreement,
)
from sglang.srt.disaggregation.common.early_rooms import EarlyRooms
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


def agreement_frame(content: bytes) -> bytes:
    return peer_agreement.FRAME_MAGIC + content


OTHER_DRAFT = {**NATIVE, "draft_weights": "bbbb"}


class _Prefill(CustomTestCase):
    """A prefill's bootstrap thread on a real socket, and a decode's end of the wire."""

    def start(self, manager, start_thread):
        self.manager = manager
        self.addCleanup(close, manager)
        start_thread()
        self.wire = Wire(manager)
        self.addCleanup(self.wire.close)

    def is_failed(self, room):
        return wait_for(lambda: self.manager.request_status.get(room) == KVPoll.Failed)

    def is_ready(self, room):
        status = self.manager.request_status
        return wait_for(lambda: status.get(room) == KVPoll.WaitingForInput)


class TestNixlAdmission(_Prefill):
    def setUp(self):
        manager = nixl_prefill()
        self.start(manager, manager._start_bootstrap_thread)

    def register(self, agent="decode-a", description=NATIVE, pointers=0):
        self.wire.send(*nixl_registration(self.wire.port, agent, pointers, description))

    def metadata(self, room, agent="decode-a"):
        self.wire.send(*nixl_metadata(room, self.wire.port, agent))

    def test_an_agreeing_decode_is_registered_and_served(self):
        open_sender(self.manager, 1)
        self.register()
        self.metadata(1)
        self.assertTrue(self.is_ready(1))
        self.assertIn("decode-a", self.manager.decode_kv_args_table)
        self.assertIn(1, self.manager.transfer_infos)

    def test_refused_decode_fails_its_rooms_only(self):
        for room in (1, 2):
            open_sender(self.manager, room)
        self.register("decode-bad", OTHER_DRAFT)
        self.register("decode-good")
        self.metadata(1, "decode-bad")
        self.metadata(2, "decode-good")
        self.assertTrue(self.is_failed(1))
        self.assertTrue(self.is_ready(2))
        self.assertNotIn("decode-bad", self.manager.decode_kv_args_table)
        self.assertEqual(len(self.manager.agent.peers), 1)
        reason = self.manager.failure_records[1]
        self.assertIn("draft_weights=aaaa", reason)
        self.assertIn("draft_weights=bbbb", reason)
        told = self.wire.answer()
        self.assertEqual(
            told[:3], [b"KV_STATUS", b"1", str(int(KVPoll.Failed)).encode()]
        )
        self.assertIn(b"[PD-DRAFT-WEIGHTS]", told[4])

    def test_a_room_without_request_is_answered_and_fails_later(self):
        self.register("decode-bad", OTHER_DRAFT)
        self.metadata(5, "decode-bad")
        self.assertIsNotNone(self.wire.answer())
        self.assertNotIn(5, self.manager.transfer_infos)
        open_sender(self.manager, 5)
        self.assertEqual(self.manager.request_status[5], KVPoll.Failed)
        self.assertIn("[PD-DRAFT-WEIGHTS]", self.manager.failure_records[5])

    def test_an_unregistered_decode_is_told_at_once(self):
        open_sender(self.manager, 1)
        self.metadata(1, "decode-unknown")
        self.assertTrue(self.is_failed(1))
        self.assertIn(b"[PD-NOT-REGISTERED]", self.wire.answer()[4])

    def test_a_bad_message_in_the_name_of_a_peer_costs_the_peer_nothing(self):
        """Deep JSON, a description that is none, a registration that upstream cannot read."""
        self.register("decode-good")
        deep = agreement_frame(b"[" * 60_000)
        none = agreement_frame(b"7")
        plain = nixl_registration(self.wire.port, "decode-good", description=NATIVE)
        unreadable = [*plain[:10], b"no rank", *plain[11:]]
        for room, frames in enumerate(
            ([*plain[:-1], deep], [*plain[:-1], none], unreadable), start=1
        ):
            open_sender(self.manager, room)
            self.wire.send(*frames)
            self.metadata(room, "decode-good")
            with self.subTest(room):
                self.assertTrue(self.is_ready(room), self.manager.failure_records)
        self.assertEqual(len(self.manager.agent.peers), 1)
        self.assertEqual(self.manager.peer_rejections, {})

    def test_an_unpatched_decode_without_draft_memory_is_refused(self):
        self.manager.kv_args.peer_description = {**NATIVE, "kv_entries": 12}
        open_sender(self.manager, 1)
        self.register(description=None, pointers=8)
        self.metadata(1)
        self.assertTrue(self.is_failed(1))
        reason = self.manager.failure_records[1]
        self.assertIn("[PD-UNPATCHED-DECODE-NO-DRAFT]", reason)
        self.assertIn("prefill has kv_entries=12, decode has kv_entries=8", reason)

    def test_an_unpatched_decode_that_fits_is_served_and_named(self):
        open_sender(self.manager, 1)
        with self.assertLogs(peer_agreement.logger, "WARNING") as logs:
            self.register(description=None)
            self.metadata(1)
            self.assertTrue(self.is_ready(1))
        self.assertIn("[PD-UNPATCHED-DECODE]", logs.output[0])

    def test_a_decode_may_register_again_after_it_was_refused(self):
        self.register(description=OTHER_DRAFT)
        self.register(description=NATIVE)
        open_sender(self.manager, 1)
        self.metadata(1)
        self.assertTrue(self.is_ready(1))

    def test_decode_that_refuses_prefill_fails_the_room_with_its_reason(self):
        open_sender(self.manager, 1)
        self.wire.send(peer_agreement.REFUSED_TAG, b"1", b"[PD-X] because")
        self.assertTrue(self.is_failed(1))
        self.assertIn("refused by decode: [PD-X]", self.manager.failure_records[1])

    def test_an_engine_without_description_admits_everybody(self):
        self.manager.kv_args.peer_description = None
        open_sender(self.manager, 1)
        self.register(description=OTHER_DRAFT)
        self.metadata(1)
        self.assertTrue(self.is_ready(1))


class TestMooncakeAdmission(_Prefill):
    def setUp(self):
        manager = make_manager(
            MooncakeKVManager,
            DisaggregationMode.PREFILL,
            {**NATIVE, "backend": "mooncake"},
        )
        manager._publish_peer_registration = self.publish
        self.start(manager, manager.start_prefill_thread)

    def publish(self, session, registration):
        self.manager.decode_kv_args_table[session] = registration

    def register(self, session, **changes):
        description = {**NATIVE, "backend": "mooncake", **changes}
        self.wire.send(
            *mooncake_registration(self.wire.port, session, description=description)
        )

    def test_refused_decode_fails_its_rooms_only(self):
        for room in (1, 2):
            open_sender(self.manager, room)
        self.register("bad:1", draft_weights="bbbb")
        self.register("good:1")
        self.wire.send(*mooncake_metadata(1, self.wire.port, "bad:1"))
        self.wire.send(*mooncake_metadata(2, self.wire.port, "good:1"))
        self.assertTrue(self.is_failed(1))
        self.assertTrue(self.is_ready(2))
        self.assertEqual(list(self.manager.decode_kv_args_table), ["good:1"])
        told = self.wire.answer()
        self.assertEqual(told[:2], [b"1", str(int(KVPoll.Failed)).encode()])
        self.assertIn(b"[PD-DRAFT-WEIGHTS]", told[3])

    def test_a_decode_that_may_not_know_reasons_gets_none(self):
        open_sender(self.manager, 1)
        self.wire.send(*mooncake_metadata(1, self.wire.port, "unknown:1"))
        self.assertTrue(self.is_failed(1))
        self.assertEqual(len(self.wire.answer()), 3)


class TestEarlyRooms(_Prefill):
    def setUp(self):
        manager = nixl_prefill()
        self.start(manager, manager._start_bootstrap_thread)

    def settle(self):
        """Wait until the bootstrap thread has worked on all messages sent so far."""
        open_sender(self.manager, 999)
        self.wire.send(b"ABORT", b"999")
        self.assertTrue(self.is_failed(999))

    def test_abort_before_the_request_fails_it(self):
        self.wire.send(b"ABORT", b"7")
        self.settle()
        sender = open_sender(self.manager, 7)
        self.assertEqual(sender.poll(), KVPoll.Failed)
        self.assertIn("Aborted by decode", self.manager.failure_records[7])

    def test_late_abort_does_not_hit_a_room_that_is_used_again(self):
        open_sender(self.manager, 7).clear()
        self.wire.send(b"ABORT", b"7")
        self.settle()
        self.assertEqual(open_sender(self.manager, 7).poll(), KVPoll.Bootstrapping)

    def test_a_verdict_is_used_once(self):
        rooms = EarlyRooms()
        rooms.remember(1, "why")
        self.assertEqual([rooms.open(1), rooms.open(1)], ["why", None])

    def test_memories_are_bounded_in_number(self):
        rooms = EarlyRooms(max_rooms=10)
        forgotten = []
        for room in range(1000):
            rooms.remember(room, "why")
            forgotten += rooms.metadata_without_request(room, ())
        for room in range(2000, 3000):
            rooms.open(room)
        self.assertEqual(rooms.sizes(), (10, 10, 10))
        self.assertEqual(forgotten, list(range(990)))

    def test_memories_are_bounded_in_age(self):
        rooms = EarlyRooms(max_age_s=0.0)
        rooms.remember(1, "why")
        self.assertIsNone(rooms.open(1))
        rooms.metadata_without_request(2, ())
        self.assertIn(2, rooms.metadata_without_request(3, ()))

    def test_metadata_that_comes_after_its_request_is_forgotten_as_well(self):
        rooms = EarlyRooms(max_rooms=0)
        rooms.open(1)
        self.assertEqual(rooms.metadata_without_request(1, {1}), [])
        self.assertEqual(rooms.metadata_without_request(1, ()), [1])

    def test_metadata_for_which_no_request_comes_is_forgotten(self):
        self.manager.early_rooms = EarlyRooms(max_rooms=3)
        self.wire.send(*nixl_registration(self.wire.port, description=NATIVE))
        for room in range(20):
            self.wire.send(*nixl_metadata(room, self.wire.port))
        self.settle()
        self.assertLessEqual(len(self.manager.transfer_infos), 4)


class TestRaces(CustomTestCase):
    """The control thread and the scheduler meet at a room."""

    def test_a_room_opened_between_two_questions_fails(self):
        manager = nixl_prefill()
        self.addCleanup(close, manager)
        rooms = peer_admission.early_rooms(manager)
        remember = rooms.remember

        def opened_meanwhile(room, reason):
            open_sender(manager, room)
            return remember(room, reason)

        with mock.patch.object(rooms, "remember", opened_meanwhile):
            peer_admission.conclude_room(manager, 7, "why")
        self.assertEqual(manager.request_status[7], KVPoll.Failed)
        self.assertEqual(manager.failure_records[7], "why")


class TestLogs(CustomTestCase):
    """Peers choose their names; the log must not grow with them, nor fall silent."""

    def setUp(self):
        self.manager = nixl_prefill({**PLAIN, "kv_entries": 0})
        self.addCleanup(close, self.manager)
        self.lines = []
        handler = logging.Handler()
        handler.emit = self.lines.append
        for module in (peer_agreement, peer_admission, log_limits):
            module.logger.addHandler(handler)
            self.addCleanup(module.logger.removeHandler, handler)

    def admit(self, *frames):
        return peer_admission.admit(self.manager, list(frames))

    def test_made_up_decodes(self):
        other = {**PLAIN, "page_size": 7}
        for number in range(5000):
            self.admit(*nixl_registration(1, f"d{number}", description=other))
        self.assertLess(len(self.lines), 60)
        self.assertIn("d0", self.lines[0].getMessage())

    def test_made_up_reasons(self):
        for number in range(5000):
            tag = peer_agreement.REFUSED_TAG
            self.admit(tag, str(number).encode(), b"one reason")
        self.assertLess(len(self.lines), 5)
        later = time.monotonic() + 60
        with mock.patch.object(log_limits.time, "monotonic", return_value=later):
            self.admit(peer_agreement.REFUSED_TAG, b"1", b"one reason")
        self.assertIn("one reason", self.lines[-1].getMessage())
        self.assertEqual(len(self.lines), 2, "silent for ever")


class TestWithoutTheAgreement(_Prefill):
    """This component alone: decodes are not compared, control threads are guarded."""

    def test_messages_are_admitted(self):
        with mock.patch.object(peer_admission, "agreement", None):
            manager = nixl_prefill(None)
            self.start(manager, manager._start_bootstrap_thread)
            open_sender(manager, 1)
            self.wire.send(b"PEER_REFUSED", b"1", b"a tag nobody knows here")
            self.wire.send(*nixl_registration(self.wire.port, description=NATIVE))
            self.wire.send(*nixl_metadata(1, self.wire.port))
            self.assertTrue(self.is_ready(1))


class TestFrames(CustomTestCase):
    def test_description_is_found_wherever_it_stands_and_taken_out(self):
        other = b"dspark-tail/1:xyz"
        message = [*nixl_registration(1, description=PLAIN), other]
        self.assertEqual(peer_agreement.take_description(message), PLAIN)
        self.assertEqual(message, [*nixl_registration(1), other])
        self.assertIsNone(peer_agreement.take_description(message))

    def test_a_frame_that_only_claims_to_be_one_is_an_error(self):
        magic = peer_agreement.FRAME_MAGIC
        for frame in (b"[]", b"{", b"\xff", b" " * 70000):
            with self.subTest(frame[:4]), self.assertRaises(ValueError):
                peer_agreement.take_description([b""] * 5 + [magic + frame])


if __name__ == "__main__":
    unittest.main()
