"""The settings with which an engine refuses to start a tail handoff, rule by rule.

Each rule must apply to the settings it is about, name the value found and a fix, and
apply to nothing else; a missing fact refuses nothing.
"""

from __future__ import annotations

import ast
import pathlib
import sys
import unittest

from sglang.srt.speculative.dspark_components import handoff_refusals as rules
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 8,
}
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 8,
    "compress_ratios": [0, 4],
    "sliding_window": 128,
    "dspark_target_layer_ids": [1, 3, 7],
    "dspark_block_size": 7,
}
SLIDING = {
    "dflash_config": {"target_layer_ids": [0, 2, 4]},
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 32,
}
FULL = {"dflash_config": {"target_layer_ids": [0, 2, 4]}}
RADIX = "disaggregation_decode_enable_radix_cache"
BACKEND = "disaggregation_transfer_backend"


def prefill_facts(args=(), environ=(), target=TARGET, draft=SLIDING):
    """A capturing prefill that nothing speaks against, with changes."""
    return rules.facts_from(
        {BACKEND: "nixl", "speculative_draft_model_path": "draft", **dict(args)},
        {rules.CAPTURE: "1", rules.TAIL_TOKENS: "-1", **dict(environ)},
        target,
        draft,
        "prefill",
    )


def decode_facts(args=(), environ=(), target=TARGET, draft=SLIDING):
    """A DSPARK decode that expects a tail, with changes."""
    return rules.facts_from(
        {BACKEND: "nixl", "speculative_algorithm": "DSPARK", **dict(args)},
        {rules.TAIL_TOKENS: "-1", **dict(environ)},
        target,
        draft,
        "decode",
    )


def codes(facts):
    return [rule.code for rule, _, _ in rules.refusals(facts)]


# A prefill with a draft on two stages; its target is one that passes nothing on.
NATIVE_PP = {"pp_size": 2, "speculative_algorithm": "DSPARK"}
NATIVE = {rules.CAPTURE: "0"}
OTHER = {**TARGET, "architectures": ["OtherForCausalLM"]}
# Layer 3's output is layer 4's input, and the last stage starts there.
LATE = {"dflash_config": {"target_layer_ids": [3, 6]}}

# (code, engine, arguments, variables, configs)
REFUSED = [
    ("TAIL-SWITCH", "prefill", {}, {rules.CAPTURE: "on"}, {}),
    ("TAIL-SWITCH", "decode", {}, {rules.ALLOW_PARTIAL_CONTEXT: ""}, {}),
    ("TAIL-SWITCH", "decode", {}, {rules.ALLOW_COLD_DRAFT: "2"}, {}),
    ("TAIL-SWITCH", "prefill", {}, {rules.CONTEXT_ONLY_DRAFT: "half"}, {}),
    ("TAIL-CAPTURE-ROLE", "decode", {}, {rules.CAPTURE: "1"}, {}),
    ("TAIL-CAPTURE-DRAFT", "prefill", {"speculative_algorithm": "EAGLE"}, {}, {}),
    ("TAIL-IDLE", "prefill", {}, {rules.CAPTURE: "0"}, {}),
    (
        "TAIL-IDLE",
        "decode",
        {"speculative_algorithm": "EAGLE"},
        {rules.LAYER_IDS: "0"},
        {},
    ),
    *(
        ("TAIL-TOKENS", engine, {}, {rules.TAIL_TOKENS: bad}, {})
        for engine in ("prefill", "decode")
        for bad in ("0", "-2", "4097", "many", "")
    ),
    *(
        ("TAIL-LAYER-IDS", "prefill", {}, {rules.LAYER_IDS: bad}, {})
        for bad in ("1,x", "2,2", "4,2", "-1,2", "0,8", "0,7")
    ),
    ("TAIL-LAYER-IDS", "decode", {}, {rules.LAYER_IDS: "1,x"}, {}),
    ("TAIL-DECODE-LAYER-IDS", "decode", {}, {rules.LAYER_IDS: "0,1"}, {}),
    (
        "TAIL-NO-LAYER-IDS",
        "prefill",
        {"speculative_draft_model_path": None},
        {rules.TAIL_TOKENS: "8"},
        {"draft": None},
    ),
    ("TAIL-PEER-TOKENS", "prefill", {}, {rules.PEER_DRAFT_TOKENS: "1"}, {}),
    ("TAIL-PEER-TOKENS", "prefill", {}, {rules.PEER_DRAFT_TOKENS: "abc"}, {}),
    (
        "TAIL-PEER-TOKENS",
        "prefill",
        {},
        {},
        {"target": {**V4, "dspark_block_size": None}},
    ),
    (
        "TAIL-WINDOW-UNKNOWN",
        "prefill",
        {"speculative_draft_model_path": None},
        {rules.LAYER_IDS: "0,2"},
        {"draft": None},
    ),
    (
        "TAIL-WINDOW-LIMIT",
        "decode",
        {},
        {},
        {"draft": {**SLIDING, "sliding_window": 9999}},
    ),
    ("TAIL-WHOLE-PROMPT", "prefill", {}, {}, {"draft": FULL}),
    ("TAIL-WHOLE-PROMPT", "decode", {}, {rules.TAIL_TOKENS: "8"}, {"draft": FULL}),
    (
        "TAIL-WHOLE-PROMPT",
        "decode",
        {},
        {rules.ALLOW_PARTIAL_CONTEXT: "1"},
        {"draft": FULL},
    ),
    ("TAIL-COVERAGE", "prefill", {}, {rules.TAIL_TOKENS: "30"}, {}),
    ("TAIL-COVERAGE", "decode", {}, {rules.TAIL_TOKENS: "8"}, {}),
    ("DECODE-RADIX-COLD", "decode", {RADIX: True}, {rules.ALLOW_COLD_DRAFT: "1"}, {}),
    ("TAIL-BACKEND", "prefill", {BACKEND: "mori"}, {}, {}),
    ("TAIL-BACKEND", "decode", {BACKEND: "ascend"}, {}, {}),
    *(
        (
            "TAIL-AUX-TCP",
            engine,
            {},
            {rules.MOONCAKE_POOL: "INTRA_NODE_NVLINK"},
            {},
        )
        for engine in ("prefill", "decode")
    ),
    *(
        ("TAIL-AUX-TCP", engine, {BACKEND: backend}, environ, {})
        for engine in ("prefill", "decode")
        for backend in ("mooncake", None)
        for environ in (
            {rules.MOONCAKE_AUX_TCP: "true"},
            {rules.MOONCAKE_POOL: "NVLINK"},
            {rules.MOONCAKE_POOL: "True"},
        )
    ),
    ("TAIL-ROLE-SWITCH", "prefill", {"enable_pd_role_switch": True}, {}, {}),
    ("TAIL-ROLE-SWITCH", "decode", {"enable_pd_role_switch": True}, {}, {}),
    *(
        (code, "prefill", {name: value}, {}, {})
        for code, name, value in (
            ("TAIL-AUX-STATES", "enable_return_aux_hidden_states", True),
            ("TAIL-HIDDEN-STATES", "enable_return_hidden_states", True),
            ("TAIL-HIDDEN-STATES", "return_hidden_states_mode", "last"),
            ("TAIL-CP", "attn_cp_size", 2),
            ("TAIL-LAYERNORM-SP", "enable_layernorm_sp", True),
            ("TAIL-KV-SHARDING", "enable_kv_cache_sharding", True),
            ("TAIL-TBO", "enable_two_batch_overlap", True),
            ("TAIL-SESSION", "enable_streaming_session", True),
            ("TAIL-PDMUX", "enable_pdmux", True),
            ("TAIL-SWA-REPLAY", "enable_decoder_swa_bounded_replay", True),
            ("TAIL-SWA-REPLAY", "enable_encoder_swa_bounded_replay", True),
        )
    ),
    (
        "TAIL-DSV41",
        "prefill",
        {},
        {},
        {"target": {**V4, "model_type": "deepseek_v41"}},
    ),
    *(
        ("TAIL-GRAPHS", "prefill", {"pp_size": 2, **graphs}, {}, {})
        for graphs in (
            {"cuda_graph_backend_prefill": "full"},
            {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
            {"cuda_graph_config": '{"prefill": {"backend": "full"}}'},
        )
    ),
    (
        "TAIL-GRAPHS",
        "prefill",
        {
            "pp_size": 2,
            "speculative_algorithm": "DSPARK",
            "cuda_graph_backend_prefill": "full",
        },
        {rules.CAPTURE: "0"},
        {},
    ),
    *(
        (
            "TAIL-STAGES",
            "prefill",
            {"pp_size": 2, "speculative_algorithm": algorithm},
            {rules.CAPTURE: capture},
            {"target": OTHER},
        )
        for algorithm, capture in ((None, "1"), ("DSPARK", "0"))
    ),
    *(
        (
            "PP-PARTITION",
            "prefill",
            NATIVE_PP,
            {**NATIVE, rules.PP_PARTITION: named},
            {},
        )
        for named in ("4,3", "2,2,4", "8,0", "half")
    ),
    ("TAIL-RUST-SERVER", "prefill", {}, {rules.RUST_SERVER: "1"}, {}),
    ("TAIL-DCP", "decode", {"dcp_size": 2}, {}, {}),
    ("TAIL-HISPARSE", "decode", {"enable_hisparse": True}, {}, {}),
    ("TAIL-UNIFIED-MEMORY", "decode", {"enable_unified_memory": True}, {}, {}),
    ("TAIL-HICACHE", "decode", {"enable_hierarchical_cache": True}, {}, {}),
    (
        "TAIL-HOST-RECEIVE",
        "decode",
        {"disaggregation_decode_host_receive_threshold": 0.5},
        {},
        {},
    ),
]
ACCEPTED = [
    ("prefill", {}, {}, {}),
    ("decode", {}, {}, {}),
    ("prefill", {}, {rules.CAPTURE: " YES "}, {}),
    ("prefill", {}, {}, {"target": V4, "draft": None}),
    ("prefill", {}, {rules.LAYER_IDS: "1,7"}, {"target": V4, "draft": None}),
    ("prefill", {}, {rules.TAIL_TOKENS: " 31 "}, {}),
    ("decode", {}, {rules.TAIL_TOKENS: "4096"}, {}),
    ("decode", {}, {rules.TAIL_TOKENS: "8", rules.ALLOW_PARTIAL_CONTEXT: "1"}, {}),
    ("decode", {}, {rules.LAYER_IDS: "0,2,4"}, {}),
    ("decode", {RADIX: True}, {}, {}),
    ("decode", {"disaggregation_decode_host_receive_threshold": 1.0}, {}, {}),
    ("decode", {}, {rules.MOONCAKE_AUX_TCP: "1", rules.MOONCAKE_POOL: "NVLINK"}, {}),
    ("decode", {BACKEND: "mooncake"}, {rules.MOONCAKE_POOL: "BAREX"}, {}),
    ("decode", {"enable_pdmux": True, "enable_return_hidden_states": True}, {}, {}),
    ("prefill", {"enable_unified_memory": True, "dcp_size": 2}, {}, {}),
    ("prefill", {"cuda_graph_backend_prefill": "full"}, {}, {}),
    ("prefill", {"pp_size": 2, "cuda_graph_backend_prefill": "disabled"}, {}, {}),
    (
        "prefill",
        {
            "pp_size": 2,
            "speculative_algorithm": "DSPARK",
            "cuda_graph_backend_prefill": "full",
        },
        {rules.CAPTURE: "0"},
        {"target": {**TARGET, "architectures": ["KimiLinearForCausalLM"]}},
    ),
    # Nothing crosses stages where the last one captures every layer, as SGLang serves.
    ("prefill", NATIVE_PP, NATIVE, {"target": OTHER, "draft": LATE}),
    (
        "prefill",
        {**NATIVE_PP, "cuda_graph_backend_prefill": "full"},
        {**NATIVE, rules.PP_PARTITION: "1,7"},
        {"target": OTHER},
    ),
]
FACTS = {"prefill": prefill_facts, "decode": decode_facts}


def facts_of(engine, args, environ, configs):
    environ = dict(environ)
    if environ.get(rules.CAPTURE) == "0" and "speculative_algorithm" in args:
        environ[rules.CAPTURE] = "0"
        facts = FACTS[engine](args, environ, **configs)
        facts.pop(rules.TAIL_TOKENS)
        return facts
    return FACTS[engine](args, environ, **configs)


class TestRules(CustomTestCase):
    def test_each_rule_refuses_what_it_is_about(self):
        for code, engine, args, environ, configs in REFUSED:
            with self.subTest(code, engine=engine, args=args, environ=environ):
                self.assertIn(code, codes(facts_of(engine, args, environ, configs)))

    def test_nothing_else_is_refused(self):
        for engine, args, environ, configs in ACCEPTED:
            with self.subTest(engine, args=args, environ=environ):
                self.assertEqual(codes(facts_of(engine, args, environ, configs)), [])

    def test_every_rule_is_tested(self):
        tested = {code for code, *_ in REFUSED} | {"TAIL-SLOT-SIZE"}
        self.assertEqual(tested, {rule.code for rule in rules.REFUSALS})

    def test_every_rule_reads_declared_names_only(self):
        """A tool that fills facts must know which arguments and variables to read."""
        tree = ast.parse(pathlib.Path(rules.__file__).read_text())
        declared = {*rules.ARGUMENTS, *rules.VARIABLES}
        read = {
            node.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and ast.unparse(node.func.value) in ("f", "facts")
            and isinstance(node.args[0], ast.Constant)
        }
        known = set(rules.model_facts(TARGET, SLIDING)) | {
            "role",
            "hidden_size",
            "dtype_bytes",
            "prefill_graph_backend",
        }
        self.assertEqual(read - declared - known, set())

    def test_slot_has_a_limit(self):
        facts = decode_facts(environ={rules.TAIL_TOKENS: "4096"})
        facts.update(hidden_size=8192, dtype_bytes=2)
        self.assertEqual(codes(facts), ["TAIL-SLOT-SIZE"])
        facts["hidden_size"] = 2048
        self.assertEqual(codes(facts), [])

    def test_all_reasons_are_reported_together(self):
        facts = prefill_facts({"enable_pdmux": True, "attn_cp_size": 2})
        self.assertEqual(codes(facts), ["TAIL-CP", "TAIL-PDMUX"])

    def test_messages_name_what_was_found_and_a_way_out(self):
        for code, engine, args, environ, configs in REFUSED:
            facts = facts_of(engine, args, environ, configs)
            found = {r.code: (says, fix) for r, says, fix in rules.refusals(facts)}
            says, fix = found[code]
            with self.subTest(code, says=says):
                self.assertNotRegex(says + fix, r"[{}]|\bNone\b")
                shown = [
                    *(f"--{n.replace('_', '-')}" for n in args),
                    *(n for n in environ if n != rules.CAPTURE),
                ]
                named = says + fix
                self.assertTrue(not shown or any(n in named for n in shown), named)

    def test_other_engines_are_left_alone(self):
        """Without a variable of the handoff, and with other algorithms or roles."""
        flags = {name: True for name in rules.ARGUMENTS if name.startswith("enable_")}
        for role in ("null", "prefill", "decode"):
            for algorithm in (None, "EAGLE", "DSPARK"):
                args = {**flags, "speculative_algorithm": algorithm, "pp_size": 1}
                facts = rules.facts_from(args, {}, TARGET, FULL, role)
                with self.subTest(role, algorithm=algorithm):
                    self.assertEqual(codes(facts), [])

    def test_a_missing_fact_refuses_nothing(self):
        """Neither an unknown environment nor unreadable configs."""
        flags = {"enable_pdmux": True, "dcp_size": 2}
        for role in ("prefill", "decode"):
            args = {**flags, "speculative_algorithm": "DSPARK"}
            self.assertEqual(codes(rules.facts_from(args, None, role=role)), [])
        environ = {rules.TAIL_TOKENS: "8"}
        self.assertEqual(
            codes(decode_facts(environ=environ, target=None, draft=None)), []
        )
        self.assertEqual(codes(prefill_facts(target=None, draft=None)), [])
        self.assertEqual(codes({}), [])


class TestFacts(CustomTestCase):
    def test_bundled_draft(self):
        facts = prefill_facts(target=V4, draft=None)
        self.assertEqual(facts["draft_layer_ids"], (1, 3, 7))
        self.assertEqual(facts["window_need"], 128)
        self.assertEqual(rules.tail_tokens(facts), 128)
        self.assertEqual(rules.peer_draft_tokens(facts), 8)

    def test_window_of_a_dense_draft(self):
        mixed = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
        for draft, need in ((SLIDING, 31), (FULL, None), (mixed, None)):
            self.assertEqual(rules.model_facts(None, draft)["window_need"], need)

    def test_layers_of_a_looped_target(self):
        facts = rules.model_facts({**TARGET, "num_loops": 2}, None)
        self.assertEqual(facts["num_layers"], 16)

    def test_where_the_last_stage_starts(self):
        for layers, stages, named, start in (
            (36, 2, None, 18),
            (36, 2, "21,15", 21),
            (7, 3, None, 4),
            (8, 4, None, 6),
        ):
            facts = {"num_layers": layers, "pp_size": stages}
            if named:
                facts[rules.PP_PARTITION] = named
            self.assertEqual(rules.last_stage_start(facts), start)
        self.assertIsNone(rules.last_stage_start({"pp_size": 2}))

    def test_deepseek_v4_captures_a_layer_where_it_is(self):
        for ids, crosses in (((3, 7), True), ((4, 7), False)):
            target = {**V4, "dspark_target_layer_ids": ids}
            facts = prefill_facts({"pp_size": 2}, target=target, draft=None)
            self.assertEqual(rules.crosses_stages(facts), crosses)

    def test_the_variable_names_layers_before_the_draft(self):
        facts = prefill_facts(environ={rules.LAYER_IDS: "0, 5"})
        self.assertEqual(rules.layer_ids(facts), (0, 5))

    def test_a_decode_that_wants_no_tail_says_why_it_can_take_none(self):
        """It serves native prefills all the same, so it is not refused."""
        for args, reason in (
            ({}, None),
            ({"dcp_size": 2}, "decode cannot take a tail with --dcp-size 2: "),
            ({BACKEND: "mori"}, "decode has --disaggregation-transfer-backend mori"),
            ({"enable_hisparse": True}, "--enable-hisparse"),
        ):
            facts = decode_facts(args)
            del facts[rules.TAIL_TOKENS]
            with self.subTest(args):
                self.assertEqual(codes(facts), [])
                self.assertRegex(rules.no_tail(facts) or "", reason or "^$")

    def test_length_by_default(self):
        """What the draft reads, where that is known; else a few tokens."""
        for draft, tokens in ((SLIDING, 31), (FULL, 8), (None, 8)):
            facts = prefill_facts(draft=draft)
            del facts[rules.TAIL_TOKENS]
            self.assertEqual(rules.tail_tokens(facts), tokens)

    def test_naming_the_layers_asks_for_capture(self):
        for environ, captures in (
            ({rules.LAYER_IDS: "0,2"}, True),
            ({rules.LAYER_IDS: "0,2", rules.CAPTURE: "0"}, False),
            ({rules.CAPTURE: "1"}, True),
            ({}, False),
        ):
            for role, algorithm in (
                ("prefill", None),
                ("prefill", "DSPARK"),
                ("decode", None),
            ):
                args = {"speculative_algorithm": algorithm}
                facts = rules.facts_from(args, environ, TARGET, SLIDING, role)
                expected = captures and (role, algorithm) == ("prefill", None)
                self.assertEqual(rules.captures(facts), expected)

    def test_needs_the_standard_library_only(self):
        """A tool loads this file without SGLang."""
        tree = ast.parse(pathlib.Path(rules.__file__).read_text())
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in (
                [node.module or "."]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
        }
        self.assertLessEqual(imported, set(sys.stdlib_module_names))


if __name__ == "__main__":
    unittest.main()
