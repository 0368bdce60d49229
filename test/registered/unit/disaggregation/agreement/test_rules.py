"""The rules: each fires for its pair, and none for a pair that works.

Contract: two engines that are described alike agree; every message names both values; the
decision is pure, does not depend on key order, and a missing value never refuses.
"""

from __future__ import annotations

import unittest

from agreement_fixtures import NATIVE, PLAIN, refusal
from rule_cases import CASES, GOOD, MOONCAKE, V4, AllPairs, RuleTable

from sglang.srt.disaggregation.agreement.pair import (
    NOTE,
    REFUSE,
    SEVERITIES,
    UNDESCRIBED,
)
from sglang.srt.disaggregation.agreement.rules import (
    DRAFT_RULES,
    ENGINE_RULES,
    RULES,
    decide,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=16, suite="base-a-test-cpu")


class TestRules(RuleTable, CustomTestCase):
    rules, cases, good = ENGINE_RULES + DRAFT_RULES, CASES, GOOD

    def test_codes_are_unique_and_severities_known(self):
        codes = [rule.code for rule in RULES]
        self.assertEqual(len(codes), len(set(codes)))
        self.assertLessEqual({rule.severity for rule in RULES}, set(SEVERITIES))

    def test_refusals_come_first_whatever_else_is_said(self):
        verdicts = decide(
            {**NATIVE, "block_size": 3}, {**NATIVE, "draft_weights": "b", "tp": 1}
        )
        self.assertEqual([v.severity for v in verdicts], [REFUSE, NOTE])


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
    "stock plain prefill": (PLAIN, {**UNDESCRIBED, "page_size": 1, "tp": 1}),
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


class TestAllPairs(AllPairs, CustomTestCase):
    cases, good = CASES, GOOD


if __name__ == "__main__":
    unittest.main()
