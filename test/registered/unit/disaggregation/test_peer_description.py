"""An engine's description of itself, and the identity of a checkpoint.

Contract: what decides a verdict is in the description; what is not known stays out;
two drafts with the same shape and other weights have other fingerprints; a checkpoint
has the same fingerprint wherever it lies.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import save_file

from sglang.srt.disaggregation.common import peer_agreement
from sglang.srt.disaggregation.common.draft_fingerprint import checkpoint_fingerprint
from sglang.srt.disaggregation.common.peer_agreement_rules import refusal
from sglang.srt.disaggregation.common.peer_description import (
    DEEPSEEK_V4_WINDOW,
    describe,
    kv_heads,
    parallel_sizes,
    read_config,
    ring_sizes,
    window_need,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}
DRAFT = {
    **TARGET,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 0},
}
V4 = {**TARGET, "compress_ratios": [0, 4, 128, 4]}
ARGS = {
    "disaggregation_transfer_backend": "nixl",
    "speculative_algorithm": "DSPARK",
    "speculative_num_draft_tokens": 5,
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "tp_size": 2,
}
PLAIN_ARGS = {**ARGS, "speculative_algorithm": None}


def describe_role(role, args=ARGS, *, draft=DRAFT, target=TARGET, environ=None):
    return describe(
        args,
        role=role,
        target_config=target,
        draft_config=draft,
        environ=environ,
    )


class TestDescription(CustomTestCase):
    def test_equal_engines_agree(self):
        verdict = refusal(describe_role("decode"), describe_role("prefill"))
        self.assertIsNone(verdict)

    def test_it_is_json(self):
        described = describe_role("decode")
        self.assertEqual(json.loads(json.dumps(described)), described)

    def test_each_field_that_gives_a_draft_its_meaning_counts(self):
        for change in (
            {"num_hidden_layers": 3},
            {"num_key_value_heads": 4},
            {"head_dim": 64},
            {"sliding_window": 32},
            {"layer_types": ["sliding_attention"] * 2},
            {"rope_theta": 1e6},
            {"dflash_config": {"target_layer_ids": [0, 1]}},
            {"vocab_size": 512},
        ):
            other = describe_role("prefill", draft={**DRAFT, **change})
            with self.subTest(change):
                verdict = refusal(describe_role("decode"), other)
                self.assertEqual(verdict.code, "PD-DRAFT-GEOMETRY")
                self.assertIn(other["draft"], verdict.message)

    def test_modes(self):
        capture = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
        tail = {"SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": "32"}
        for role, args, environ, mode in (
            ("prefill", ARGS, {}, "native"),
            ("prefill", PLAIN_ARGS, {}, "none"),
            ("prefill", PLAIN_ARGS, capture, "tail"),
            ("decode", ARGS, {}, "native"),
            ("decode", ARGS, tail, "tail"),
            ("decode", PLAIN_ARGS, tail, "none"),
        ):
            with self.subTest(role=role, mode=mode):
                described = describe_role(role, args, environ=environ)
                self.assertEqual(described["mode"], mode)

    def test_what_is_not_known_stays_out(self):
        described = describe({"tp_size": 1}, role="prefill")
        self.assertEqual(
            set(described),
            {"version", "role", "algorithm", "mode", "tp", "pp", "cp", "dp", "dcp"}
            | {"allow_cold_draft", "allow_partial_context"},
        )

    def test_attention_ranks(self):
        args = {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}
        self.assertEqual(parallel_sizes(args)["tp"], 2)
        self.assertEqual(parallel_sizes({"tp_size": 8, "dp_size": 4})["tp"], 8)

    def test_a_checkpoint_may_carry_its_own_draft(self):
        bundled = {**V4, "dspark_block_size": 5, "dspark_target_layer_ids": [1, 2]}
        described = describe_role("decode", draft=None, target=bundled)
        self.assertIn("target_layers=[1, 2]", described["draft"])
        self.assertEqual(described["attention"], "compressed_mla")

    def test_rows_that_a_draft_needs(self):
        types = ["sliding_attention"] * 2
        sliding = {**DRAFT, "layer_types": types, "sliding_window": 32}
        mixed = {**sliding, "layer_types": [*types, "full_attention"]}
        for config, rows in (
            (DRAFT, None),
            (sliding, 31),
            (mixed, None),
            (V4, 128),
            ({**V4, "sliding_window": 64}, 64),
        ):
            self.assertEqual(window_need(config), rows)

    def test_the_default_window_of_deepseek_v4_is_upstreams(self):
        from sglang.srt.configs.deepseek_v4 import DeepSeekV4Config

        self.assertEqual(DeepSeekV4Config.window_size, DEEPSEEK_V4_WINDOW)

    def test_rings_of_deepseek_v4(self):
        """Rows by ratio: 8 or 16 for ratio 4; a power of two above the block for 2."""
        self.assertEqual(ring_sizes(V4, PLAIN_ARGS, {}), {"4": 8})
        self.assertEqual(ring_sizes(V4, ARGS, {}), {"4": 16})
        peer = {"SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS": "5"}
        self.assertEqual(ring_sizes(V4, PLAIN_ARGS, peer), {"4": 16})
        self.assertEqual(
            ring_sizes({"compress_ratios": [2]}, PLAIN_ARGS, peer), {"2": 8}
        )
        self.assertIsNone(ring_sizes(TARGET, ARGS, {}))

    def test_rings_are_what_upstream_allocates(self):
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
            get_compress_state_ring_size,
        )

        ratios = [4]
        try:
            get_compress_state_ring_size(2)
            ratios.append(2)
        except AssertionError:  # releases before DeepSeek-V4.1 have no ratio 2
            pass
        for tokens in range(10):
            args = {**ARGS, "speculative_num_draft_tokens": tokens}
            if not tokens:
                args = PLAIN_ARGS
            for ratio in ratios:
                config = {"compress_ratios": [ratio]}
                with self.subTest(tokens=tokens, ratio=ratio):
                    rows = get_compress_state_ring_size(ratio, tokens)
                    self.assertEqual(ring_sizes(config, args, {}), {str(ratio): rows})

    def test_heads_without_head_dim(self):
        config = {"num_attention_heads": 4, "hidden_size": 128}
        self.assertEqual(kv_heads(config), [4, 32])
        self.assertIsNone(kv_heads({}))


class TestEngineFacts(CustomTestCase):
    """The running engine replaces what arguments only suggest."""

    def describe_rank(self, handoff):
        config = SimpleNamespace(to_dict=lambda: TARGET)
        pool = SimpleNamespace(dtype=torch.float32)
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(**PLAIN_ARGS),
            model_config=SimpleNamespace(hf_config=config),
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        )
        kv_args = SimpleNamespace(
            page_size=64, kv_cache_dtype_str="auto", kv_item_lens=[8] * 8
        )
        buffers = SimpleNamespace(
            output_ids=torch.zeros(1),
            kv_checksum=None,
            dspark_tail=torch.zeros(1),
            bootstrap_room=torch.zeros(1, 2),
        )
        with (
            mock.patch.object(
                peer_agreement, "_describe_handoff", return_value=handoff
            ),
            mock.patch.object(
                peer_agreement, "_resolved_args", side_effect=lambda args: vars(args)
            ),
        ):
            peer_agreement.describe_engine(scheduler, "prefill", kv_args, buffers)
        return kv_args.peer_description

    def test_facts_of_the_engine(self):
        described = self.describe_rank(None)
        self.assertEqual(described["page_size"], 64)
        self.assertEqual(described["kv_storage"], "float32")
        self.assertEqual(described["aux"], ["output_ids:4", "bootstrap_room:8"])
        self.assertEqual((described["kv_entries"], described["mode"]), (8, "none"))
        self.assertFalse(described["kv_layer_ids"])

    def test_the_hand_over_speaks_for_itself(self):
        tail = {"mode": "tail", "tail_tokens": 8}
        described = self.describe_rank(tail)
        self.assertEqual((described["mode"], described["dspark"]), ("tail", tail))


class TestFingerprint(CustomTestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def checkpoint(self, name, seed, rows=64):
        folder = os.path.join(self.folder, name)
        os.makedirs(folder)
        generator = torch.Generator().manual_seed(seed)
        weights = {"w": torch.randn(rows, 64, generator=generator)}
        save_file(weights, os.path.join(folder, "model.safetensors"))
        return folder

    def test_same_weights_elsewhere(self):
        here = checkpoint_fingerprint(self.checkpoint("here", seed=1))
        self.assertEqual(here, checkpoint_fingerprint(self.checkpoint("there", seed=1)))
        self.assertRegex(here, "^[0-9a-f]{16}$")

    def test_same_shape_other_weights(self):
        one = checkpoint_fingerprint(self.checkpoint("one", seed=1))
        self.assertNotEqual(one, checkpoint_fingerprint(self.checkpoint("two", seed=2)))

    def test_reads_a_bounded_part_of_a_large_checkpoint(self):
        folder = self.checkpoint("large", seed=1, rows=40_000)
        path = os.path.join(folder, "model.safetensors")
        real, read = open, []

        def counting(*args, **kwargs):
            file = real(*args, **kwargs)
            original = file.read
            return mock.MagicMock(
                wraps=file,
                read=lambda n: read.append(n) or original(n),
                __enter__=lambda self: self,
                __exit__=lambda *a: file.close(),
            )

        with mock.patch("pathlib.Path.open", lambda self, mode: counting(self, mode)):
            self.assertIsNotNone(checkpoint_fingerprint(folder))
        self.assertGreater(os.path.getsize(path), 8 << 20)
        self.assertLess(sum(read), 1 << 20)

    def test_what_cannot_be_read_has_none(self):
        broken = os.path.join(self.folder, "broken")
        os.makedirs(broken)
        with open(os.path.join(broken, "model.safetensors"), "wb") as file:
            file.write(b"\xff" * 64)
        for folder in (None, "", "/no/such/folder", self.folder, broken):
            with self.subTest(folder):
                self.assertIsNone(checkpoint_fingerprint(folder))

    def test_config_of_a_folder(self):
        with open(os.path.join(self.folder, "config.json"), "w") as file:
            json.dump(TARGET, file)
        self.assertEqual(read_config(self.folder), TARGET)
        self.assertIsNone(read_config("/no/such/folder"))


if __name__ == "__main__":
    unittest.main()
