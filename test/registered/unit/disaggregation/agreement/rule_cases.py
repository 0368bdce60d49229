"""Pairs of engines for each rule, and what must hold of any table of rules.

Test cases that take `RuleTable` and `AllPairs` give them ``rules``, ``cases`` (a code to
the decode and the prefill for which exactly this rule speaks) and ``good`` (a name to a
pair that has no verdict).
"""

from __future__ import annotations

import copy
import itertools

from agreement_fixtures import NATIVE, PLAIN, refusal

from sglang.srt.disaggregation.agreement.pair import (
    NOTE,
    UNDESCRIBED,
    WARN,
    look_up,
)
from sglang.srt.disaggregation.agreement.rules import decide

COLD_OK = {**NATIVE, "allow_cold_draft": True}
V4 = {"attention": "compressed_mla"}
MOONCAKE = {"backend": "mooncake", "kv_layer_ids": False}

# code -> (decode, prefill) for which exactly this rule speaks
CASES = {
    "PD-VERSION": (NATIVE, {**NATIVE, "version": 1}),
    "PD-RANKS": (NATIVE, {**NATIVE, "conflict": "page_size: 1 and 64"}),
    "PD-UNDESCRIBED-PREFILL": (NATIVE, UNDESCRIBED),
    "PD-UNDESCRIBED-PREFILL-ALLOWED": (COLD_OK, UNDESCRIBED),
    "PD-UNDESCRIBED-PREFILL-PLAIN": (PLAIN, UNDESCRIBED),
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
        {**NATIVE, **V4, "rings": {"4": 16}},
        {**NATIVE, **V4, "rings": {"4": 8}},
    ),
    "PD-COLD-LAYERS": (
        {**COLD_OK, **MOONCAKE, "draft": {"layers": 4}},
        {**PLAIN, **MOONCAKE},
    ),
    "PD-COLD-DRAFT": (NATIVE, PLAIN),
    "PD-COLD-DRAFT-ALLOWED": (COLD_OK, PLAIN),
    "PD-DRAFT-ONLY-ON-PREFILL": (PLAIN, NATIVE),
    "PD-ALGORITHM": (NATIVE, {**PLAIN, "algorithm": "EAGLE"}),
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
}
GOOD = {
    "EAGLE on decode alone, SGLang's business": (
        {**PLAIN, "algorithm": "EAGLE", "aux": ["output_ids:64", "hidden:512"]},
        {**PLAIN, "aux": ["output_ids:64", "hidden:64"]},
    ),
    "native": (NATIVE, NATIVE),
    "plain": (PLAIN, PLAIN),
    "stages with layer ids": (NATIVE, {**NATIVE, "pp": 2}),
    "tensor parallel 1 to 2": ({**NATIVE, "tp": 2}, NATIVE),
}


class RuleTable:
    """Each rule fires for its pair, alone, and says what it saw."""

    def test_every_rule_has_a_case_and_every_case_a_rule(self):
        self.assertEqual({rule.code for rule in self.rules}, set(self.cases))

    def test_each_case_is_decided_by_its_rule(self):
        for code, (decode, prefill) in self.cases.items():
            with self.subTest(code):
                verdicts = decide(decode, prefill)
                self.assertEqual([verdict.code for verdict in verdicts], [code])

    def test_good_pairs_have_no_verdict(self):
        for name, (decode, prefill) in self.good.items():
            with self.subTest(name):
                self.assertEqual(decide(decode, prefill), [])

    def test_a_message_shows_both_values(self):
        for code, (decode, prefill) in self.cases.items():
            rule = next(rule for rule in self.rules if rule.code == code)
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

    def test_notes_and_warnings_do_not_refuse(self):
        for rule in self.rules:
            if rule.severity in (WARN, NOTE):
                with self.subTest(rule.code):
                    self.assertIsNone(refusal(*self.cases[rule.code]))


class AllPairs:
    """The product of everything an engine can be, judged without exceptions.

    A test case gives it ``cases`` and ``good``.
    """

    def setUp(self):
        engines = [*itertools.chain.from_iterable(self.cases.values())]
        engines += [*itertools.chain.from_iterable(self.good.values()), {}, UNDESCRIBED]
        self.pairs = list(itertools.product(engines, engines))

    def test_all_pairs_are_decided_and_descriptions_untouched(self):
        before = copy.deepcopy(self.pairs)
        for decode, prefill in self.pairs:
            decide(decode, prefill)
        self.assertGreater(len(self.pairs), 3000)
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
