"""Untrained checkpoints of other architectures, for tests that compare draft KV.

Their output is noise and no drafted token is accepted, so verify counts show nothing. What
can be compared is the draft KV of every token whose context crosses the split.
"""

from __future__ import annotations

import json
from pathlib import Path

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 4, 2, 16, 128, 4
INNER, EXPERTS = 96, 4
CAPTURED = [0, 1, 2]
WINDOW = 32
NO_TOKENIZER = {"skip-tokenizer-init": True}

_SHARED = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "intermediate_size": INNER,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGETS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
_DRAFT = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": LAYERS,
    "block_size": 4,
    "target_layer_ids": CAPTURED,
    "mask_token_id": 0,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
}


def make_pair(folder: Path, family: str) -> tuple[Path, Path]:
    """Write a target of this family and a sliding draft; returns their folders."""
    import torch

    random = torch.Generator().manual_seed(3)

    def matrix(*shape: int, scale: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * scale

    target = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        target |= _attention(prefix, matrix, norms=family != "llama")
        target |= _mlp(prefix, matrix, experts=EXPERTS if "moe" in family else 0)
    draft = {
        "fc.weight": matrix(HIDDEN, len(CAPTURED) * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "markov_head.markov_w1.weight": matrix(VOCAB, 8),
        "markov_head.markov_w2.weight": matrix(VOCAB, 8),
    }
    for index in range(2):
        draft |= _attention(f"layers.{index}.", matrix, norms=True)
        draft |= _mlp(f"layers.{index}.", matrix, experts=0)
    config = {**_SHARED, **TARGETS[family], "num_hidden_layers": LAYERS}
    return (
        _save(folder / f"{family}-target", config, target),
        _save(folder / f"{family}-draft", {**_SHARED, **_DRAFT}, draft),
    )


def _attention(prefix: str, matrix, *, norms: bool) -> dict:
    import torch

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found = {
        f"{prefix}self_attn.q_proj.weight": matrix(queries, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": matrix(keys, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": matrix(keys, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, queries),
        f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    if norms:
        found[f"{prefix}self_attn.q_norm.weight"] = torch.ones(HEAD_DIM)
        found[f"{prefix}self_attn.k_norm.weight"] = torch.ones(HEAD_DIM)
    return found


def _mlp(prefix: str, matrix, *, experts: int) -> dict:
    places = [f"{prefix}mlp.experts.{i}." for i in range(experts)] or [f"{prefix}mlp."]
    found = {}
    for place in places:
        found[f"{place}gate_proj.weight"] = matrix(INNER, HIDDEN)
        found[f"{place}up_proj.weight"] = matrix(INNER, HIDDEN)
        found[f"{place}down_proj.weight"] = matrix(HIDDEN, INNER)
    if experts:
        found[f"{prefix}mlp.gate.weight"] = matrix(experts, HIDDEN)
    return found


def _save(folder: Path, config: dict, weights: dict) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    return folder
