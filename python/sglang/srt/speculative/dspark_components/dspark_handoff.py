"""Which draft context crosses the prefill/decode split, resolved once per engine.

DSpark drafts from a *context KV* built of target hidden rows of the prompt. With
prefill and decode in two engines there are two ways to move that context:

- ``native``: DSPARK runs on both engines and the draft KV travels with the target
  KV. Nothing here is active.
- ``tail``: prefill runs no draft. It keeps the last T hidden rows of each prompt and
  ships them beside the request's metadata; decode writes its draft KV from them.

Life cycle of a ``TailSpec``: ``dspark_handoff_startup`` validates the knobs before any
process is started; each scheduler resolves its spec once, when it builds its metadata
buffers (``dspark_handoff_tail``), and never changes it. The same numbers are described
to the peer by ``describe_prefill`` and ``describe_decode``.

A row is the concatenation of one position's hidden states after the captured layers,
``[K * hidden_size]`` in ascending layer order and in the target's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from sglang.srt.environ import envs
from sglang.srt.speculative.dspark_components.dspark_handoff_knobs import (
    AUTO_TAIL,
    MAX_TAIL_TOKENS,
    HandoffConfigError,
    capture_enabled,
    check_layer_ids,
    partial_context_allowed,
    read_layer_ids,
    read_tail_tokens,
    tail_expected,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

# Bytes in front of the rows: eight int64 words, and the smallest item an RDMA
# transfer likes.
HEADER_BYTES = 64
# One request's share of the pinned buffer; there are two slots per running request.
MAX_ITEM_BYTES = 64 << 20


class DraftFacts(NamedTuple):
    """What a draft checkpoint's config says about the context it reads.

    ``layer_ids`` are target layers in ascending order; ``window_need`` is the number
    of rows before the first drafted position that the draft attends to, None when it
    attends to the whole prompt.
    """

    layer_ids: tuple[int, ...]
    window_need: int | None


class TailSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the rows that travel, the same on both engines."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    tail_tokens: int
    window_need: int | None

    @property
    def width(self) -> int:
        return len(self.layer_ids) * self.hidden_size

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def item_bytes(self) -> int:
        """Bytes of one metadata slot: the header and room for every row."""
        return HEADER_BYTES + self.tail_tokens * self.row_bytes

    @property
    def fingerprint(self) -> int:
        """A positive int64 that differs when the meaning of a row differs."""
        value = 1469598103934665603
        text = f"{self.layer_ids}/{self.hidden_size}/{dtype_name(self.dtype)}"
        for byte in text.encode():
            value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
        return (value >> 1) | 1


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def captures_last_layer(hf_config: Any) -> bool:
    """Whether the target snapshots a layer's output itself, not the next input."""
    from sglang.srt.configs.model_config import is_deepseek_v4

    return is_deepseek_v4(hf_config)


def draft_facts(draft_hf_config: Any, model_config: ModelConfig) -> DraftFacts:
    """Read layer ids and window from a draft's config; weights are not touched."""
    from sglang.srt.configs.model_config import is_deepseek_v4
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.speculative.dspark_components.dspark_config import (
        parse_dspark_draft_config,
    )

    ids = parse_dspark_draft_config(draft_hf_config=draft_hf_config).target_layer_ids
    if ids is None:
        dflash = parse_dflash_draft_config(draft_hf_config=draft_hf_config)
        ids = dflash.resolve_target_layer_ids(
            target_num_layers=num_target_layers(model_config),
            draft_num_layers=int(dflash.require_num_layers()),
        )
    if is_deepseek_v4(draft_hf_config):
        need = getattr(draft_hf_config, "sliding_window", None)
        need = int(need or draft_hf_config.window_size)
    else:
        need = _dense_window_need(draft_hf_config)
    return DraftFacts(layer_ids=tuple(sorted(int(i) for i in ids)), window_need=need)


def _dense_window_need(draft_hf_config: Any) -> int | None:
    from sglang.srt.speculative.dflash_utils import (
        get_dflash_attention_sliding_window_size,
        get_dflash_layer_types,
    )

    layer_types = get_dflash_layer_types(draft_hf_config)
    if not layer_types or any(kind != "sliding_attention" for kind in layer_types):
        return None
    return get_dflash_attention_sliding_window_size(draft_hf_config)


def num_target_layers(model_config: ModelConfig) -> int:
    """Layers a row can come from; a looped model counts each pass of a layer."""
    config = model_config.hf_text_config
    return int(config.num_hidden_layers) * int(getattr(config, "num_loops", None) or 1)


def prefill_draft_facts(
    cfg: Any, model_config: ModelConfig
) -> tuple[DraftFacts | None, str]:
    """The draft facts a draft-less prefill can read, and where they came from.

    In order: fields of a draft bundled in the target checkpoint; the config, never
    the weights, of ``--speculative-draft-model-path``.
    """
    from sglang.srt.speculative.dspark_components.dspark_config import (
        checkpoint_bundles_dspark_draft,
    )

    if checkpoint_bundles_dspark_draft(model_config.hf_config):
        return draft_facts(
            model_config.hf_config, model_config
        ), "the target checkpoint"
    path = getattr(cfg, "speculative_draft_model_path", None)
    if path is None:
        return None, "nothing"
    return draft_facts(load_draft_config(cfg, path), model_config), str(path)


def load_draft_config(cfg: Any, path: str) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(
        path,
        trust_remote_code=cfg.trust_remote_code,
        revision=getattr(cfg, "speculative_draft_model_revision", None),
    )


def resolve_prefill_spec(cfg: Any, model_config: ModelConfig) -> TailSpec:
    """The tail a capturing prefill sends.

    Args:
        cfg: resolved server arguments, or any view of them.
        model_config: the target's.

    Raises:
        HandoffConfigError: no layer ids, ids that cannot be captured, a tail length
            that cannot be resolved, or one the draft's window does not fit in.
    """
    facts, source = prefill_draft_facts(cfg, model_config)
    layer_ids = read_layer_ids() or (facts.layer_ids if facts else None)
    if layer_ids is None:
        raise HandoffConfigError(
            f"{envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.name} is on, but nothing "
            "says which target layers the draft reads. Set "
            f"{envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.name} to target_layer_ids of the "
            "draft's config.json, or pass --speculative-draft-model-path without "
            "--speculative-algorithm: its config is read, its weights are not."
        )
    check_layer_ids(
        layer_ids,
        num_layers=num_target_layers(model_config),
        last_layer_ok=captures_last_layer(model_config.hf_config),
    )
    need = facts.window_need if facts else None
    return _finish_spec(
        model_config, layer_ids, need, need_known=facts is not None, source=source
    )


def resolve_decode_spec(
    draft_hf_config: Any, model_config: ModelConfig, *, source: str = "the draft"
) -> TailSpec:
    """The tail a DSPARK decode expects.

    Raises:
        HandoffConfigError: layer ids of the environment that are not the draft's, or
            a tail that does not cover what the draft attends to.
    """
    facts = draft_facts(draft_hf_config, model_config)
    named = read_layer_ids()
    if named is not None and named != facts.layer_ids:
        raise HandoffConfigError(
            f"{envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.name}={named} on decode, but "
            f"{source} reads target layers {facts.layer_ids}. Unset it here: decode "
            "reads the ids from its draft."
        )
    return _finish_spec(
        model_config,
        facts.layer_ids,
        facts.window_need,
        need_known=True,
        source=source,
    )


def _finish_spec(
    model_config: ModelConfig,
    layer_ids: Sequence[int],
    need: int | None,
    *,
    need_known: bool,
    source: str,
) -> TailSpec:
    tokens = read_tail_tokens()
    if tokens == AUTO_TAIL:
        tokens = _auto_tail(need, need_known=need_known, source=source)
    elif need_known:
        _check_coverage(tokens, need, source=source)
    spec = TailSpec(
        layer_ids=tuple(layer_ids),
        hidden_size=int(model_config.hidden_size),
        dtype=model_config.dtype,
        tail_tokens=tokens,
        window_need=need,
    )
    if spec.item_bytes > MAX_ITEM_BYTES:
        raise HandoffConfigError(
            f"A tail of {tokens} rows of {spec.row_bytes} bytes is {spec.item_bytes} "
            f"bytes for one request; the limit is {MAX_ITEM_BYTES}. Lower "
            f"{envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name}."
        )
    return spec


def _auto_tail(need: int | None, *, need_known: bool, source: str) -> int:
    name = envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name
    if need is not None and 0 < need <= MAX_TAIL_TOKENS:
        return need
    if need is not None:
        raise HandoffConfigError(
            f"{name}={AUTO_TAIL}: the window of {source} needs {need} rows; the limit "
            f"is {MAX_TAIL_TOKENS}. Run DSPARK on prefill as well."
        )
    if not need_known:
        raise HandoffConfigError(
            f"{name}={AUTO_TAIL}: this engine knows no draft to read a window from. "
            "Set the number of rows, or pass --speculative-draft-model-path without "
            "--speculative-algorithm so that its config can be read."
        )
    raise HandoffConfigError(
        f"{name}={AUTO_TAIL}: {source} attends to the whole prompt, so no tail covers "
        "it. Run DSPARK on prefill as well, or set a number of rows and "
        f"{envs.SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT.name}=1 on both engines."
    )


def _check_coverage(tokens: int, need: int | None, *, source: str) -> None:
    if need is not None and tokens >= need:
        return
    if partial_context_allowed():
        return
    wanted = "the whole prompt" if need is None else f"{need} rows"
    way_out = (
        "run DSPARK on prefill as well"
        if need is None
        else f"set {envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name}={AUTO_TAIL}"
    )
    raise HandoffConfigError(
        f"{envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name}={tokens}: {source} attends "
        f"to {wanted}, so drafts would be made from part of their context. Output "
        f"would stay exact, but fewer drafts would be accepted. Either {way_out}, or "
        f"accept it with {envs.SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT.name}=1 on both engines."
    )


def describe_prefill(server_args: ServerArgs, model_config: ModelConfig):
    """What this prefill hands over, or None for no draft context at all.

    Returns:
        mode (str, ``native`` or ``tail``), layer_ids (list[int], ascending),
        hidden_size (int, values), dtype (str, such as ``bfloat16``), tail_tokens
        (int, rows; 0 when native), row_bytes (int), window_need (int, rows; None for
        the whole prompt).

    Raises:
        HandoffConfigError: a knob that cannot work.
    """
    cfg = _resolved(server_args)
    if cfg.speculative_algorithm == "DSPARK":
        return _describe_native(cfg, model_config)
    if not capture_enabled():
        return None
    return _describe_tail(cfg, model_config, resolve_prefill_spec(cfg, model_config))


def describe_decode(server_args: ServerArgs, model_config: ModelConfig):
    """What this decode can take; None when it does not run DSPARK.

    A decode of mode ``tail`` also takes a native prefill, whose draft KV arrives with
    the target KV. Keys, types and errors are those of ``describe_prefill``.
    """
    cfg = _resolved(server_args)
    if cfg.speculative_algorithm != "DSPARK":
        return None
    if not tail_expected():
        return _describe_native(cfg, model_config)
    draft = load_draft_config(cfg, cfg.speculative_draft_model_path)
    spec = resolve_decode_spec(
        draft, model_config, source=str(cfg.speculative_draft_model_path)
    )
    return _describe_tail(cfg, model_config, spec)


def describe_role(
    role: str, server_args: ServerArgs, model_config: ModelConfig
) -> dict | None:
    """This component's part of an engine's description, for the agreement."""
    describe = describe_decode if role == "decode" else describe_prefill
    return describe(server_args, model_config)


def _describe_native(cfg: Any, model_config: ModelConfig) -> dict:
    draft = load_draft_config(cfg, cfg.speculative_draft_model_path)
    facts = draft_facts(draft, model_config)
    return {
        "mode": "native",
        "layer_ids": list(facts.layer_ids),
        "hidden_size": int(model_config.hidden_size),
        "dtype": dtype_name(model_config.dtype),
        "tail_tokens": 0,
        "row_bytes": 0,
        "window_need": facts.window_need,
    }


def _describe_tail(cfg: Any, model_config: ModelConfig, spec: TailSpec) -> dict:
    return {
        "mode": "tail",
        "layer_ids": list(spec.layer_ids),
        "hidden_size": spec.hidden_size,
        "dtype": dtype_name(spec.dtype),
        "tail_tokens": spec.tail_tokens,
        "row_bytes": spec.row_bytes,
        "window_need": spec.window_need,
    }


def _resolved(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)
