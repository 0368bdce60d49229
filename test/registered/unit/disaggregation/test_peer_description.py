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

from sglang.srt.disaggregation.common import engine_facts
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.common.draft_fingerprint import checkpoint_fingerprint
from sglang.srt.disaggregation.common.peer_agreement_rules import refusal
from sglang.srt.disaggregation.common.peer_description import (
    DEEPSEEK_V4_WINDOW,
    describe,
    draft_kv_dtype,
    kv_heads,
    local_folder,
    parallel_sizes,
    read_config,
    ring_sizes,
    stages_divide,
    window_need,
)
from sglang.srt.disaggregation.utils import build_kv_layer_ids
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
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

    def test_the_allocation_policy_has_a_default(self):
        flag = "disaggregation_decode_allocation_policy"
        ours = describe_role("decode")
        for value, fits in (("early", True), ("prefill_complete", False)):
            theirs = describe_role("prefill", {**ARGS, flag: value})
            found = refusal(ours, theirs)
            self.assertEqual(found is None, fits)
        self.assertEqual(found.code, "PD-ALLOCATION")
        self.assertIn("prefill_complete", found.text)
        self.assertIn("early", found.text)

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
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            {"dflash_config": {"target_layer_ids": [0, 1]}},
            {"vocab_size": 512},
        ):
            whole = {**DRAFT, "sliding_window": 16, "rope_theta": 1e4}
            whole["layer_types"] = ["full_attention"] * 2
            ours = describe_role("decode", draft=whole)
            other = describe_role("prefill", draft={**whole, **change})
            with self.subTest(change):
                verdict = refusal(ours, other)
                self.assertEqual(verdict.code, "PD-DRAFT-GEOMETRY")
                [key, *_] = [
                    k for k, v in other["draft"].items() if ours["draft"].get(k) != v
                ]
                self.assertIn(f"{key}={other['draft'][key]}", verdict.message)

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
            | {"allow_cold_draft", "allow_partial_context", "allocation_policy"},
        )

    def test_attention_ranks(self):
        args = {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}
        self.assertEqual(parallel_sizes(args)["tp"], 2)
        self.assertEqual(parallel_sizes({"tp_size": 8, "dp_size": 4})["tp"], 8)

    def test_a_checkpoint_may_carry_its_own_draft(self):
        bundled = {**V4, "dspark_block_size": 5, "dspark_target_layer_ids": [1, 2]}
        described = describe_role("decode", draft=None, target=bundled)
        self.assertEqual(described["draft"]["target_layers"], [1, 2])
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
        self.assertEqual(self.rings(V4, PLAIN_ARGS), {"4": 8})
        self.assertEqual(self.rings(V4, ARGS), {"4": 16})
        self.assertEqual(self.rings({"compress_ratios": [2]}, ARGS), {"2": 8})
        self.assertIsNone(self.rings(TARGET, ARGS))

    def test_rings_of_a_prefill_without_draft(self):
        """Wide when it captures, and it must know how wide; see the engine's knobs."""
        peer = {"SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS": "5"}
        bundled = {**V4, "dspark_block_size": 4}
        for config, environ, capturing, sizes in (
            (V4, peer, True, {"4": 16}),
            (bundled, {}, True, {"4": 16}),
            (V4, {}, True, {"4": 8}),
            (V4, peer, False, {"4": 8}),
            (bundled, {}, False, {"4": 8}),
            (V4, {}, False, {"4": 8}),
        ):
            with self.subTest(environ=environ, capturing=capturing):
                found = self.rings(config, PLAIN_ARGS, environ, capturing=capturing)
                self.assertEqual(found, sizes)

    def test_described_rings_follow_capture(self):
        capture = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
        bundled = {**V4, "dspark_block_size": 4}
        plain = {**PLAIN_ARGS}
        on = describe_role("prefill", plain, target=bundled, environ=capture)
        off = describe_role("prefill", plain, target=bundled, environ={})
        self.assertEqual((on["rings"], off["rings"]), ({"4": 16}, {"4": 8}))

    def rings(self, config, args, environ=None, *, capturing=False):
        return ring_sizes(config, args, environ or {}, capturing=capturing)

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
                    self.assertEqual(self.rings(config, args), {str(ratio): rows})

    def test_heads_without_head_dim(self):
        config = {"num_attention_heads": 4, "hidden_size": 128}
        self.assertEqual(kv_heads(config), [4, 32])
        self.assertIsNone(kv_heads({}))


class TestEngineFacts(CustomTestCase):
    """The running engine replaces what arguments only suggest."""

    def describe_rank(self, handoff, draft_pool=None, **args):
        config = SimpleNamespace(to_dict=lambda: TARGET)
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(**(PLAIN_ARGS | args)),
            model_config=SimpleNamespace(hf_config=config),
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
        queue = SimpleNamespace(
            metadata_buffers=buffers,
            token_to_kv_pool=SimpleNamespace(dtype=torch.float32),
            draft_token_to_kv_pool=draft_pool,
        )
        with (
            mock.patch.object(engine_facts, "_describe_handoff", return_value=handoff),
            mock.patch.object(
                engine_facts, "_resolved_args", side_effect=lambda args: vars(args)
            ),
        ):
            engine_facts.describe_engine(scheduler, "prefill", kv_args, queue)
        return kv_args.peer_description

    def test_facts_of_the_engine(self):
        described = self.describe_rank(None)
        self.assertEqual(described["page_size"], 64)
        self.assertEqual(described["kv_storage"], "float32")
        self.assertEqual(described["aux"], ["output_ids:4", "bootstrap_room:8"])
        self.assertEqual((described["kv_entries"], described["mode"]), (8, "none"))
        self.assertFalse(described["kv_layer_ids"])
        self.assertNotIn("draft_kv_dtype", described)

    def test_dtype_of_the_drafts_pool(self):
        described = self.describe_rank(None, SimpleNamespace(dtype=torch.bfloat16))
        self.assertEqual(described["draft_kv_dtype"], "bfloat16")

    def test_a_rank_without_the_drafts_pool_does_not_guess_its_dtype(self):
        flags = {"speculative_algorithm": "DSPARK", "kv_cache_dtype": "fp8_e4m3"}
        self.assertNotIn("draft_kv_dtype", self.describe_rank(None, **flags))
        pool = SimpleNamespace(dtype=torch.float16)
        described = self.describe_rank(None, pool, **flags)
        self.assertEqual(described["draft_kv_dtype"], "float16")

    def test_refusals_are_admitted_only_where_they_are_read(self):
        self.assertTrue(self.describe_rank(None)["admits"])
        with mock.patch.object(engine_facts, "_is_installed", return_value=False):
            self.assertNotIn("admits", self.describe_rank(None))
        self.assertFalse(engine_facts.admits("ascend"))

    def test_the_hand_over_speaks_for_itself(self):
        tail = {"mode": "tail", "tail_tokens": 8}
        described = self.describe_rank(tail)
        self.assertEqual((described["mode"], described["dspark"]), ("tail", tail))


class TestStagePairing(CustomTestCase):
    """What a stage can be placed by, from upstream's own pools and configs."""

    def pairing(self, backend, pool, *, layers=4, pp=2, attention="mha", ratios=None):
        description = {
            "backend": backend,
            "attention": attention,
            "target": {"layers": layers},
            "pp": pp,
        }
        kv_args = SimpleNamespace(mla_compression_ratios=ratios)
        return engine_facts.stage_pairing(description, pool, kv_args)

    def mha_pool(self):
        return object.__new__(MHATokenToKVPool)

    def test_plain_pools(self):
        self.assertEqual(self.pairing("nixl", self.mha_pool()), "none")
        self.assertEqual(self.pairing("mooncake", self.mha_pool()), "guess")
        self.assertEqual(self.pairing("mooncake", self.mha_pool(), layers=7), "none")

    def test_the_guess_is_right_exactly_where_it_is_said_to_be(self):
        """Against upstream's own positional pairing, all stages of many splits."""
        for layers in range(1, 25):
            for pp in range(2, min(layers, 5) + 1):
                right = True
                for rank in range(pp):
                    start, end = get_pp_indices(layers, rank, pp)
                    right &= self.guesses_right(layers, start, end)
                said = self.pairing("mooncake", self.mha_pool(), layers=layers, pp=pp)
                with self.subTest(layers=layers, pp=pp):
                    self.assertEqual(said == "guess", right)

    def guesses_right(self, layers, start, end):
        manager = object.__new__(CommonKVManager)
        manager.kv_args = SimpleNamespace(prefill_start_layer=start)
        names = [f"{kind}{i}" for kind in "KV" for i in range(layers)]
        own = [f"{kind}{i}" for kind in "KV" for i in range(start, end)]
        keys_src, values_src, keys, values, _ = manager.get_mha_kv_ptrs_with_pp(
            own, names
        )
        return keys == keys_src and values == values_src

    def test_a_partition_of_ones_own(self):
        name = "SGLANG_PP_LAYER_PARTITION"
        for partition, divides in (("2,2", True), ("1,3", False), ("1,1,2", True)):
            stages = partition.count(",") + 1
            self.assertIs(stages_divide(4, stages, {name: partition}), divides)

    def test_compressed_pools_report_no_ids_and_are_placed(self):
        pool = object.__new__(DeepSeekV4TokenToKVPool)
        ids = build_kv_layer_ids(
            token_to_kv_pool=pool,
            draft_token_to_kv_pool=None,
            num_draft_entries=0,
            num_hidden_layers=4,
        )
        self.assertEqual(ids, [])
        v4 = {"attention": "compressed_mla", "ratios": [0, 4, 128, 4]}
        self.assertEqual(self.pairing("mooncake", pool, **v4), "position")
        with mock.patch.object(engine_facts, "_is_installed", return_value=True):
            self.assertEqual(self.pairing("nixl", pool, **v4), "position")
        with mock.patch.object(engine_facts, "_is_installed", return_value=False):
            self.assertEqual(self.pairing("nixl", pool, **v4), "none")

    def test_mla_pools(self):
        placed = hasattr(CommonKVManager, "_mla_kv_entry_span_with_pp")
        mla = {"attention": "mla"}
        self.assertEqual(self.pairing("mooncake", object(), **mla), "position")
        found = self.pairing("nixl", object(), **mla)
        self.assertEqual(found, "position" if placed else "none")

    def test_other_backends_and_pools_are_not_known(self):
        self.assertIsNone(self.pairing("mori", self.mha_pool()))
        self.assertIsNone(self.pairing("mooncake", object()))


class TestRingFacts(CustomTestCase):
    """What the engine publishes is what its pools allocate."""

    def test_facts_come_from_upstreams_function(self):
        if not hasattr(pools, "resolve_compress_state_ring_size"):
            self.skipTest("ring sizes of this release do not depend on draft tokens")
        with mock.patch.object(pools, "resolve_compress_state_ring_size") as resolve:
            resolve.side_effect = lambda ratio: 100 + ratio
            found = engine_facts._rings(["4", "2"])
        self.assertEqual(found, {"4": 104, "2": 102})
        self.assertIsNone(engine_facts._rings([]))

    def test_a_guess_equals_what_the_engine_allocates(self):
        """Capture on and off, told by the environment, by the checkpoint, by neither."""
        if not hasattr(pools, "resolve_compress_state_ring_size"):
            self.skipTest("ring sizes of this release do not depend on draft tokens")
        try:
            from sglang.srt.speculative.dspark_components import dspark_handoff
        except ImportError:
            self.skipTest("the hand-over serves 0.5.23 and later")
        for capturing in (True, False):
            for told in (0, 6):
                for block in (0, 3):
                    with self.subTest(capturing=capturing, told=told, block=block):
                        self.compare(dspark_handoff, capturing, told, block)

    def compare(self, handoff, capturing, told, block):
        config = {**V4, "compress_ratios": [0, 4, 128, 2]}
        if block:
            config["dspark_block_size"] = block
        environ = {"SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS": str(told)} if told else {}
        if capturing:
            environ["SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"] = "1"
        guessed = describe_role(
            "prefill", PLAIN_ARGS, target=config, draft=None, environ=environ
        ).get("rings")
        spec = SimpleNamespace(speculative_algorithm=None)
        facts = handoff.rules.facts_from({}, environ, config, None, "prefill")
        tokens = handoff.rules.peer_draft_tokens(facts) if capturing else 0
        handoff.activate(peer_draft_tokens=tokens or 0)
        self.addCleanup(handoff.deactivate)
        with mock.patch.object(pools, "get_spec", lambda: spec):
            self.assertEqual(engine_facts._rings(["4", "2"]), guessed)


class TestConfigObjects(CustomTestCase):
    """A file and the config object made from it describe one model."""

    DENSE = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    }
    V4_FILE = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [0, 4, 128, 4],
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "head_dim": 512,
        "vocab_size": 1000,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [1, 2],
        "sliding_window": 128,
    }

    def agree(self, raw, whole):
        for draft in (None, "given"):
            sides = [
                describe_role(
                    role, target=config, draft=config if draft else None, environ={}
                )
                for role, config in (("decode", raw), ("prefill", whole))
            ]
            with self.subTest(raw["architectures"], draft=draft):
                self.assertIsNone(refusal(*sides))
                self.assertIsNone(refusal(*reversed(sides)))

    def test_dense_models(self):
        import transformers

        for name in ("Llama", "Qwen2", "Qwen3"):
            raw = {**self.DENSE, "architectures": [f"{name}ForCausalLM"]}
            whole = getattr(transformers, f"{name}Config")(**raw).to_dict()
            self.agree(raw, whole)

    def test_heads_that_only_one_side_spells_out(self):
        raw = {**self.DENSE, "architectures": ["LlamaForCausalLM"]}
        del raw["num_key_value_heads"]
        self.agree(raw, {**raw, "num_key_value_heads": 32, "head_dim": 128})

    def test_deepseek_v4_with_its_bundled_draft(self):
        import transformers

        raw = self.V4_FILE
        whole = transformers.PretrainedConfig(**raw).to_dict()
        self.agree(raw, {**whole, "qk_rope_head_dim": 64})

    def test_mla_has_no_head_dim_of_its_own(self):
        raw = {**self.DENSE, "architectures": ["DeepseekV3ForCausalLM"]}
        raw |= {"kv_lora_rank": 512}
        whole = {**raw, "head_dim": 64, "rope_scaling": None}
        whole["rope_parameters"] = {"rope_type": "deepseek_yarn", "factor": 4.0}
        self.agree(raw, whole)

    def test_a_model_that_differs_is_still_refused(self):
        raw = {**self.DENSE, "architectures": ["LlamaForCausalLM"]}
        for change in ({"num_key_value_heads": 4}, {"head_dim": 64}):
            other = describe_role("prefill", target={**raw, **change})
            found = refusal(describe_role("decode", target=raw), other)
            self.assertEqual(found.code, "PD-TARGET")

    def test_overrides_of_the_config_count(self):
        args = {**ARGS, "json_model_override_args": '{"num_hidden_layers": 3}'}
        found = refusal(describe_role("decode"), describe_role("prefill", args))
        self.assertEqual(found.code, "PD-TARGET")
        for text in ("", "{", "[]"):
            args = {**ARGS, "json_model_override_args": text}
            other = describe_role("prefill", args)
            self.assertIsNone(refusal(describe_role("decode"), other))


class TestDraftDtype(CustomTestCase):
    def dtype(self, config=None, **args):
        return draft_kv_dtype(args, {**TARGET, **(config or {})})

    def test_auto_follows_the_model(self):
        self.assertEqual(self.dtype({"torch_dtype": "bfloat16"}), "bfloat16")
        auto = {"kv_cache_dtype": "auto", "dtype": "half"}
        self.assertEqual(self.dtype({"dtype": "bfloat16"}, **auto), "float16")
        self.assertIsNone(self.dtype({"quantization_config": {"bits": 8}}, **auto))
        self.assertIsNone(self.dtype())

    def test_a_flag_counts_under_any_of_its_names(self):
        flag = {"kv_cache_dtype": "fp8_e4m3"}
        self.assertEqual(self.dtype(**flag), "float8_e4m3fn")
        flag["speculative_draft_kv_cache_dtype"] = "bf16"
        self.assertEqual(self.dtype(**flag), "bfloat16")


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

    def test_revision_of_a_hub_name(self):
        """Two engines with two revisions of one name have two fingerprints."""
        folders = {None: self.checkpoint("main", 1), "old": self.checkpoint("old", 2)}

        def cached(name, file, revision=None):
            return os.path.join(folders[revision], file)

        with mock.patch("huggingface_hub.try_to_load_from_cache", cached):
            self.assertEqual(local_folder("org/draft", "old"), folders["old"])
            args = {**ARGS, "speculative_draft_model_path": "org/draft"}
            main = describe_role("decode", args)
            args["speculative_draft_model_revision"] = "old"
            self.assertEqual(
                refusal(main, describe_role("prefill", args)).code, "PD-DRAFT-WEIGHTS"
            )


if __name__ == "__main__":
    unittest.main()
