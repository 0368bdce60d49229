"""The rules: each fires for its pair, and none for a pair that works.

Contract: two engines that are described alike agree; every message names both values; the
decision is pure, does not depend on key order, and a missing value never refuses.
"""

from __future__ import annotations

import copy
import itertools
import unittest

from agreement_fixtures import NATIVE, PLAIN, refusal

from sglang.srt.disaggregation.agreement.rules import (
    NOTE,
    REFUSE,
    RULES,
    SEVERITIES,
    UNPATCHED,
    WARN,
    decide,
    look_up,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

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
    """A tail of length -1, as the doctor knows it from an engine's environment."""
    kept = {k: v for k, v in description["dspark"].items() if k != "tail_tokens"}
    return {**description, "dspark": kept}


COLD_OK = {**NATIVE, "allow_cold_draft": True}
V4 = {"attention": "compressed_mla"}
MOONCAKE = {"backend": "mooncake", "kv_layer_ids": False}

# code -> (decode, prefill) for which exactly this rule speaks
CASES = {
    "PD-VERSION": (NATIVE, {**NATIVE, "version": 1}),
    "PD-RANKS": (NATIVE, {**NATIVE, "conflict": "page_size: 1 and 64"}),
    "PD-UNPATCHED-PREFILL": (NATIVE, UNPATCHED),
    "PD-UNPATCHED-PREFILL-ALLOWED": (COLD_OK, UNPATCHED),
    "PD-UNPATCHED-PREFILL-PLAIN": (PLAIN, UNPATCHED),
    "PD-BACKEND": (NATIVE, {**NATIVE, "backend": "mooncake"}),
    "PD-TARGET": (NATIVE, {**NATIVE, "target": {"architecture": "T", "layers": 5}}),
    "PD-ALLOCATION": (
        {**NATIVE, "allocation_policy": "early"},
        {**NATIVE, "allocation_policy": "prefill_complete"},
    ),
    "PD-PAGE-SIZE": (NATIVE, {**NATIVE, "page_size": 64}),
    "PD-KV-DTYPE": (NATIVE, {**NATIVE, "kv_dtype": "fp8_e4m3"}),
    "PD-KV-STORAGE": (
        {**NATIVE, "kv_storage": "float32"},
        {**NATIVE, "kv_storage": "bfloat16"},
    ),
    "PD-AUX": (NATIVE, {**NATIVE, "aux": ["output_ids", "mask", "bootstrap_room"]}),
    "PD-AUX-CHECKSUM": (
        NATIVE,
        {**NATIVE, "aux": [*NATIVE["aux"], "kv_checksum:64"]},
    ),
    "PD-TP": ({**NATIVE, "tp": 2}, {**NATIVE, "tp": 3}),
    "PD-PP": ({**NATIVE, "pp": 2}, {**NATIVE, "pp": 4}),
    "PD-CP": ({**NATIVE, "cp": 2}, NATIVE),
    "PD-PP-LAYER-IDS": (
        {**NATIVE, "kv_layer_ids": False},
        {**NATIVE, "pp": 2, "kv_layer_ids": False},
    ),
    "PD-RING": (
        {**TAIL_DECODE, **V4, "rings": {"4": 16}},
        {**TAIL_PREFILL, **V4, "rings": {"4": 8}},
    ),
    "PD-COLD-LAYERS": (
        {**COLD_OK, **MOONCAKE, "draft": {"layers": 4}},
        {**PLAIN, **MOONCAKE},
    ),
    "PD-COLD-DRAFT": (NATIVE, PLAIN),
    "PD-COLD-DRAFT-ALLOWED": (COLD_OK, PLAIN),
    "PD-DRAFT-ONLY-ON-PREFILL": (PLAIN, NATIVE),
    "PD-ALGORITHM": (NATIVE, {**PLAIN, "algorithm": "EAGLE"}),
    "PD-MODE": (
        {
            **NATIVE,
            "dspark": {"no_tail": "decode cannot take a tail with --dcp-size 2"},
        },
        TAIL_PREFILL,
    ),
    "PD-DRAFT-GEOMETRY": (
        NATIVE,
        {**NATIVE, "draft": {"architecture": "D", "layers": 3}},
    ),
    "PD-DRAFT-WEIGHTS": (NATIVE, {**NATIVE, "draft_weights": "bbbb"}),
    "PD-DRAFT-WEIGHTS-UNKNOWN": (NATIVE, {**NATIVE, "draft_weights": None}),
    "PD-DRAFT-KV-DTYPE": (NATIVE, {**NATIVE, "draft_kv_dtype": "fp8_e4m3"}),
    "PD-DRAFT-HEADS": (
        {**NATIVE, "tp": 2, "draft_heads": [1, 64], "target_heads": [2, 32]},
        NATIVE,
    ),
    "PD-BLOCK-SIZE": (NATIVE, {**NATIVE, "block_size": 3}),
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
    "EAGLE on decode alone, upstream's business": (
        {**PLAIN, "algorithm": "EAGLE", "aux": ["output_ids:64", "hidden:512"]},
        {**PLAIN, "aux": ["output_ids:64", "hidden:64"]},
    ),
    "native": (NATIVE, NATIVE),
    "plain": (PLAIN, PLAIN),
    "tail": (TAIL_DECODE, TAIL_PREFILL),
    "native prefill, decode that could take a tail": (TAIL_DECODE, NATIVE),
    "tail, decode that wants no length": (without_length(TAIL_DECODE), TAIL_PREFILL),
    "tail that covers the draft": (
        with_dspark(TAIL_DECODE, must_cover="radix cache"),
        TAIL_PREFILL,
    ),
    "stages with layer ids": (NATIVE, {**NATIVE, "pp": 2}),
    "tensor parallel 1 to 2": ({**NATIVE, "tp": 2}, NATIVE),
}


class TestRules(CustomTestCase):
    def test_every_rule_has_a_case_and_every_case_a_rule(self):
        self.assertEqual({rule.code for rule in RULES}, set(CASES))

    def test_codes_are_unique_and_severities_known(self):
        codes = [rule.code for rule in RULES]
        self.assertEqual(len(codes), len(set(codes)))
        self.assertLessEqual({rule.severity for rule in RULES}, set(SEVERITIES))

    def test_each_case_is_decided_by_its_rule(self):
        for code, (decode, prefill) in CASES.items():
            with self.subTest(code):
                verdicts = decide(decode, prefill)
                self.assertEqual([verdict.code for verdict in verdicts], [code])

    def test_good_pairs_have_no_verdict(self):
        for name, (decode, prefill) in GOOD.items():
            with self.subTest(name):
                self.assertEqual(decide(decode, prefill), [])

    def test_a_message_shows_both_values(self):
        for code, (decode, prefill) in CASES.items():
            rule = next(rule for rule in RULES if rule.code == code)
            text = decide(decode, prefill)[0].text
            with self.subTest(code):
                for side, description in (("prefill", prefill), ("decode", decode)):
                    value = look_up(description, rule.about)
                    if isinstance(value, dict):
                        [(key, part)] = (
                            value.items()
                            if len(value) == 1
                            else [("layers", value["layers"])]
                        )
                        value = f"({key}={part})"
                    shown = rule.absent if value is None else str(value)
                    self.assertIn(f"{side} has {rule.about}={shown}", text)
                self.assertIn("Consequence: ", text)
                self.assertIn("Fix: ", text)

    def test_refusals_come_first_whatever_else_is_said(self):
        verdicts = decide(
            {**NATIVE, "block_size": 3}, {**NATIVE, "draft_weights": "b", "tp": 1}
        )
        self.assertEqual([v.severity for v in verdicts], [REFUSE, NOTE])

    def test_notes_and_warnings_do_not_refuse(self):
        for rule in RULES:
            if rule.severity in (WARN, NOTE):
                with self.subTest(rule.code):
                    self.assertIsNone(refusal(*CASES[rule.code]))


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


class TestAuxLayout(CustomTestCase):
    def test_width_counts_with_dspark(self):
        wide = {**NATIVE, "aux": ["output_ids", "bootstrap_room:64"]}
        self.assertEqual(refusal(wide, NATIVE).code, "PD-AUX")

    def test_names_count_always(self):
        more = {**PLAIN, "aux": [*PLAIN["aux"], "sampling_mask:64"]}
        self.assertEqual(refusal(more, PLAIN).code, "PD-AUX")

    def test_a_checksum_on_either_engine_is_a_warning_while_it_is_last(self):
        more = {**PLAIN, "aux": [*PLAIN["aux"], "kv_checksum:64"]}
        for pair in ((more, PLAIN), (PLAIN, more)):
            self.assertEqual([v.code for v in decide(*pair)], ["PD-AUX-CHECKSUM"])
        first = {**PLAIN, "aux": ["kv_checksum:64", *PLAIN["aux"]]}
        self.assertEqual(refusal(first, PLAIN).code, "PD-AUX")

    def test_a_checksum_says_no_more_with_a_tail(self):
        more = {**TAIL_PREFILL, "aux": [*PLAIN["aux"], "kv_checksum:64"]}
        verdicts = decide(TAIL_DECODE, more)
        self.assertEqual([v.code for v in verdicts], ["PD-AUX-CHECKSUM"])


class TestStages(CustomTestCase):
    """A pipelined prefill and a whole decode: how a stage finds its layers."""

    NO_IDS = {"kv_layer_ids": False}

    def codes(self, decode, prefill, **pairing):
        prefill = {**prefill, "pp": 2, **pairing}
        return [verdict.code for verdict in decide(decode, prefill)]

    def test_positions_serve_without_ids(self):
        plain = {**PLAIN, **V4, **self.NO_IDS}
        self.assertEqual(self.codes(plain, plain, stage_pairing="position"), [])

    def test_a_guess_serves_until_there_is_a_draft(self):
        plain = {**PLAIN, **MOONCAKE}
        self.assertEqual(self.codes(plain, plain, stage_pairing="guess"), [])
        eagle = {**plain, "algorithm": "EAGLE"}
        self.assertIn(
            "PD-PP-LAYER-IDS", self.codes(eagle, plain, stage_pairing="guess")
        )
        ngram = {**plain, "algorithm": "NGRAM"}
        self.assertEqual(self.codes(ngram, plain, stage_pairing="guess"), [])

    def test_ids_on_one_engine_only_are_refused(self):
        without = {**PLAIN, **self.NO_IDS}
        for pair in ((without, PLAIN), (PLAIN, without)):
            self.assertEqual(
                self.codes(*pair, stage_pairing="guess"), ["PD-PP-LAYER-IDS"]
            )

    def test_an_unknown_stage_pairing_is_not_refused(self):
        plain = {**PLAIN, **self.NO_IDS}
        self.assertEqual(self.codes(plain, plain, stage_pairing=None), [])

    def test_equal_stages_pair_with_themselves(self):
        plain = {**PLAIN, **self.NO_IDS, "pp": 2}
        self.assertEqual(self.codes(plain, plain), [])


class TestUnequalTensorParallel(CustomTestCase):
    def code(self, attention, draft_attention, heads):
        changes = {
            "attention": attention,
            "draft_attention": draft_attention,
            "draft_heads": heads,
            "target_heads": [8, 64],
        }
        decode = {**NATIVE, **changes, "tp": 2}
        found = refusal(decode, {**NATIVE, **changes})
        return found and found.code

    def test_a_dense_draft_of_an_mla_target_is_refused(self):
        for attention in ("mla", "compressed_mla"):
            self.assertEqual(self.code(attention, "mha", [8, 64]), "PD-DRAFT-HEADS")
            self.assertIsNone(self.code(attention, "mha", [1, 64]))
            self.assertIsNone(self.code(attention, attention, [8, 64]))

    def test_a_draft_of_the_targets_heads_is_served(self):
        self.assertIsNone(self.code("mha", "mha", [8, 64]))
        self.assertEqual(self.code("mha", "mha", [4, 64]), "PD-DRAFT-HEADS")


EAGLE = {**PLAIN, "algorithm": "EAGLE", "mode": "none"}
QUANTISED = {"kv_dtype": "auto", "kv_storage": "float8_e4m3fn"}
# What stock SGLang serves must not be refused: name -> (decode, prefill).
NOT_REFUSED = {
    "stock plain prefill": (PLAIN, {**UNPATCHED, "page_size": 1, "tp": 1}),
    "EAGLE on decode alone": (EAGLE, PLAIN),
    "EAGLE on both": (EAGLE, EAGLE),
    "plain PP 2 on Mooncake": (
        {**PLAIN, **MOONCAKE},
        {**PLAIN, **MOONCAKE, "pp": 2, "stage_pairing": "guess"},
    ),
    "DeepSeek-V4 PP 2": (
        {**PLAIN, **V4, "kv_layer_ids": False},
        {**PLAIN, **V4, "kv_layer_ids": False, "pp": 2, "stage_pairing": "position"},
    ),
    "checksum on prefill alone": (
        PLAIN,
        {**PLAIN, "aux": [*PLAIN["aux"], "kv_checksum:64"]},
    ),
    "checksum on decode alone": (
        {**NATIVE, "aux": [*NATIVE["aux"], "kv_checksum:64"]},
        NATIVE,
    ),
    "an older release without the newer facts": (
        NATIVE,
        {k: v for k, v in NATIVE.items() if k != "stage_pairing"},
    ),
    "tensor parallel 4 to 2": ({**PLAIN, "tp": 2}, {**PLAIN, "tp": 4}),
    "quantised target": ({**PLAIN, **QUANTISED}, {**PLAIN, **QUANTISED}),
    "draft dtype known of one engine": (
        {k: v for k, v in NATIVE.items() if k != "draft_kv_dtype"},
        {**NATIVE, "draft_kv_dtype": "bfloat16"},
    ),
    "a config object's defaults": (
        {**PLAIN, "target": {**PLAIN["target"], "head_dim": 128}},
        PLAIN,
    ),
}


class TestFalseRefusals(CustomTestCase):
    def test_what_works_is_not_refused(self):
        for name, (decode, prefill) in NOT_REFUSED.items():
            with self.subTest(name):
                self.assertIsNone(refusal(decode, prefill))


class TestAllPairs(CustomTestCase):
    """The product of everything an engine can be, judged without exceptions."""

    def setUp(self):
        engines = [*itertools.chain.from_iterable(CASES.values())]
        engines += [*itertools.chain.from_iterable(GOOD.values()), {}, UNPATCHED]
        self.pairs = list(itertools.product(engines, engines))

    def test_all_pairs_are_decided_and_descriptions_untouched(self):
        before = copy.deepcopy(self.pairs)
        for decode, prefill in self.pairs:
            decide(decode, prefill)
        self.assertGreater(len(self.pairs), 4000)
        self.assertEqual(self.pairs, before)

    def test_decode_without_context_is_never_accepted_in_silence(self):
        """DSPARK on decode: context is native, a tail, or there is a verdict."""
        for decode, prefill in self.pairs:
            if not decode.get("version") or decode.get("algorithm") != "DSPARK":
                continue
            if prefill.get("mode") in ("native", "tail"):
                continue
            self.assertTrue(decide(decode, prefill), (decode, prefill))

    def test_key_order_does_not_matter(self):
        for decode, prefill in self.pairs[::7]:
            turned = dict(reversed(list(decode.items())))
            self.assertEqual(decide(decode, prefill), decide(turned, prefill))


if __name__ == "__main__":
    unittest.main()
