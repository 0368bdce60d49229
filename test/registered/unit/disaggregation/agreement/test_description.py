"""How an engine describes itself, and the identity of a checkpoint.

Contract: everything that a rule compares is in the description; unknown values are left
out; flags count as SGLang resolves them; two drafts of the same shape with different
weights have different fingerprints; a checkpoint has the same fingerprint in any folder.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import unittest
from unittest import mock

import torch
from agreement_fixtures import (
    ARGS,
    DRAFT,
    PLAIN_ARGS,
    TARGET,
    V4,
    describe_role,
    refusal,
)
from safetensors.torch import load_file, save_file

from sglang.srt.disaggregation.agreement.description import (
    DEEPSEEK_V4_WINDOW,
    checkpoint_fingerprint,
    describe,
    describe_tail,
    draft_kv_dtype,
    kv_heads,
    local_folder,
    parallel_sizes,
    read_config,
    ring_sizes,
    window_need,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


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
        layers = {"SGLANG_DSPARK_PD_TARGET_LAYER_IDS": "0,1"}
        for role, args, environ, mode in (
            ("prefill", ARGS, {}, "native"),
            ("prefill", PLAIN_ARGS, {}, "none"),
            ("prefill", PLAIN_ARGS, capture, "tail"),
            ("prefill", PLAIN_ARGS, layers, "tail"),
            ("prefill", ARGS, layers, "native"),
            ("decode", ARGS, {}, "tail"),
            ("decode", PLAIN_ARGS, layers, "none"),
        ):
            with self.subTest(role=role, mode=mode):
                described = describe_role(role, args, environ=environ)
                self.assertEqual(described["mode"], mode)

    def test_length_of_a_tail(self):
        """Prefill's by its own defaults; decode's where it wants one length only."""
        sliding = {**DRAFT, "layer_types": ["sliding_attention"], "sliding_window": 32}
        for role, draft, given, tokens in (
            ("prefill", sliding, None, 31),
            ("prefill", sliding, "-1", 31),
            ("prefill", DRAFT, None, 8),
            ("prefill", None, None, 8),
            ("prefill", None, "-1", None),
            ("prefill", sliding, "16", 16),
            ("decode", sliding, None, None),
            ("decode", sliding, "-1", 31),
            ("decode", sliding, "16", 16),
        ):
            environ = {"SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": given} if given else {}
            with self.subTest(role, given=given, tokens=tokens):
                dspark = describe_tail(role, {}, draft, environ)
                self.assertEqual(dspark.get("tail_tokens"), tokens)

    def test_unknown_values_are_left_out(self):
        described = describe({"tp_size": 1}, role="prefill")
        self.assertEqual(
            set(described),
            {"version", "role", "algorithm", "mode", "tp", "pp", "cp", "dcp"}
            | {"allow_cold_draft", "allow_partial_context", "allocation_policy"},
        )

    def test_attention_ranks_under_both_spellings_of_data_parallel_attention(self):
        old = {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}
        new = {"tp_size": 8, "dp_size": 1, "attn_dp_size": 4}
        shown = {**new, "enable_dp_attention": True}  # by /server_info
        for args in (old, new, shown, {**old, "attn_dp_size": 1}):
            with self.subTest(args):
                self.assertEqual(parallel_sizes(args)["tp"], 2)
        self.assertEqual(parallel_sizes({"tp_size": 8, "dp_size": 4})["tp"], 8)

    def test_the_algorithm_counts_in_any_case(self):
        lower = describe_role("decode", {**ARGS, "speculative_algorithm": "dspark"})
        self.assertEqual(lower, describe_role("decode"))

    def test_a_checkpoint_may_carry_its_own_draft(self):
        bundled = {**V4, "dspark_block_size": 5, "dspark_target_layer_ids": [1, 2]}
        described = describe_role("decode", draft=None, target=bundled)
        self.assertEqual(described["draft"]["target_layers"], [1, 2])
        self.assertEqual(described["attention"], "compressed_mla")

    def test_window_that_a_draft_needs(self):
        types = ["sliding_attention"] * 2
        sliding = {**DRAFT, "layer_types": types, "sliding_window": 32}
        mixed = {**sliding, "layer_types": [*types, "full_attention"]}
        for config, tokens in (
            (DRAFT, None),
            (sliding, 31),
            (mixed, None),
            (V4, 128),
            ({**V4, "sliding_window": 64}, 64),
        ):
            self.assertEqual(window_need(config), tokens)

    def test_the_default_window_of_deepseek_v4_is_upstreams(self):
        from sglang.srt.configs.deepseek_v4 import DeepSeekV4Config

        self.assertEqual(DeepSeekV4Config.window_size, DEEPSEEK_V4_WINDOW)

    def test_rings_of_deepseek_v4(self):
        """Slots by ratio: 8 or 16 for ratio 4; a power of two above the block for 2."""
        self.assertEqual(self.rings(V4, PLAIN_ARGS), {"4": 8})
        self.assertEqual(self.rings(V4, ARGS), {"4": 16})
        self.assertEqual(self.rings({"compress_ratios": [2]}, ARGS), {"2": 8})
        self.assertIsNone(self.rings(TARGET, ARGS))

    def test_rings_of_a_prefill_without_draft(self):
        """Wide when it captures, and it must know how wide; see the engine's variables."""
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
                    slots = get_compress_state_ring_size(ratio, tokens)
                    self.assertEqual(self.rings(config, args), {str(ratio): slots})

    def test_heads_without_head_dim(self):
        config = {"num_attention_heads": 4, "hidden_size": 128}
        self.assertEqual(kv_heads(config), [4, 32])
        self.assertIsNone(kv_heads({}))


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
            for configs in ((raw, whole), (whole, raw)):
                sides = [
                    describe_role(
                        role, target=config, draft=config if draft else None, environ={}
                    )
                    for role, config in zip(("decode", "prefill"), configs, strict=True)
                ]
                with self.subTest(raw["architectures"], draft=draft):
                    self.assertIsNone(refusal(*sides))

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


class _Counting(io.FileIO):
    """A file that notes how many bytes are read."""

    def __init__(self, path, counts):
        super().__init__(path)
        self._counts = counts

    def read(self, size):
        self._counts.append(size)
        return super().read(size)


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

    def bundled(self, name, *, target=1, draft=1):
        """A target whose checkpoint holds its draft, over two files with an index."""
        folder = os.path.join(self.folder, name)
        os.makedirs(folder)
        names = {"layers.0.w": target, "mtp.0.w": draft}
        files = {}
        for number, (tensor, seed) in enumerate(names.items()):
            generator = torch.Generator().manual_seed(seed)
            weights = {tensor: torch.randn(64, 64, generator=generator)}
            files[tensor] = f"model-{number}.safetensors"
            save_file(weights, os.path.join(folder, files[tensor]))
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"weight_map": files}, file)
        return folder

    def test_only_the_draft_of_a_bundling_checkpoint_counts(self):
        def found(name, **seeds):
            folder = self.bundled(name, **seeds)
            return checkpoint_fingerprint(folder, bundled=True)

        one = found("one")
        self.assertIsNotNone(one)
        self.assertEqual(one, found("other-target", target=2))
        self.assertNotEqual(one, found("other-draft", draft=2))
        whole = self.checkpoint("without", seed=1)
        self.assertIsNone(checkpoint_fingerprint(whole, bundled=True))

    def test_engines_with_two_quantisations_of_a_bundling_target_agree(self):
        config = {**V4, "dspark_block_size": 5}
        descriptions = [
            describe_role(
                role, {**ARGS, "model_path": folder}, draft=None, target=config
            )
            for role, folder in (
                ("decode", self.bundled("a")),
                ("prefill", self.bundled("b", target=2)),
            )
        ]
        self.assertIn("draft_weights", descriptions[0])
        self.assertIsNone(refusal(*descriptions))

    def test_files_that_tensors_are_spread_over_do_not_count(self):
        whole = self.bundled("whole")
        merged = os.path.join(self.folder, "merged")
        os.makedirs(merged)
        weights = {}
        for number in range(2):
            weights |= load_file(os.path.join(whole, f"model-{number}.safetensors"))
        save_file(weights, os.path.join(merged, "model.safetensors"))
        self.assertEqual(checkpoint_fingerprint(whole), checkpoint_fingerprint(merged))

    def test_a_draft_in_the_targets_dspark_folder_is_read(self):
        target = self.checkpoint("target", seed=1)
        draft = self.checkpoint("target/dspark", seed=2)
        with open(os.path.join(draft, "config.json"), "w") as file:
            json.dump(DRAFT, file)
        found = describe_role("decode", {**ARGS, "model_path": target}, draft=None)
        self.assertEqual(found["draft"]["target_layers"], [0, 1, 2])
        self.assertEqual(found["draft_weights"], checkpoint_fingerprint(draft))
        named = {**ARGS, "model_path": target, "speculative_draft_model_path": draft}
        self.assertEqual(found, describe_role("decode", named))

    def test_same_shape_other_weights(self):
        one = checkpoint_fingerprint(self.checkpoint("one", seed=1))
        self.assertNotEqual(one, checkpoint_fingerprint(self.checkpoint("two", seed=2)))

    def test_reads_a_bounded_part_of_a_large_checkpoint(self):
        folder = self.checkpoint("large", seed=1, rows=40_000)
        path = os.path.join(folder, "model.safetensors")
        read = []
        with mock.patch("pathlib.Path.open", lambda self, mode: _Counting(self, read)):
            self.assertIsNotNone(checkpoint_fingerprint(folder))
        self.assertGreater(os.path.getsize(path), 8 << 20)
        self.assertLess(sum(read), 1 << 20)

    def test_a_checkpoint_that_cannot_be_read_has_no_fingerprint(self):
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
