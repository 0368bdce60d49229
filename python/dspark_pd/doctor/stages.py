"""Where to cut a pipelined prefill that has a draft: the last stage holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dspark_pd.doctor.engine import Engine

PARTITION: Final = "SGLANG_PP_LAYER_PARTITION"


def better_partition(engine: Engine) -> str | None:
    """Layers of each stage so that target and draft KV are spread evenly.

    None where the engine is cut like that already, says itself where to cut, or is not
    known well enough. Only dense KV is counted: K and V heads of every layer.
    """
    stages, environ = engine.size("pp_size"), engine.environ
    if not engine.drafts or stages == 1 or environ is None or environ.get(PARTITION):
        return None
    target, draft = (_kv(c or {}) for c in (engine.target_config, engine.draft_config))
    if target is None or draft is None or target[0] < stages:
        return None
    layers = target[0]
    weight = draft[0] * draft[1] / target[1]
    last = max(1, int((layers + weight) / stages - weight))
    if last >= layers // stages:
        return None
    base, more = divmod(layers - last, stages - 1)
    sizes = [base + (stage < more) for stage in range(stages - 1)]
    return ",".join(map(str, [*sizes, last]))


def _kv(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Layers, and values that K and V of one layer have for a token."""
    config = {**config, **(config.get("text_config") or {})}
    heads = config.get("num_key_value_heads")
    width = config.get("head_dim")
    if not width and config.get("num_attention_heads"):
        width = (config.get("hidden_size") or 0) // config["num_attention_heads"]
    layers = config.get("num_hidden_layers")
    latent = config.get("kv_lora_rank") or config.get("compress_ratios")
    if latent or not (heads and width and layers):
        return None
    return int(layers), 2 * int(heads) * int(width)
