"""Engines whose prefill has no draft, and the bytes that they move."""

from __future__ import annotations

from pathlib import Path

from pd_parity import METADATA_BYTES, kv_bytes_per_token
from pd_prompts import CHUNK, PROMPT_SETS

from dspark_pd.bed import MODELS, EngineSpec
from dspark_pd.bed.models import check_checkpoint

SETS = ("sliding", "sliding-short", "sliding-long")
CAPTURE = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
HEADER_BYTES = 64


def prefill_spec(name: str, *, env: dict | None = None, **options) -> EngineSpec:
    """A prefill that captures; the draft's config tells it layers and window."""
    options.setdefault("chunked_prefill", CHUNK)
    args = {
        "speculative-draft-model-path": str(MODELS.draft_swa),
        **options.pop("args", {}),
    }
    return EngineSpec(
        name, "prefill", MODELS.target, args=args, env=env or CAPTURE, **options
    )


def decode_spec(name: str, **options) -> EngineSpec:
    """A DSPARK decode, which needs no variable."""
    draft = options.pop("draft", MODELS.draft_swa)
    return EngineSpec(name, "decode", MODELS.target, draft, **options)


def window() -> int:
    """Positions that the sliding draft reads before its first drafted one."""
    return check_checkpoint(MODELS.draft_swa, "draft")["sliding_window"] - 1


def captured_layers(draft: Path) -> list[int]:
    return check_checkpoint(draft, "draft")["target_layer_ids"]


def hidden_state_bytes() -> int:
    layers = captured_layers(MODELS.draft_swa)
    return len(layers) * check_checkpoint(MODELS.target, "target")["hidden_size"] * 4


def assert_moved(moved: int, name: str, stages: int) -> None:
    """Target KV and the hidden states that exist, and little beside them."""
    lengths = [len(prompt.ids) for prompt in PROMPT_SETS[name]]
    states = sum(min(length, window()) for length in lengths)
    kv = sum(lengths) * kv_bytes_per_token(MODELS.target)
    least = kv + states * hidden_state_bytes()
    formula = least + len(lengths) * (HEADER_BYTES + stages * METADATA_BYTES)
    assert least <= moved <= 1.02 * formula
