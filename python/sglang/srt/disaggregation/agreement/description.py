"""How an engine describes itself, from its arguments and its models' configs.

`describe` turns plain data (server arguments by name, two model configs as dicts) into
the JSON object that the rules compare. The running engine then replaces guesses by facts
(``engine_facts``); a tool has the arguments only, so what they do not tell stays out
of the description.

Pure standard library; relative imports, so that a tool can load this package without
SGLang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .model_configs import (
    BLOCK_SIZE,
    attention_kind,
    checkpoint_fingerprint,
    geometry,
    integers,
    is_on,
    kv_heads,
    local_folder,
    read_config,
    ring_sizes,
    text_config,
)
from .pair import PROTOCOL_VERSION, Description
from .rules import ALLOW_COLD_DRAFT

# export: from tail-rules
from .tail import add_tail

# Where a description travels: a key of prefill's registration at its bootstrap server and
# of /server_info, and the header of the bootstrap server's answer to decode.
DESCRIPTION_KEY = "peer_description"
HEADER = "X-SGLang-Peer-Description"
# One start of a bootstrap server: a key of the description, a header of health answers.
INSTANCE = "instance"
INSTANCE_HEADER = "X-SGLang-Bootstrap-Instance"

DEFAULT_ALLOCATION = "early"  # the only way before 0.5.22
DRAFT_FOLDER = "dspark"  # of a target's checkpoint
_BUNDLED_DRAFT_FIELDS = (
    BLOCK_SIZE,
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)
_LAYER_PARTITION = "SGLANG_PP_LAYER_PARTITION"
# Flags' names for dtypes, as torch names them.
_DTYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_TARGET_FIELDS = (
    ("layers", "num_hidden_layers"),
    ("hidden", "hidden_size"),
    ("vocab", "vocab_size"),
    ("latent", "kv_lora_rank"),
)
# What gives a draft its meaning; two drafts that agree here can read each other's KV.
_DRAFT_FIELDS = (
    *_TARGET_FIELDS,
    ("heads", "num_attention_heads"),
    ("window", "sliding_window"),
    ("types", "layer_types"),
    ("target_layers", "target_layer_ids"),
    ("target_layers", "dspark_target_layer_ids"),
    ("mtp_layers", "num_nextn_predict_layers"),
)


class DraftSource(NamedTuple):
    """Where an engine's draft lies; `bundled` is one among the target's own tensors."""

    path: str | None
    revision: str | None = None
    bundled: bool = False


def describe(
    args: Mapping[str, Any],
    *,
    role: str,
    target_config: Mapping[str, Any] | None = None,
    draft_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Description:
    """Description of an engine started with `args`.

    Args:
        args: server arguments by field name, as in ``ServerArgs`` or ``/server_info``,
            before or after SGLang has resolved them.
        role: ``prefill`` or ``decode``.
        target_config, draft_config: parsed ``config.json`` of the models, if readable.
        environ: the engine's environment, if known (a tool may not know it).
    """
    environ = environ or {}
    algorithm = (args.get("speculative_algorithm") or "").upper() or None
    target_config = _overridden(target_config, args)
    source = draft_source(args, target_config)
    draft_config = _draft_config(draft_config, source, target_config, algorithm)
    description: Description = {
        "version": PROTOCOL_VERSION,
        "role": role,
        "backend": args.get("disaggregation_transfer_backend"),
        "mode": "native" if algorithm == "DSPARK" else "none",
        "block_size": args.get("speculative_num_draft_tokens") if algorithm else None,
        "page_size": args.get("page_size"),
        "allocation_policy": args.get("disaggregation_decode_allocation_policy")
        or DEFAULT_ALLOCATION,
        "kv_dtype": args.get("kv_cache_dtype"),
        **parallel_sizes(args),
        "allow_cold_draft": is_on(environ, ALLOW_COLD_DRAFT),
        **describe_target(target_config),
        "rings": ring_sizes(target_config, _ring_tokens(args)),
    }
    if algorithm == "DSPARK":
        description.update(describe_draft(source, draft_config))
        description["draft_kv_dtype"] = draft_kv_dtype(args, target_config)
    # export: from tail-rules
    add_tail(description, args, target_config, draft_config, environ)
    known = {key: value for key, value in description.items() if value is not None}
    return known | {"algorithm": algorithm}


def parallel_sizes(args: Mapping[str, Any]) -> dict[str, int]:
    """Attention tensor, pipeline, context and decode-context parallel sizes.

    Attention runs data parallel either by ``attn_dp_size`` (0.5.22 and later) or, in the
    older spelling, over all ``dp_size`` replicas.
    """
    tp = int(args.get("tp_size") or 1)
    cp = int(args.get("attn_cp_size") or 1)
    attention_dp = int(args.get("attn_dp_size") or 1)
    if attention_dp == 1 and args.get("enable_dp_attention"):
        attention_dp = int(args.get("dp_size") or 1)
    return {
        "tp": max(1, tp // (attention_dp * cp)),
        "pp": int(args.get("pp_size") or 1),
        "cp": cp,
        "dcp": int(args.get("dcp_size") or 1),
    }


# -- target and draft -------------------------------------------------------------------


def describe_target(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Shape of the target, and what follows from it."""
    if not config:
        return {}
    return {
        "target": geometry(config, _TARGET_FIELDS),
        "target_heads": kv_heads(config),
        "attention": attention_kind(config),
    }


def describe_draft(
    source: DraftSource, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Shape, heads, attention and weights of the draft."""
    folder = local_folder(source.path, source.revision)
    described: dict[str, Any] = {
        "draft_weights": checkpoint_fingerprint(folder, bundled=source.bundled)
    }
    if config:
        described["draft"] = geometry(config, _DRAFT_FIELDS) | _rope(config)
        described["draft_heads"] = kv_heads(config)
        described["draft_attention"] = attention_kind(config)
    return described


def draft_source(
    args: Mapping[str, Any], target_config: Mapping[str, Any] | None
) -> DraftSource:
    """Where the draft of these arguments lies, by SGLang's own order.

    A path of its own; among the target's tensors; in a folder of the target's checkpoint.
    """
    model, revision = args.get("model_path"), args.get("revision")
    path = args.get("speculative_draft_model_path")
    fields = (target_config or {}).get
    bundled = any(fields(key) is not None for key in _BUNDLED_DRAFT_FIELDS)
    if bundled and path in (None, "", model):
        return DraftSource(model, revision, bundled=True)
    if path:
        return DraftSource(path, args.get("speculative_draft_model_revision"))
    checkpoint = local_folder(model, revision)
    folder = os.path.join(checkpoint, DRAFT_FOLDER) if checkpoint else ""
    has_config = os.path.isfile(os.path.join(folder, "config.json"))
    return DraftSource(folder if checkpoint and has_config else None)


def _draft_config(config, source: DraftSource, target_config, algorithm):
    if config is not None:
        return config
    if source.bundled:
        return target_config
    return read_config(source.path) if algorithm == "DSPARK" else None


def draft_kv_dtype(
    args: Mapping[str, Any], target_config: Mapping[str, Any] | None
) -> str | None:
    """dtype of the draft's KV pool as torch names it; None when flags do not say.

    ``auto`` follows the model's dtype, unless a quantised checkpoint brings its own.
    """
    chosen = args.get("speculative_draft_kv_cache_dtype") or args.get("kv_cache_dtype")
    if chosen in (None, "auto"):
        text = text_config(target_config or {})
        config = {**(target_config or {}), **text}
        if config.get("quantization_config"):
            return None
        chosen = args.get("dtype")
        if chosen in (None, "auto"):
            chosen = config.get("dtype") or config.get("torch_dtype")
    if chosen in (None, "auto"):
        return None
    name = str(chosen).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding in one spelling; configs use two."""
    text = text_config(config)
    nested = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(nested, Mapping) or any(
        isinstance(value, Mapping) for value in nested.values()
    ):
        return {}  # one set for each kind of layer: not worth a comparison
    kind = str(nested.get("rope_type") or nested.get("type") or "default")
    found: dict[str, Any] = {"rope": kind.removeprefix("deepseek_")}
    theta = text.get("rope_theta") or nested.get("rope_theta")
    if theta:
        found["rope_theta"] = float(theta)
    if nested.get("factor"):
        found["rope_factor"] = float(nested["factor"])
    return found


def _ring_tokens(args: Mapping[str, Any]) -> int | None:
    """Draft tokens that rings make room for; 0 for none, None when not known."""
    if not args.get("speculative_algorithm"):
        return 0
    return int(args.get("speculative_num_draft_tokens") or 0) or None


def stages_divide(
    layers: int | None, stages: int, environ: Mapping[str, str]
) -> bool | None:
    """Whether every pipeline stage's number of layers divides the model's.

    Where it does not, a peer that splits keys from values by position splits wrongly.
    """
    if not layers or stages < 1:
        return None
    partition = environ.get(_LAYER_PARTITION)
    if partition and stages > 1:
        sizes = set(integers(partition))
    else:
        base, extra = divmod(int(layers), stages)
        sizes = {base} if not extra else {base, base + 1}
    return all(size > 0 and layers % size == 0 for size in sizes)


def _overridden(
    config: Mapping[str, Any] | None, args: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The config with ``--json-model-override-args`` applied."""
    changes = args.get("json_model_override_args")
    try:
        changes = json.loads(changes) if isinstance(changes, str) else changes
    except ValueError:
        return config
    if not config or not isinstance(changes, Mapping):
        return config
    return {**config, **changes}
