"""The part of a draft that a prefill engine uses: what writes its context KV.

Prefill never drafts. Of each draft layer it runs the projections that make K and V of the
target's hidden states; SGLang drops the rest of a dense draft once it is loaded, and keeps
all of a DeepSeek-V4 draft, whose experts are most of it. ``context_weights`` drops the
idle modules of both before any weight is read, and withholds their tensors from the
loader: what nobody asks of a memory-mapped checkpoint is not read.

The heads stay until the worker is built, which configures them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

# Modules of a DeepSeek-V4 stage's attention that injection reads.
_KEPT = ("wkv", "kv_norm")


def context_weights(
    draft: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Drop a prefill draft's idle modules, in place.

    Args:
        draft: a DSpark draft whose weights are about to be loaded.
        weights: name in the checkpoint and tensor.

    Returns:
        ``weights`` without those of dropped modules; all of them on other engines.
    """
    stages = getattr(draft, "stages", None)
    known = stages is not None or hasattr(draft, "prune_to_ctx_kv_injection")
    if not (known and _only_writes_context()):
        return weights
    whole = _parameter_bytes(draft)
    for layer in stages or draft.layers:
        _drop_idle(layer, is_stage=stages is not None)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    logger.info(
        "DSpark prefill keeps the %.1f of %.1f MiB of its draft that write context KV.",
        _parameter_bytes(draft) / 2**20,
        whole / 2**20,
    )
    return _without_dropped(draft, weights)


def _only_writes_context() -> bool:
    """Whether this engine will never draft: it prefills and cannot become a decode."""
    disagg = get_disagg()
    prefills = disagg.disaggregation_mode == "prefill"
    wanted = envs.SGLANG_DSPARK_PD_CONTEXT_ONLY_DRAFT.get()
    return prefills and wanted and not disagg.enable_pd_role_switch


def _drop_idle(layer: nn.Module, *, is_stage: bool) -> None:
    if getattr(layer, "mlp", None) is not None:
        layer.mlp = None
    attention = layer.self_attn
    for name, module in list(attention.named_children()):
        has_weights = next(module.parameters(), None) is not None
        idle = name not in _KEPT if is_stage else name == "o_proj"
        if idle and has_weights:
            setattr(attention, name, None)


def _without_dropped(
    draft: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    rename = getattr(draft, "_remap_dspark_weight_name", None)
    for name, weight in weights:
        found = rename(name) if rename else name.removeprefix("model.")
        if found is None or not _is_dropped(draft, found):
            yield name, weight


def _is_dropped(draft: nn.Module, name: str) -> bool:
    """Whether a module on the way to this parameter is None."""
    module: nn.Module | None = draft
    for part in name.split(".")[:-1]:
        children = module._modules
        if part not in children:
            return False
        module = children[part]
        if module is None:
            return True
    return False


def _parameter_bytes(draft: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in draft.parameters())
