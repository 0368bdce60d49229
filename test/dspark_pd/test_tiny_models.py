"""The shipped tiny models are the ones the manifest describes. Standard library only.

Whether they still accept what the manifest says is `train_tiny_models.py --check`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dspark_pd.bed.prompts import ALPHABET, SEPARATOR, make_prompts

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MAX_BYTES = 2 * 1000 * 1000
DRAFTS = ("tiny-draft-full", "tiny-draft-sliding")


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
    target, drafted = config("tiny-target"), config(draft)
    last = target["num_hidden_layers"] - 1
    assert drafted["num_target_layers"] == target["num_hidden_layers"]
    assert drafted["num_hidden_layers"] < target["num_hidden_layers"]
    assert all(0 <= layer < last for layer in drafted["target_layer_ids"])
    for name in ("hidden_size", "vocab_size", "num_key_value_heads", "head_dim"):
        assert drafted[name] == target[name]


def test_only_the_sliding_draft_has_a_window():
    full, sliding = (config(name) for name in DRAFTS)
    assert set(full["layer_types"]) == {"full_attention"}
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
