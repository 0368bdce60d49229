"""The tail's shape, this process's part in a handoff, and what peers are told."""

from __future__ import annotations

import os
import pathlib
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import msgspec
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
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pool
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


FACTS = handoff.DraftFacts((0, 2, 4), 31)


class TestVariables(HandoffCase):
    def test_declared_with_defaults(self):
        self.assertFalse(envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.get())
        self.assertEqual(tuple(envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.get()), ())
        self.assertEqual(envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.get(), 8)
        self.assertFalse(envs.SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT.get())
        self.assertEqual(envs.SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS.get(), 0)

    def test_forward_keeps_all_tokens(self):
        handoff.activate(spec=handoff.shape_of(FACTS, target_config()))
        self.assertEqual(get_server_return_hidden_states_mode(), CaptureHiddenMode.FULL)
        # Not what the environment says: that is read once, when the model is loaded.
        handoff.deactivate()
        os.environ[CAPTURE] = "1"
        self.assertFalse(handoff.capture_enabled())

    def test_client_hidden_states_refused(self):
        """In the tokenizer's process, by either variable that asks for capture."""
        for name, value in ((CAPTURE, "1"), (LAYER_IDS, "0,1")):
            with mock.patch.dict(os.environ, {name: value}), self.subTest(name):
                with self.assertRaisesRegex(ValueError, "cannot return any to clients"):
                    self.ask_for_hidden_states(server_args())
                decode = server_args(**DECODE)
                self.assertIsNone(self.refusal(decode, CaptureHiddenMode.FULL))
        self.assertIsNone(self.refusal(server_args(), CaptureHiddenMode.FULL))

    def refusal(self, args, mode):
        with mock.patch("sglang.srt.runtime_context.get_server_args", lambda: args):
            return handoff.refuse_client_hidden_states(mode)

    def ask_for_hidden_states(self, args):
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
        with (
            mock.patch(config, lambda: SimpleNamespace(features=features)),
            mock.patch("sglang.srt.runtime_context.get_server_args", lambda: args),
        ):
            manager._validate_one_request(request, [1])


class TestState(HandoffCase):
    def test_parts_are_added_and_forgotten_together(self):
        """Load of the model and start of the scheduler each bring their part."""
        handoff.activate(peer_draft_tokens=5)
        handoff.activate(tail="rows")
        self.assertEqual(handoff.peer_draft_tokens(), 5)
        self.assertEqual(handoff.current().tail, "rows")
        handoff.deactivate()
        self.assertEqual(handoff.current(), handoff.Handoff())


class TestSpecs(HandoffCase):
    """What a capturing prefill hands over."""

    def spec(self, target=None, **args):
        target = target or target_config()
        return handoff.spec_of(
            handoff.facts_of(server_args(**args), target), target.dtype
        )

    def test_default_is_what_the_draft_reads(self):
        os.environ[CAPTURE] = "1"
        with self.drafts(draft_config(window=32)):
            spec = self.spec(speculative_draft_model_path="draft")
        self.assertEqual((spec.layer_ids, spec.tail_tokens), ((0, 2, 4), 31))
        self.assertEqual(spec.token_bytes, 3 * 16 * 2)
        self.assertEqual(spec.slot_bytes, 64 + 31 * 96)

    def test_default_without_a_known_draft_is_eight_tokens(self):
        os.environ[LAYER_IDS] = "0,2,4"
        self.assertEqual(self.spec().tail_tokens, 8)

    def test_naming_the_layers_asks_for_capture(self):
        os.environ[LAYER_IDS] = "0,2,4"
        self.assertEqual(self.spec().layer_ids, (0, 2, 4))
        os.environ[CAPTURE] = "0"
        with self.refuse(f"{LAYER_IDS} set, with no effect"):
            self.spec()

    def test_layer_ids_come_from(self):
        """The variable, then a bundled draft, then the draft's own config."""
        os.environ.update({CAPTURE: "1", TAIL_TOKENS: "4", ALLOW_PARTIAL_CONTEXT: "1"})
        with self.refuse(f"{LAYER_IDS}.*--speculative-draft-model-path"):
            self.spec()
        bundled = target_config(
            dspark_target_layer_ids=[1, 3],
            dspark_block_size=4,
            dspark_markov_rank=8,
            dspark_noise_token_id=0,
        )
        self.assertEqual(self.spec(bundled).layer_ids, (1, 3))
        with self.drafts(draft_config()):
            spec = self.spec(speculative_draft_model_path="draft")
        self.assertEqual(spec.layer_ids, (0, 2, 4))
        os.environ[LAYER_IDS] = "0,5"
        self.assertEqual(self.spec(bundled).layer_ids, (0, 5))

    def test_draft_in_the_targets_checkpoint(self):
        """In the folder where SGLang looks for it."""
        os.environ[CAPTURE] = "1"
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "dspark").mkdir()
        (folder / "dspark" / "config.json").write_text("{}")
        opened = []
        load = "sglang.srt.utils.hf_transformers_utils.get_config"
        config = draft_config(window=32)
        with mock.patch(load, lambda path, **how: opened.append((path, how)) or config):
            spec = self.spec(
                model_path=str(folder), json_model_override_args='{"key": 1}'
            )
        self.assertEqual(spec.tail_tokens, 31)
        ((path, how),) = opened
        self.assertEqual(path, str(folder / "dspark"))
        self.assertEqual(how["model_override_args"], {"key": 1})

    def test_minimax_draft_is_read_as_sglang_reads_it(self):
        os.environ[CAPTURE] = "1"
        raw = draft_config(window=32)
        raw.architectures = ["DSparkMiniMaxDraftModel"]
        configure = "sglang.srt.configs.minimax_vl.configure_minimax_m3_dspark"
        ready = draft_config(window=16)
        with self.drafts(raw), mock.patch(configure, lambda _: ready):
            spec = self.spec(speculative_draft_model_path="draft")
        self.assertEqual(spec.tail_tokens, 15)

    def test_looped_target(self):
        """Each pass of a looped model's layers has an id of its own."""
        os.environ.update({TAIL_TOKENS: "4", LAYER_IDS: "0,5,12"})
        spec = self.spec(target_config(num_loops=2))
        self.assertEqual(spec.layer_ids, (0, 5, 12))

    def test_partial_context_needs_consent(self):
        os.environ[CAPTURE] = "1"
        for draft, tail in ((draft_config(), 8), (draft_config(window=32), 30)):
            os.environ[TAIL_TOKENS] = str(tail)
            os.environ.pop(ALLOW_PARTIAL_CONTEXT, None)
            with self.drafts(draft), self.subTest(tail):
                with self.refuse(f"{ALLOW_PARTIAL_CONTEXT}=1"):
                    self.spec(speculative_draft_model_path="draft")
                os.environ[ALLOW_PARTIAL_CONTEXT] = "1"
                spec = self.spec(speculative_draft_model_path="draft")
                self.assertEqual(spec.tail_tokens, tail)

    def test_fingerprint_tells_meanings_apart(self):
        marks = set()
        for ids in ((0, 1), (0, 2), (0, 1, 2)):
            for dtype in (torch.bfloat16, torch.float32):
                target = target_config()
                target.dtype = dtype
                facts = handoff.DraftFacts(ids, 4)
                marks.add(handoff.shape_of(facts, target).fingerprint)
        self.assertEqual(len(marks), 6)
        self.assertTrue(all(0 < mark < 1 << 63 for mark in marks))

    def test_all_reasons_are_in_one_message(self):
        os.environ[LAYER_IDS] = "0,1"
        with self.refuse(r"(?s)This prefill engine.*\[TAIL-CP\].*\[TAIL-PDMUX\]"):
            self.spec(enable_pdmux=True, attn_cp_size=2)


class TestDescriptions(HandoffCase):
    def describe(self, role, **args):
        return handoff.describe_role(role, server_args(**args), target_config())

    def test_capturing_prefill(self):
        facts = handoff.DraftFacts((0, 2, 4), None)
        shape = handoff.shape_of(facts, target_config())
        spec = msgspec.structs.replace(shape, tail_tokens=8)
        handoff.activate(spec=spec)
        found = self.describe("prefill")
        self.assertEqual((found["mode"], found["tail_tokens"]), ("tail", 8))
        self.assertEqual((found["layer_ids"], found["hidden_size"]), ([0, 2, 4], 16))
        # It knows no window, so it has nothing to consent to.
        self.assertNotIn("window_need", found)

    def test_native_and_none(self):
        with self.drafts(draft_config()):
            path = {"speculative_draft_model_path": "draft"}
            self.assertIsNone(self.describe("prefill", **path))
            self.assertIsNone(self.describe("decode", **path))
            found = self.describe("prefill", **path, speculative_algorithm="DSPARK")
        self.assertEqual((found["mode"], found["layer_ids"]), ("native", [0, 2, 4]))
        self.assertNotIn("tail_tokens", found)


class TestRings(HandoffCase):
    def rings(self, algorithm=None, tokens=None):
        spec = SimpleNamespace(
            speculative_algorithm=algorithm, speculative_num_draft_tokens=tokens
        )
        with mock.patch.object(pool, "get_spec", lambda: spec):
            return [pool.resolve_compress_state_ring_size(r) for r in (2, 4, 128)]

    def test_rings_match_the_decode(self):
        """Rings travel page by page; another size is another stride."""
        alone = self.rings()
        decode = self.rings("DSPARK", 8)
        self.assertNotEqual(alone, decode)
        handoff.activate(peer_draft_tokens=8)
        self.assertEqual(self.rings(), decode)
        handoff.deactivate()
        self.assertEqual(self.rings(), alone)


if __name__ == "__main__":
    unittest.main()
