"""The shipped tiny models are the ones the manifest describes. Standard library only.

Whether they still accept what the manifest says is `train_tiny_models.py --check`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dspark_pd.bed.prompts import (
    ALPHABET,
    RECALL_SHOWN_TOKENS,
    SEPARATOR,
    make_prompts,
    make_recall_prompts,
)

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MAX_BYTES = 2 * 1000 * 1000
TARGETS = {
    "tiny-draft-full": "tiny-target",
    "tiny-draft-sliding": "tiny-target",
    "tiny-draft-recall": "tiny-target-recall",
}
DRAFTS = tuple(TARGETS)


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((ASSETS / "MANIFEST.json").read_text(encoding="utf-8"))


def config(name: str) -> dict:
    return json.loads((ASSETS / name / "config.json").read_text(encoding="utf-8"))


def test_manifest_names_every_file_and_its_hash(manifest):
    found = {
        path.relative_to(ASSETS).as_posix(): path.read_bytes()
        for path in ASSETS.glob("tiny-*/*")
    }
    recorded = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    assert recorded == {
        name: hashlib.sha256(data).hexdigest() for name, data in found.items()
    }


def test_every_file_is_under_two_megabytes(manifest):
    sizes = {name: (ASSETS / name).stat().st_size for name in manifest["files"]}
    assert sizes and max(sizes.values()) < MAX_BYTES, sizes


@pytest.mark.parametrize("draft", DRAFTS)
def test_manifest_claims_hold_the_limits(manifest, draft):
    measured = manifest["measured"][draft]
    assert measured["prompt context"]["accept_length"] >= 3.5
    assert measured["no prompt context"]["accept_length"] <= 1.6
    accepted = measured["prompt context"]["accepted_histogram"]
    assert accepted[-1] > 0, "no block was accepted whole"
    assert sum(accepted[:-1]) > 0, "nothing was ever rejected"


@pytest.mark.parametrize("draft", DRAFTS)
def test_draft_reads_layers_the_target_can_hand_over(draft):
    target, drafted = config(TARGETS[draft]), config(draft)
    last = target["num_hidden_layers"] - 1
    assert drafted["num_target_layers"] == target["num_hidden_layers"]
    assert drafted["num_hidden_layers"] < target["num_hidden_layers"]
    assert all(0 <= layer < last for layer in drafted["target_layer_ids"])
    for name in ("hidden_size", "vocab_size", "num_key_value_heads", "head_dim"):
        assert drafted[name] == target[name]


def test_the_end_of_a_prompt_is_not_enough_to_recall(manifest):
    measured = manifest["measured"]["tiny-draft-recall"]
    assert measured["last 64 rows of context"]["accept_length"] <= 2.0


def test_recall_prompts_end_with_the_start_of_their_key():
    for prompt in make_recall_prompts(9, seed=3, key_len=(20, 30), distance=(99, 120)):
        key = prompt.text[: prompt.key_len]
        between = prompt.text[prompt.key_len + 1 :].partition(SEPARATOR)[0]
        assert 99 <= len(between) <= 120 and not set(between) & set(key)
        assert prompt.text.endswith(SEPARATOR + key[:RECALL_SHOWN_TOKENS])
        assert bytes(prompt.expected).decode() == key[RECALL_SHOWN_TOKENS:]
        assert len(prompt.expected) == prompt.max_new_tokens


def test_only_the_sliding_draft_has_a_window():
    full, sliding, recall = (config(name) for name in DRAFTS)
    for draft in (full, recall):
        assert set(draft["layer_types"]) == {"full_attention"}
    assert set(sliding["layer_types"]) == {"sliding_attention"}
    assert sliding["sliding_window"] == 32 and sliding["use_sliding_window"]


def test_tokenizer_maps_a_byte_to_itself():
    path = ASSETS / "tiny-target" / "tokenizer.json"
    vocab = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    assert all(vocab[symbol] == ord(symbol) for symbol in ALPHABET + SEPARATOR)


def test_prompts_continue_their_own_key():
    for prompt in make_prompts(20, seed=3, key_len=(6, 39), prompt_tokens=(20, 600)):
        period = prompt.key_len + 1
        whole = prompt.ids + prompt.expected
        assert prompt.text.encode() == bytes(prompt.ids)
        assert len(prompt.expected) == prompt.max_new_tokens == period
        assert len(prompt.ids) > period
        assert whole[period:] == whole[:-period]
        assert whole.count(ord(SEPARATOR)) == len(whole) // period


def test_prompts_depend_on_the_seed_alone():
    assert make_prompts(3, seed=1) == make_prompts(3, seed=1)
    assert make_prompts(3, seed=1) != make_prompts(3, seed=2)


def test_prompts_refuse_an_empty_range():
    with pytest.raises(ValueError, match="key_len"):
        make_prompts(1, key_len=(9, 3))
