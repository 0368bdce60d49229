"""How an engine describes itself, from its arguments and its models' configs.

`describe` turns plain data (server arguments by name, two model configs as dicts) into
the JSON object that the rules compare. The running engine then replaces guesses by facts
(``engine_facts``); the doctor has the arguments only, so what they do not tell stays out
of the description.

Pure standard library; relative imports, because the doctor loads this package without
SGLang.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .rules import (
    ALLOW_COLD_DRAFT,
    ALLOW_PARTIAL_CONTEXT,
    CAPTURE,
    LAYER_IDS,
    PEER_DRAFT_TOKENS,
    PROTOCOL_VERSION,
    TAIL_TOKENS,
    Description,
)

# Where a description travels: a key of prefill's registration at its bootstrap server and
# of /server_info, and the header of the bootstrap server's answer to decode.
DESCRIPTION_KEY = "peer_description"
HEADER = "X-SGLang-Peer-Description"
# One start of a bootstrap server: a key of the description, a header of health answers.
INSTANCE = "instance"
INSTANCE_HEADER = "X-SGLang-Bootstrap-Instance"

DEFAULT_TAIL_TOKENS = 8
DEFAULT_ALLOCATION = "early"  # the only way before 0.5.22
DEEPSEEK_V4_WINDOW = 128  # of a config that names none
DRAFT_FOLDER = "dspark"  # of a target's checkpoint
_TRUE = frozenset({"1", "true", "yes", "y"})
_BLOCK_SIZE = "dspark_block_size"
_BUNDLED_DRAFT_FIELDS = (
    _BLOCK_SIZE,
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)
_RADIX_FLAG = "--disaggregation-decode-enable-radix-cache"
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
        environ: the engine's environment, if known (the doctor may not know it).
    """
    environ = environ or {}
    algorithm = (args.get("speculative_algorithm") or "").upper() or None
    target_config = _overridden(target_config, args)
    mode = mode_of(role, algorithm, environ)
    source = draft_source(args, target_config)
    draft_config = _draft_config(draft_config, source, target_config, algorithm)
    description: Description = {
        "version": PROTOCOL_VERSION,
        "role": role,
        "backend": args.get("disaggregation_transfer_backend"),
        "mode": mode,
        "block_size": args.get("speculative_num_draft_tokens") if algorithm else None,
        "page_size": args.get("page_size"),
        "allocation_policy": args.get("disaggregation_decode_allocation_policy")
        or DEFAULT_ALLOCATION,
        "kv_dtype": args.get("kv_cache_dtype"),
        **parallel_sizes(args),
        "allow_cold_draft": _on(environ, ALLOW_COLD_DRAFT),
        "allow_partial_context": _on(environ, ALLOW_PARTIAL_CONTEXT),
        **describe_target(target_config),
        "rings": ring_sizes(target_config, args, environ, capturing=mode == "tail"),
    }
    if algorithm == "DSPARK":
        description.update(describe_draft(source, draft_config))
        description["draft_kv_dtype"] = draft_kv_dtype(args, target_config)
    if mode == "tail":
        description["dspark"] = describe_tail(role, args, draft_config, environ)
    known = {key: value for key, value in description.items() if value is not None}
    return known | {"algorithm": algorithm}


def mode_of(role: str, algorithm: str | None, environ: Mapping[str, str]) -> str:
    """How draft context is handed over or taken: native, tail or none.

    A decode of mode tail takes both.
    """
    if role == "decode":
        return "tail" if algorithm == "DSPARK" else "none"
    if algorithm == "DSPARK":
        return "native"
    named = environ.get(LAYER_IDS) and CAPTURE not in environ
    captures = algorithm is None and (named or _on(environ, CAPTURE))
    return "tail" if captures else "none"


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
        text = _text_config(target_config or {})
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


def describe_tail(
    role: str,
    args: Mapping[str, Any],
    draft_config: Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """The tail as flags and environment give it; the running engine knows more.

    `window_need` is the number of tokens whose hidden states the draft reads before its
    block: None for a draft that attends to everything, absent when its config is unknown.
    `must_cover` says why decode takes no tail that is shorter.
    """
    dspark: dict[str, Any] = {}
    if role == "prefill" and environ.get(LAYER_IDS):
        dspark["layer_ids"] = _integers(environ[LAYER_IDS])
    if draft_config:
        ids = _draft_value(draft_config, _text_config(draft_config), "target_layer_ids")
        ids = ids or draft_config.get("dspark_target_layer_ids")
        if ids and "layer_ids" not in dspark:
            dspark["layer_ids"] = sorted(ids)
        dspark["window_need"] = window_need(draft_config)
    # -1 is what the window needs, and so is the default of a prefill that knows it.
    tokens = int(environ.get(TAIL_TOKENS) or -1)
    if tokens == -1:
        tokens = dspark.get("window_need") or 0
    if not tokens and role == "prefill" and not environ.get(TAIL_TOKENS):
        tokens = DEFAULT_TAIL_TOKENS
    if tokens and (role == "prefill" or environ.get(TAIL_TOKENS)):
        dspark["tail_tokens"] = tokens
    if role == "decode" and args.get("disaggregation_decode_enable_radix_cache"):
        dspark["must_cover"] = f"{_RADIX_FLAG} shares it between requests"
    return dspark


def window_need(config: Mapping[str, Any]) -> int | None:
    """Tokens before the block that an all-sliding draft reads; None for all of them."""
    text = _text_config(config)
    if attention_kind(config) == "compressed_mla":
        window = text.get("sliding_window") or text.get("window_size")
        return int(window or DEEPSEEK_V4_WINDOW)
    types, window = text.get("layer_types"), text.get("sliding_window")
    if types and window and set(types) == {"sliding_attention"}:
        return int(window) - 1
    return None


def geometry(
    config: Mapping[str, Any], fields: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """Values of the config for the given (label, key) pairs, and its KV heads.

    A key that the config leaves out is left out: a file and a config object made from
    it differ in the defaults, and engines compare what both know.
    """
    text = _text_config(config)
    found: dict[str, Any] = {}
    if config.get("architectures"):
        found["architecture"] = ",".join(config["architectures"])
    for label, key in fields:
        value = _draft_value(config, text, key)
        if value is not None:
            found.setdefault(label, value)
    heads = kv_heads(config)
    if heads is not None and attention_kind(config) != "mla":
        found["kv_heads"], found["head_dim"] = heads
    return found


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding in one spelling; configs use two."""
    text = _text_config(config)
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


def kv_heads(config: Mapping[str, Any]) -> list[int] | None:
    """[KV heads, head dim] of a dense model; None when the config does not say."""
    text = _text_config(config)
    attention_heads = text.get("num_attention_heads")
    heads = text.get("num_key_value_heads") or attention_heads
    dim = text.get("head_dim")
    if dim is None and attention_heads and text.get("hidden_size"):
        dim = text["hidden_size"] // attention_heads
    return [int(heads), int(dim)] if heads and dim else None


def attention_kind(config: Mapping[str, Any]) -> str:
    """``mha``, ``mla`` or ``compressed_mla`` (DeepSeek-V4), from the config's keys."""
    text = _text_config(config)
    if text.get("compress_ratios"):
        return "compressed_mla"
    return "mla" if text.get("kv_lora_rank") else "mha"


def ring_sizes(
    config: Mapping[str, Any] | None,
    args: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    capturing: bool,
) -> dict[str, int] | None:
    """Entries of the DeepSeek-V4 compressor rings that are transferred whole, by ratio.

    Ratio 128 is left out: its state is transferred in pages of its own that are
    compatible across ring sizes. None for other models, and where the draft tokens are not known.
    """
    ratios = ring_ratios(config)
    tokens = _ring_tokens(config or {}, args, environ, capturing=capturing)
    if tokens is None:
        return None
    sizes = {}
    if "4" in ratios:
        sizes["4"] = 16 if tokens else 8
    if "2" in ratios:
        sizes["2"] = 1 << (tokens + 1).bit_length() if tokens else 2
    return sizes or None


def ring_ratios(config: Mapping[str, Any] | None) -> list[str]:
    """Compression ratios of the model whose rings are transferred whole."""
    ratios = set(_text_config(config or {}).get("compress_ratios") or ())
    return [str(ratio) for ratio in (4, 2) if ratio in ratios]


def _ring_tokens(config, args, environ, *, capturing: bool) -> int | None:
    """Draft tokens that rings make room for; 0 for none, None when not known.

    A capturing prefill has its decode's rings: of the number it is told, or of the
    block size of the draft that its checkpoint carries. With neither it does not start;
    the sizes of a model without a draft then show what is wrong.
    """
    if args.get("speculative_algorithm"):
        return int(args.get("speculative_num_draft_tokens") or 0) or None
    if not capturing:
        return 0
    block = config.get(_BLOCK_SIZE)
    return int(environ.get(PEER_DRAFT_TOKENS) or 0) or (int(block) + 1 if block else 0)


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
        sizes = set(_integers(partition))
    else:
        base, extra = divmod(int(layers), stages)
        sizes = {base} if not extra else {base, base + 1}
    return all(size > 0 and layers % size == 0 for size in sizes)


def local_folder(path: str | None, revision: str | None = None) -> str | None:
    """A model path as a folder on this machine; None when there is none.

    A hub name resolves to the cached snapshot of its revision, never to a download.
    """
    if not path:
        return None
    if os.path.isdir(path):
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except (ImportError, OSError, ValueError):  # no hub client, or no hub name
        return None
    return os.path.dirname(cached) if isinstance(cached, str) else None


def read_config(path: str | None, revision: str | None = None) -> dict[str, Any] | None:
    """The ``config.json`` of a model path, or None."""
    folder = local_folder(path, revision)
    try:
        text = (pathlib.Path(folder) / "config.json").read_text() if folder else ""
        config = json.loads(text) if text else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


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


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _draft_value(config: Mapping[str, Any], text: Mapping[str, Any], key: str) -> Any:
    for place in (config.get("dspark_config"), config.get("dflash_config")):
        if isinstance(place, Mapping) and place.get(key) is not None:
            return place[key]
    return text.get(key, config.get(key))


def _integers(text: str) -> list[int]:
    return sorted(int(part) for part in re.findall(r"-?\d+", text))


def _on(environ: Mapping[str, str], name: str) -> bool:
    return str(environ.get(name, "")).strip().lower() in _TRUE


# -- identity of a checkpoint's weights -------------------------------------------------

BLOCK_BYTES = 1024
BLOCKS_PER_CHECKPOINT = 256
_LENGTH_BYTES = 8
_LARGEST_HEADER = 128 << 20
_INDEX = "model.safetensors.index.json"


class _Tensor(NamedTuple):
    """One tensor of a safetensors file; `start` and `end` are bytes of the file."""

    name: str
    dtype: str
    shape: list[int]
    path: pathlib.Path
    start: int
    end: int


def checkpoint_fingerprint(
    folder: str | os.PathLike | None, *, bundled: bool = False
) -> str | None:
    """16 hex digits for the weights of a local checkpoint; None when they are not found.

    Two drafts of the same shape have equal configs and equal tensor headers, and hashing
    gigabytes at every start takes too long. So this hashes names, dtypes and shapes of
    the tensors and a few evenly spaced blocks of their data: retrained or requantised
    weights differ in every block. Depends neither on the folder's name or file times nor
    on how tensors are spread over files.

    Args:
        bundled: count only the draft's tensors of a target's checkpoint.
    """
    if not folder:
        return None
    try:
        wanted = _is_draft_tensor if bundled else _is_any_tensor
        tensors = sorted(_tensors(pathlib.Path(folder), wanted))
        return _digest(tensors) if tensors else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_any_tensor(name: str) -> bool:
    return name != "__metadata__"


def _is_draft_tensor(name: str) -> bool:
    return name.startswith("mtp.") or "dspark" in name


def _tensors(folder: pathlib.Path, wanted: Callable[[str], bool]) -> Iterator[_Tensor]:
    for path in _files(folder, wanted):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(path.stat().st_size, _LARGEST_HEADER):
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
        for name in filter(wanted, header):
            start, end = (
                _LENGTH_BYTES + length + offset
                for offset in header[name]["data_offsets"]
            )
            dtype, shape = header[name]["dtype"], header[name]["shape"]
            yield _Tensor(name, dtype, shape, path, start, end)


def _files(folder: pathlib.Path, wanted: Callable[[str], bool]) -> list[pathlib.Path]:
    """Files that hold wanted tensors; by the index, where a checkpoint has one."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    places = json.loads(index.read_text())["weight_map"]
    return sorted({folder / file for name, file in places.items() if wanted(name)})


def _digest(tensors: list[_Tensor]) -> str:
    """Hash headers, and blocks at equal distances in all data laid end to end."""
    digest = hashlib.sha256()
    total = sum(tensor.end - tensor.start for tensor in tensors)
    stride = max(BLOCK_BYTES, total // BLOCKS_PER_CHECKPOINT)
    skipped = 0  # how far the next block begins behind the start of a tensor
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
        offsets = range(tensor.start + skipped, tensor.end, stride)
        if offsets:
            with tensor.path.open("rb") as file:
                for offset in offsets:
                    file.seek(offset)
                    digest.update(file.read(min(BLOCK_BYTES, tensor.end - offset)))
            skipped = offsets[-1] + stride
        else:
            skipped += tensor.start
        skipped -= tensor.end
    return digest.hexdigest()[:16]
