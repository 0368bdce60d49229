"""Arguments of engines and configs of models, for the tests of descriptions."""

from __future__ import annotations

from sglang.srt.disaggregation.agreement.description import describe

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}
DRAFT = {
    **TARGET,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 0},
}
V4 = {**TARGET, "compress_ratios": [0, 4, 128, 4]}
ARGS = {
    "disaggregation_transfer_backend": "nixl",
    "speculative_algorithm": "DSPARK",
    "speculative_num_draft_tokens": 5,
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "tp_size": 2,
}
PLAIN_ARGS = {**ARGS, "speculative_algorithm": None}


def describe_role(role, args=ARGS, *, draft=DRAFT, target=TARGET, environ=None):
    return describe(
        args,
        role=role,
        target_config=target,
        draft_config=draft,
        environ=environ,
    )
