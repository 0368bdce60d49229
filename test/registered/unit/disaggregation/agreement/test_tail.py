"""A tail between two engines: what they say of it, and the rules that decide on it.

Contract: what arguments and environment say of a tail is what the engine starts with;
each rule fires for its pair, and none for a pair that works.
"""

from __future__ import annotations

import importlib.util
import unittest
from types import SimpleNamespace
from unittest import mock

from agreement_fixtures import NATIVE, PLAIN, refusal
from agreement_models import (
    ARGS,
    DRAFT,
    PLAIN_ARGS,
    V4,
    describe_role,
)
from rule_cases import CASES as OTHER_CASES
from rule_cases import GOOD as OTHER_GOOD
from rule_cases import AllPairs, RuleTable

from sglang.srt.disaggregation.agreement import engine_facts, tail
from sglang.srt.disaggregation.agreement.rules import decide
from sglang.srt.disaggregation.agreement.tail import (
    DEEPSEEK_V4_WINDOW,
    TAIL_RULES,
    describe_tail,
    window_need,
)
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HANDOFF = "sglang.srt.speculative.dspark_components.dspark_handoff"
TAIL_DSPARK = {
    "mode": "tail",
    "layer_ids": [0, 1, 2],
    "hidden_size": 128,
    "dtype": "float32",
    "tail_tokens": 32,
    "window_need": 31,
}
TAIL_PREFILL = {**PLAIN, "mode": "tail", "dspark": TAIL_DSPARK}
TAIL_DECODE = {**NATIVE, "mode": "tail", "dspark": TAIL_DSPARK}


def with_dspark(description, **changes):
    return {**description, "dspark": {**description["dspark"], **changes}}


def consenting(description):
    return {**description, "allow_partial_context": True}


def without_length(description):
    """A tail of length -1, as an engine's environment alone gives it."""
    kept = {k: v for k, v in description["dspark"].items() if k != "tail_tokens"}
    return {**description, "dspark": kept}


CASES = {
    "PD-MODE": (
        {
            **NATIVE,
            "dspark": {"no_tail": "decode cannot take a tail with --dcp-size 2"},
        },
        TAIL_PREFILL,
    ),
    "PD-TAIL-LAYERS": (TAIL_DECODE, with_dspark(TAIL_PREFILL, layer_ids=[0, 1])),
    "PD-TAIL-HIDDEN": (TAIL_DECODE, with_dspark(TAIL_PREFILL, hidden_size=64)),
    "PD-TAIL-DTYPE": (TAIL_DECODE, with_dspark(TAIL_PREFILL, dtype="bfloat16")),
    "PD-TAIL-TOKENS": (TAIL_DECODE, with_dspark(TAIL_PREFILL, tail_tokens=64)),
    "PD-TAIL-WINDOW": (with_dspark(TAIL_DECODE, window_need=None), TAIL_PREFILL),
    "PD-TAIL-WINDOW-ALLOWED": (
        consenting(with_dspark(TAIL_DECODE, window_need=64)),
        consenting(TAIL_PREFILL),
    ),
    "PD-TAIL-COVER": (
        consenting(with_dspark(TAIL_DECODE, window_need=64, must_cover="radix cache")),
        consenting(TAIL_PREFILL),
    ),
    "PD-TAIL-CP": (TAIL_DECODE, {**TAIL_PREFILL, "cp": 2}),
}
GOOD = {
    "tail": (TAIL_DECODE, TAIL_PREFILL),
    "native prefill, decode that could take a tail": (TAIL_DECODE, NATIVE),
    "tail, decode that wants no length": (without_length(TAIL_DECODE), TAIL_PREFILL),
    "tail that covers the draft": (
        with_dspark(TAIL_DECODE, must_cover="radix cache"),
        TAIL_PREFILL,
    ),
}


class TestRules(RuleTable, CustomTestCase):
    rules, cases, good = TAIL_RULES, CASES, GOOD

    def test_a_checksum_says_no_more_with_a_tail(self):
        more = {**TAIL_PREFILL, "aux": [*PLAIN["aux"], "kv_checksum:64"]}
        verdicts = decide(TAIL_DECODE, more)
        self.assertEqual([v.code for v in verdicts], ["PD-AUX-CHECKSUM"])

    def test_a_tail_is_a_way_out_of_a_cold_draft(self):
        way = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1"
        self.assertIn(way, refusal(NATIVE, PLAIN).fix)

    def test_a_tail_of_a_wrong_type_is_refused(self):
        broken = {**TAIL_PREFILL, "dspark": 1}
        for decode in (NATIVE, with_dspark(TAIL_DECODE, window_need=None)):
            self.assertIsNotNone(refusal(decode, broken))


class TestAllPairs(AllPairs, CustomTestCase):
    cases, good = OTHER_CASES | CASES, OTHER_GOOD | GOOD


class TestShortTail(CustomTestCase):
    """Consent counts where the engines look for it, and for a length they can use."""

    def setUp(self):
        self.decode = with_dspark(TAIL_DECODE, window_need=None)

    def test_consent_of_decode_alone_does_not_start_prefill(self):
        verdict = refusal(consenting(self.decode), TAIL_PREFILL)
        self.assertEqual(verdict.code, "PD-TAIL-WINDOW")
        self.assertIn("not -1", verdict.fix)
        self.assertIn("on both engines", verdict.fix)

    def test_a_prefill_that_knows_no_draft_needs_no_consent(self):
        dspark = dict(TAIL_DSPARK)
        del dspark["window_need"]
        prefill = {**TAIL_PREFILL, "dspark": dspark}
        self.assertIsNone(refusal(consenting(self.decode), prefill))

    def test_consent_does_not_help_without_a_number_of_tokens(self):
        pair = [without_length(consenting(d)) for d in (self.decode, TAIL_PREFILL)]
        verdict = refusal(*pair)
        self.assertEqual(verdict.code, "PD-TAIL-WINDOW")
        self.assertIn("prefill has dspark.tail_tokens=not set", verdict.message)

    def test_a_window_resolves_the_length(self):
        self.assertIsNone(
            refusal(without_length(TAIL_DECODE), without_length(TAIL_PREFILL))
        )


class TestDescription(CustomTestCase):
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

    def test_the_default_window_of_deepseek_v4_is_sglangs(self):
        from sglang.srt.configs.deepseek_v4 import DeepSeekV4Config

        self.assertEqual(DeepSeekV4Config.window_size, DEEPSEEK_V4_WINDOW)

    def test_rings_of_a_prefill_without_draft(self):
        """Wide when it captures, and it must know how wide; see the engine's variables."""
        capture = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
        peer = {"SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS": "5"}
        bundled = {**V4, "dspark_block_size": 4}
        for config, environ, sizes in (
            (V4, capture | peer, {"4": 16}),
            (bundled, capture, {"4": 16}),
            (V4, capture, {"4": 8}),
            (V4, peer, {"4": 8}),
            (bundled, {}, {"4": 8}),
            (V4, {}, {"4": 8}),
        ):
            with self.subTest(environ=environ):
                described = describe_role(
                    "prefill", PLAIN_ARGS, target=config, environ=environ
                )
                self.assertEqual(described["rings"], sizes)


class TestEngineFacts(CustomTestCase):
    """The running engine replaces what arguments only suggest."""

    def handed_over(self, *answers):
        said = [lambda *args, a=answer: a for answer in answers]
        with mock.patch.object(tail, "describers", said):
            return tail.handed_over("decode", None, None)

    def test_what_hands_context_over_says_how(self):
        told = {"mode": "tail", "tail_tokens": 8}
        self.assertEqual(self.handed_over(None, told), {"mode": "tail", "dspark": told})
        self.assertEqual(self.handed_over(None), {})
        self.assertEqual(self.handed_over(), {})

    def test_described_rings_equal_what_the_engine_allocates(self):
        """Capture on and off, told by the environment, by the checkpoint, by neither."""
        # export: only <0.5.23
        if importlib.util.find_spec(HANDOFF) is None:
            self.skipTest("the handoff serves 0.5.23 and later")
        handoff = importlib.import_module(HANDOFF)
        for capturing in (True, False):
            for told in (0, 6):
                for block in (0, 3):
                    with self.subTest(capturing=capturing, told=told, block=block):
                        self.compare(handoff, capturing, told, block)

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


if __name__ == "__main__":
    unittest.main()
