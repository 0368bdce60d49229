"""Descriptions of engines for the tests of the agreement."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

from sglang.srt.disaggregation.agreement.pair import REFUSE
from sglang.srt.disaggregation.agreement.rules import decide

NATIVE = {
    "version": 2,
    "backend": "nixl",
    "algorithm": "DSPARK",
    "mode": "native",
    "block_size": 5,
    "page_size": 1,
    "kv_dtype": "auto",
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "attention": "mha",
    "kv_layer_ids": True,
    "stage_pairing": "none",
    "target": {"architecture": "T", "layers": 4},
    "draft": {"architecture": "D", "layers": 2},
    "draft_weights": "aaaa",
    "draft_kv_dtype": "auto",
    "aux": ["output_ids", "bootstrap_room"],
}
PLAIN = {
    key: value
    for key, value in {**NATIVE, "algorithm": None, "mode": "none"}.items()
    if not key.startswith("draft") and key != "block_size"
}


def refusal(decode, prefill):
    """The verdict that forbids this pair, or None."""
    verdicts = decide(decode, prefill)
    return verdicts[0] if verdicts and verdicts[0].severity == REFUSE else None


def patch_existing(module, **replacements):
    """`mock.patch.multiple` for those of the names that the module has."""
    known = {k: v for k, v in replacements.items() if hasattr(module, k)}
    return mock.patch.multiple(module, **known) if known else ExitStack()
