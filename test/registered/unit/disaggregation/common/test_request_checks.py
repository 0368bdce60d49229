"""A request that would end an engine is refused when it arrives.

Contract: prompts without tokens, foreign token ids and impossible logprobs get a ValueError,
which a server answers with status 400; each sample of ``n`` above 1 has a bootstrap room that prefill
and decode derive alike; a room in use is refused to a second request.
"""

from __future__ import annotations

import asyncio
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from kv_managers import close, nixl_decode

from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.request_checks import (
    check_request,
    room_of_sample,
)
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

VOCABULARY = 260
ROOM = 2**62 + 12345
LOGPROBS = {"return_logprob": True}


class Requests(dict):
    """States by request id; releases before 0.5.21 keep a set of ids."""

    def add(self, rid):
        self[rid] = None


def a_manager() -> TokenizerManager:
    """What validation of a request asks of a tokenizer manager."""
    manager = object.__new__(TokenizerManager)
    manager.model_config = SimpleNamespace(
        vocab_size=VOCABULARY, joint_head_config=None, pointer_head=None
    )
    manager.validate_total_tokens = manager.allow_auto_truncate = False
    manager.is_generation = True
    manager.context_len, manager.num_reserved_tokens = 1000, 0
    return manager


class TestRequest(CustomTestCase):
    def check(self, input_ids, **fields):
        request = GenerateReqInput(**{"input_ids": input_ids, **fields})
        check_request(a_manager(), request, input_ids)

    def test_the_whole_vocabulary_is_served(self):
        self.check([0, VOCABULARY - 1])

    def test_a_token_id_outside_the_vocabulary_is_named(self):
        for foreign in (VOCABULARY, -1, 2**70):
            with self.assertRaisesRegex(
                ValueError, f"token id {foreign}, .* from 0 to {VOCABULARY - 1}"
            ):
                self.check([1, foreign, 2])

    def test_a_prompt_without_tokens_is_refused(self):
        for empty in ([], None):
            with self.assertRaisesRegex(ValueError, "Send at least one"):
                check_request(a_manager(), GenerateReqInput(text=""), empty)

    def test_a_session_supplies_the_prompt(self):
        self.check([], session_params={"id": "a"})
        self.check([], session_id="a")

    def test_what_stands_for_other_inputs_is_left_alone(self):
        self.check([-200], image_data=["an image"])
        self.check([VOCABULARY], lora_path="an adapter with tokens of its own")
        overrides = PositionalEmbeds(embeds=[torch.zeros(4)], positions=[0])
        self.check([VOCABULARY], positional_embed_overrides=overrides)
        self.check(None, input_embeds=[[0.5]])

    def test_logprobs_that_exist_are_served(self):
        for start, top in ((-1, 0), (None, None), (0, VOCABULARY), (10**9, 1)):
            self.check([1], logprob_start_len=start, top_logprobs_num=top, **LOGPROBS)
        self.check([1], top_logprobs_num=128, bootstrap_room=ROOM, **LOGPROBS)
        self.check([1], logprob_start_len=-5)  # SGLang ignores it without logprobs

    def test_logprobs_that_do_not_exist_are_refused(self):
        for field, value in (
            ("logprob_start_len", -2),
            ("top_logprobs_num", -1),
            ("top_logprobs_num", VOCABULARY + 1),
        ):
            with self.assertRaisesRegex(ValueError, f"{field} is {value}"):
                self.check([1], **{field: value}, **LOGPROBS)
        with self.assertRaisesRegex(ValueError, "gives 0 to 128"):
            self.check([1], top_logprobs_num=129, bootstrap_room=ROOM, **LOGPROBS)

    def test_overrides_that_no_body_can_hold_are_refused(self):
        for sent in ({}, "x", []):
            with self.assertRaisesRegex(ValueError, "positional_embed_overrides"):
                self.check([1], positional_embed_overrides=sent)

    def test_validation_refuses_a_foreign_token_id(self):
        """SGLang's own validation asks."""
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        execution = SimpleNamespace(features=features)
        request = GenerateReqInput(input_ids=[VOCABULARY], sampling_params={})
        with (
            mock.patch.object(
                tokenizer_manager, "get_exec", lambda: execution, create=True
            ),
            self.assertRaisesRegex(ValueError, "does not have"),
        ):
            a_manager()._validate_one_request(request, [VOCABULARY])


class TestSamples(CustomTestCase):
    def test_rooms_differ_and_fit(self):
        """Also where the rooms of a batch follow each other."""
        for first in (0, ROOM, 2**63 - 2):
            batch = [first, first + 1]
            rooms = [room_of_sample(r, n) for r in batch for n in range(100)]
            self.assertEqual(len({*batch, *rooms}), 202)
            self.assertTrue(all(0 <= room < 2**63 for room in rooms))

    def test_samples_stay_on_the_dp_rank_of_their_prompt(self):
        for ranks in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 72):
            self.assertEqual(room_of_sample(ROOM, 5) % ranks, ROOM % ranks)

    def test_a_plain_server_has_no_rooms(self):
        self.assertIsNone(room_of_sample(None, 3))

    def test_each_sample_is_sent_with_its_own_room(self):
        """SGLang's expansion of n, up to what goes to the scheduler."""
        sent = [[], []]
        for rooms in sent:  # prefill and decode
            request = GenerateReqInput(
                input_ids=[[1], [2]],
                sampling_params={"n": 3},
                bootstrap_host="127.0.0.1",
                bootstrap_room=[ROOM, 7],
            )
            request.normalize_batch_and_arguments()
            asyncio.run(self.expand(request, rooms))
        self.assertEqual(sent[0], sent[1])
        self.assertEqual(sent[0][:2], [ROOM, 7])  # the prompts, before any sample
        self.assertEqual(len(set(sent[0])), 8)

    async def expand(self, request, rooms):
        async def tokenize(obj):
            return SimpleNamespace(
                bootstrap_room=obj.bootstrap_room,
                sampling_params=SimpleNamespace(),
                input_ids=[1],
                mm_inputs=None,
            )

        async def send(tokenized):
            rooms.append(tokenized.bootstrap_room)

        async def answer(obj, _):
            yield {"meta_info": {"id": obj.rid}}

        def init_req_state(obj):
            manager.rid_to_state[obj.rid] = mock.MagicMock()

        manager = object.__new__(TokenizerManager)
        manager.rid_to_state = {}
        manager._tokenize_one_request = tokenize
        manager._send_one_request = send
        manager._wait_one_response = answer
        manager._init_req_state = init_req_state
        for rid in request.rid:
            manager.rid_to_state[rid] = mock.MagicMock()
        states = Requests(manager.rid_to_state)
        asked = (request, None, states)
        known = TokenizerManager._handle_batch_request.__code__.co_argcount
        async for _ in manager._handle_batch_request(*asked[: known - 1]):
            pass


class TestPlacing(CustomTestCase):
    def test_a_prompt_that_decode_can_never_place_is_refused(self):
        """Its pool also needs the tokens that it reserves for an answer."""
        queue = object.__new__(DecodePreallocQueue)
        queue.scheduler = mock.Mock(enable_hisparse=False)
        queue.token_to_kv_pool_allocator = mock.Mock()
        queue.max_total_num_tokens, queue.num_reserved_decode_tokens = 800, 512
        queue.token_to_kv_pool_allocator.prealloc_ceiling_fits.return_value = None
        queue._prealloc_required_tokens = lambda req: (
            len(req.origin_input_ids) + 512,
            0,
        )
        queue._uses_swa_tail_prealloc = lambda: False
        for tokens, refused in ((288, False), (289, True), (801, True)):
            req = mock.Mock(origin_input_ids=[1] * tokens, finished_reason=None)
            req.pd_rebootstrap_in_progress = False
            found = queue._check_if_req_exceed_kv_capacity(req)
            self.assertEqual(found, refused, tokens)
        self.assertIn("1313 > 800", req.finished_reason.message)


class TestRooms(CustomTestCase):
    def setUp(self):
        self.manager = nixl_decode()
        self.addCleanup(close, self.manager)
        self.queue = object.__new__(DecodePreallocQueue)
        self.queue.kv_manager, self.queue.scheduler = self.manager, mock.Mock()
        self.queue._check_if_req_exceed_kv_capacity = lambda _: False
        self.entered = self.queue._create_receiver_and_enqueue = mock.Mock(
            side_effect=lambda *_, **__: SimpleNamespace(kv_receiver=mock.Mock())
        )
        self.queue._resolve_prefill_dp_rank = lambda _: None
        self.queue.pending_reqs = []

    def add(self, room, host="127.0.0.1", **how):
        req = mock.Mock(bootstrap_room=room, bootstrap_host=host, rid="the second")
        with (
            mock.patch(
                "sglang.srt.disaggregation.decode.is_unadmitted_reject",
                lambda _: False,
                create=True,
            ),
            mock.patch.object(utils, "prepare_abort") as abort,
        ):
            self.queue.add(req, **how)
        return abort.call_args

    def test_a_used_room_is_refused(self):
        self.manager.update_status(1, KVPoll.Bootstrapping)
        refused = self.add(1)
        self.assertIn("Bootstrap room 1 of request the second", refused.args[1])
        self.assertEqual(refused.kwargs["status_code"], 400)
        self.entered.assert_not_called()
        self.queue.scheduler.output_streamer.stream_output.assert_called_once()

    def test_a_room_whose_kv_may_still_be_written_is_in_use(self):
        self.manager._deferred_abort_ack_tracker = {1: set()}
        self.assertIsNotNone(self.add(1))

    def test_a_retracted_request_keeps_its_place(self):
        """Its room was free for another request while it ran."""
        self.manager.update_status(1, KVPoll.Bootstrapping)
        self.queue.token_to_kv_pool_allocator = None
        self.queue.retracted_queue = []
        with mock.patch(
            "sglang.srt.disaggregation.decode.dsv4_needs_rebootstrap", lambda _: False
        ):
            self.assertIsNone(self.add(1, is_retracted=True))
        self.assertEqual(len(self.queue.retracted_queue), 1)

    def test_the_fake_backend_has_no_rooms(self):
        """Its manager keeps none, and its requests name no prefill."""
        self.queue.kv_manager = object()
        fake = SimpleNamespace(disaggregation_transfer_backend="fake")
        with mock.patch.object(utils, "get_disagg", lambda: fake):
            self.assertIsNone(self.add(1, host=None))
        self.entered.assert_called_once()

    def test_a_free_room_is_taken(self):
        self.manager.update_status(1, KVPoll.Bootstrapping)
        self.assertIsNone(self.add(2))
        self.entered.assert_called_once()

    def test_warm_ups_share_a_room(self):
        self.manager.update_status(0, KVPoll.Bootstrapping)
        self.assertIsNone(self.add(0, host=utils.FAKE_BOOTSTRAP_HOST))
        self.entered.assert_called_once()


if __name__ == "__main__":
    unittest.main()
