"""What a checkpoint tells: its config, shapes that follow from it, its identity.

Pure standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

BLOCK_SIZE = "dspark_block_size"
_TRUE = frozenset({"1", "true", "yes", "y"})


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


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def draft_value(config: Mapping[str, Any], text: Mapping[str, Any], key: str) -> Any:
    for place in (config.get("dspark_config"), config.get("dflash_config")):
        if isinstance(place, Mapping) and place.get(key) is not None:
            return place[key]
    return text.get(key, config.get(key))


def geometry(
    config: Mapping[str, Any], fields: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """Values of the config for the given (label, key) pairs, and its KV heads.

    A key that the config leaves out is left out: a file and a config object made from
    it differ in the defaults, and engines compare what both know.
    """
    text = text_config(config)
    found: dict[str, Any] = {}
    if config.get("architectures"):
        found["architecture"] = ",".join(config["architectures"])
    for label, key in fields:
        value = draft_value(config, text, key)
        if value is not None:
            found.setdefault(label, value)
    heads = kv_heads(config)
    if heads is not None and attention_kind(config) != "mla":
        found["kv_heads"], found["head_dim"] = heads
    return found


def kv_heads(config: Mapping[str, Any]) -> list[int] | None:
    """[KV heads, head dim] of a dense model; None when the config does not say."""
    text = text_config(config)
    attention_heads = text.get("num_attention_heads")
    heads = text.get("num_key_value_heads") or attention_heads
    dim = text.get("head_dim")
    if dim is None and attention_heads and text.get("hidden_size"):
        dim = text["hidden_size"] // attention_heads
    return [int(heads), int(dim)] if heads and dim else None


def attention_kind(config: Mapping[str, Any]) -> str:
    """``mha``, ``mla`` or ``compressed_mla`` (DeepSeek-V4), from the config's keys."""
    text = text_config(config)
    if text.get("compress_ratios"):
        return "compressed_mla"
    return "mla" if text.get("kv_lora_rank") else "mha"


def integers(text: str) -> list[int]:
    return sorted(int(part) for part in re.findall(r"-?\d+", text))


def ring_ratios(config: Mapping[str, Any] | None) -> list[str]:
    """Compression ratios of the model whose rings are transferred whole."""
    ratios = set(text_config(config or {}).get("compress_ratios") or ())
    return [str(ratio) for ratio in (4, 2) if ratio in ratios]


def ring_sizes(
    config: Mapping[str, Any] | None, tokens: int | None
) -> dict[str, int] | None:
    """Entries of the DeepSeek-V4 compressor rings that are transferred whole, by ratio.

    Ratio 128 is left out: its state is transferred in pages of its own that are
    compatible across ring sizes. None for other models.

    Args:
        tokens: draft tokens that the rings make room for; None, and so the answer, where
            they are not known.
    """
    ratios = ring_ratios(config)
    if tokens is None:
        return None
    sizes = {}
    if "4" in ratios:
        sizes["4"] = 16 if tokens else 8
    if "2" in ratios:
        sizes["2"] = 1 << (tokens + 1).bit_length() if tokens else 2
    return sizes or None


def is_on(environ: Mapping[str, str], name: str) -> bool:
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
