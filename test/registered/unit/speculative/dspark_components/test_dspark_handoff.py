"""The tail's shape, this process's part in a handoff, and what peers are told."""

from __future__ import annotations

import os
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from handoff_fixtures import (
    DECODE,
    HandoffCase,
    draft_config,
    server_args,
    target_config,
)

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    get_server_return_hidden_states_mode,
)
from sglang.srt.speculative.dspark_components import dspark_handoff as handoff
from sglang.srt.speculative.dspark_components.handoff_refusals import (
    ALLOW_PARTIAL_CONTEXT,
    CAPTURE,
    LAYER_IDS,
    TAIL_TOKENS,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


class TestVariables(HandoffCase):
    def test_declared_with_defaults(self):
        self.assertFalse(envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.get())
        self.assertEqual(tuple(envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.get()), ())
        self.assertEqual(envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.get(), 8)
        self.assertFalse(envs.SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT.get())
        self.assertEqual(envs.SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS.get(), 0)

    def test_forward_keeps_all_tokens(self):
        os.environ[CAPTURE] = "1"
        self.assertEqual(get_server_return_hidden_states_mode(), CaptureHiddenMode.FULL)

    def test_client_hidden_states_refused(self):
        handoff.refuse_client_hidden_states(CaptureHiddenMode.FULL)
        os.environ[CAPTURE] = "1"
        handoff.refuse_client_hidden_states(CaptureHiddenMode.NULL)
        with self.assertRaisesRegex(ValueError, "cannot return any to clients"):
            self.ask_for_hidden_states()

    def ask_for_hidden_states(self):
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        manager = object.__new__(TokenizerManager)
        manager.model_config = SimpleNamespace(vocab_size=100)
        manager._validate_token_ids_logprob = lambda _: None
        manager._validate_joint_schema_request = lambda *_: None
        manager.validate_total_tokens = False
        manager.context_len, manager.num_reserved_tokens = 100, 0
        manager.allow_auto_truncate = manager.is_generation = True
        request = GenerateReqInput(
            input_ids=[1], sampling_params={}, return_hidden_states=True
        )
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        config = "sglang.srt.managers.tokenizer_manager.get_exec"
        with mock.patch(config, lambda: SimpleNamespace(features=features)):
            manager._validate_one_request(request, [1])


class TestState(HandoffCase):
    def test_parts_are_added_and_forgotten_together(self):
        """Load of the model and start of the scheduler each bring their part."""
        handoff.activate(peer_draft_tokens=5)
        handoff.activate(cap_tokens=8)
        self.assertEqual(handoff.peer_draft_tokens(), 5)
        self.assertEqual(handoff.current().cap_tokens, 8)
        handoff.deactivate()
        self.assertEqual(handoff.current(), handoff.Handoff())


class TestSpecs(HandoffCase):
    def prefill(self, target=None, **args):
        os.environ[CAPTURE] = "1"
        spec = handoff.resolve_spec(server_args(**args), target or target_config())
        del os.environ[CAPTURE]
        return spec

    def decode(self, draft, target=None):
        args = server_args(**DECODE)
        return handoff.resolve_spec(args, target or target_config(), draft)

    def test_both_engines_agree(self):
        """One number for the slot, whichever engine computes it."""
        os.environ[TAIL_TOKENS] = "-1"
        draft = draft_config(window=32)
        decode = self.decode(draft)
        with self.drafts(draft):
            prefill = self.prefill(speculative_draft_model_path="draft")
        self.assertEqual(prefill, decode)
        self.assertEqual(decode.tail_tokens, 31)
        self.assertEqual(decode.token_bytes, 3 * 16 * 2)
        self.assertEqual(decode.slot_bytes, 64 + 31 * 96)
        self.assertTrue(decode.covers_draft)

    def test_layer_ids_come_from(self):
        """The variable, then a bundled draft, then the draft's own config."""
        os.environ.update({TAIL_TOKENS: "4", ALLOW_PARTIAL_CONTEXT: "1"})
        with self.refuse(f"{LAYER_IDS}.*--speculative-draft-model-path"):
            self.prefill()
        os.environ[CAPTURE] = "0"
        bundled = target_config(
            dspark_target_layer_ids=[1, 3],
            dspark_block_size=4,
            dspark_markov_rank=8,
            dspark_noise_token_id=0,
        )
        self.assertEqual(self.prefill(bundled).layer_ids, (1, 3))
        with self.drafts(draft_config()):
            spec = self.prefill(speculative_draft_model_path="draft")
        self.assertEqual(spec.layer_ids, (0, 2, 4))
        os.environ[LAYER_IDS] = "0,5"
        self.assertEqual(self.prefill(bundled).layer_ids, (0, 5))

    def test_looped_target(self):
        """Each pass of a looped model's layers has an id of its own."""
        os.environ.update({TAIL_TOKENS: "4", LAYER_IDS: "0,5,12"})
        spec = self.prefill(target_config(num_loops=2))
        self.assertEqual(spec.layer_ids, (0, 5, 12))

    def test_partial_context_needs_consent(self):
        cases = ((draft_config(), 8), (draft_config(window=32), 30))
        for draft, tail in cases:
            os.environ[TAIL_TOKENS] = str(tail)
            os.environ.pop(ALLOW_PARTIAL_CONTEXT, None)
            with self.subTest(tail), self.refuse(f"{ALLOW_PARTIAL_CONTEXT}=1"):
                self.decode(draft)
            os.environ[ALLOW_PARTIAL_CONTEXT] = "1"
            spec = self.decode(draft)
            self.assertEqual((spec.tail_tokens, spec.covers_draft), (tail, False))

    def test_fingerprint_tells_meanings_apart(self):
        os.environ.update({TAIL_TOKENS: "4", ALLOW_PARTIAL_CONTEXT: "1"})
        marks = set()
        for ids in ((0, 1), (0, 2), (0, 1, 2)):
            for dtype in (torch.bfloat16, torch.float32):
                target = target_config()
                target.dtype = dtype
                spec = self.decode(draft_config(layer_ids=ids), target)
                marks.add(spec.fingerprint)
        self.assertEqual(len(marks), 6)
        self.assertTrue(all(0 < mark < 1 << 63 for mark in marks))

    def test_all_reasons_are_in_one_message(self):
        os.environ[LAYER_IDS] = "0,1"
        with self.refuse(r"(?s)This prefill engine.*\[TAIL-CP\].*\[TAIL-PDMUX\]"):
            self.prefill(enable_pdmux=True, attn_cp_size=2)


class TestDescriptions(HandoffCase):
    def test_tail(self):
        os.environ.update({TAIL_TOKENS: "-1", CAPTURE: "1"})
        with self.drafts(draft_config(window=32)):
            args = server_args(speculative_draft_model_path="draft")
            prefill = handoff.describe_prefill(args, target_config())
            os.environ[CAPTURE] = "0"
            decode = handoff.describe_decode(server_args(**DECODE), target_config())
        self.assertEqual(prefill, decode)
        self.assertEqual(prefill["mode"], "tail")
        self.assertEqual((prefill["tail_tokens"], prefill["window_need"]), (31, 31))

    def test_native_and_none(self):
        with self.drafts(draft_config()):
            args = server_args(speculative_draft_model_path="draft")
            self.assertIsNone(handoff.describe_prefill(args, target_config()))
            self.assertIsNone(handoff.describe_decode(args, target_config()))
            args.speculative_algorithm = "DSPARK"
            for describe in (handoff.describe_prefill, handoff.describe_decode):
                found = describe(args, target_config())
                self.assertEqual(found["mode"], "native")
                self.assertEqual(found["layer_ids"], [0, 2, 4])
                self.assertEqual((found["tail_tokens"], found["row_bytes"]), (0, 0))


if __name__ == "__main__":
    unittest.main()
