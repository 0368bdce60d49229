"""Which draft context crosses the prefill/decode split, resolved once per engine.

DSpark drafts from a *context KV* built of the target's hidden states of the prompt. With
prefill and decode in two engines there are two ways to move that context:

- ``native``: DSPARK runs on both engines and the draft KV travels with the target
  KV. Nothing here is active.
- ``tail``: prefill runs no draft. It keeps the hidden states of the last T prompt tokens
  and sends them with the request's metadata; decode writes its draft KV from them.

Life cycle: ``dspark_handoff_startup`` refuses arguments that cannot work before any
process is started; each scheduler resolves its ``TailSpec`` once and keeps what it does
in a handoff in one ``Handoff`` object (``activate``). The same numbers are described to
the peer by ``describe_prefill`` and ``describe_decode``.

One token's hidden states are those after the captured layers, concatenated:
``[K * hidden_size]`` in ascending layer order and in the target's dtype.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from sglang.srt.speculative.dspark_components import handoff_refusals as rules
from sglang.srt.speculative.dspark_components.handoff_refusals import (
    CAPTURE,
    HEADER_BYTES,
    TAIL_TOKENS,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dspark_components.dspark_handoff_decode import Draft
    from sglang.srt.speculative.dspark_components.dspark_handoff_tail import (
        TailBuffer,
        TailLayout,
    )
    from sglang.srt.speculative.dspark_components.pp_aux_capture import StageShare


class HandoffConfigError(ValueError):
    """Arguments or variables of the handoff that cannot work, with what to set."""


class TailSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the hidden states that travel, the same on both engines."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    tail_tokens: int
    window_need: int | None

    @property
    def width(self) -> int:
        """Values of one token's hidden states."""
        return len(self.layer_ids) * self.hidden_size

    @property
    def token_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one metadata slot: the header and room for the whole tail."""
        return HEADER_BYTES + self.tail_tokens * self.token_bytes

    @property
    def covers_draft(self) -> bool:
        """Whether the draft reads nothing before the tail."""
        return self.window_need is not None and self.tail_tokens >= self.window_need

    @property
    def fingerprint(self) -> int:
        """A positive int64 that differs when the meaning of a value differs."""
        value = 1469598103934665603
        text = f"{self.layer_ids}/{self.hidden_size}/{dtype_name(self.dtype)}"
        for byte in text.encode():
            value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
        return (value >> 1) | 1


# -- what this process does ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Handoff:
    """What this process does in a handoff; an engine without one keeps the defaults.

    Args:
        tail: the tail buffer; on a capturing prefill the last pipeline stage has it.
        cap_tokens: a capturing prefill computes this many last tokens of every prompt
            itself, on every stage alike; 0 elsewhere.
        peers: places of the tail in decodes' metadata, by agent name or session id.
            Kept as long as upstream keeps a registration, which it never drops by age.
        draft: decode's draft, whose context is written or cleared here.
        stage: a pipeline stage's share of the captured layers.
        peer_draft_tokens: tokens the decode of a DeepSeek-V4 prefill verifies at once.
    """

    tail: TailBuffer | None = None
    cap_tokens: int = 0
    peers: dict[str, TailLayout] = dataclasses.field(default_factory=dict)
    draft: Draft | None = None
    stage: StageShare | None = None
    peer_draft_tokens: int = 0


_handoff = Handoff()


def current() -> Handoff:
    return _handoff


def activate(**parts: Any) -> Handoff:
    """Add parts of a ``Handoff`` to this process.

    The model's load brings the captured layers, the scheduler's metadata buffers the
    rest; one scheduler lives in a process.
    """
    global _handoff
    _handoff = dataclasses.replace(_handoff, **parts)
    return _handoff


def deactivate() -> None:
    """Back to an engine without a handoff."""
    global _handoff
    _handoff = Handoff()


def capture_enabled() -> bool:
    """Whether this process belongs to a prefill engine that captures hidden states.

    Asked in every forward; start-up refused a value that is neither on nor off.
    """
    return rules.is_on(os.environ.get(CAPTURE))


def peer_draft_tokens() -> int:
    """Draft tokens of the decode this prefill hands over to; 0 when not capturing."""
    return _handoff.peer_draft_tokens


def refuse_client_hidden_states(requested_mode: CaptureHiddenMode) -> None:
    """Refuse a client that asks a capturing prefill for hidden states.

    Raises:
        ValueError: shown to the client.
    """
    if capture_enabled() and requested_mode.need_capture():
        raise ValueError(
            "This prefill engine captures hidden states for its decode engines and cannot "
            "return any to clients. Leave return_hidden_states out of the request, or "
            f"unset {CAPTURE} on prefill and restart it."
        )


# -- what the configs say -----------------------------------------------------------------


class DraftFacts(NamedTuple):
    """What a draft checkpoint's config says about the context it reads.

    ``layer_ids`` are target layers in ascending order; ``window_need`` is the number
    of tokens before the first drafted position that the draft attends to, None when it
    attends to the whole prompt.
    """

    layer_ids: tuple[int, ...]
    window_need: int | None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def draft_facts(
    draft_hf_config: PretrainedConfig, model_config: ModelConfig
) -> DraftFacts:
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


def _dense_window_need(draft_hf_config: PretrainedConfig) -> int | None:
    from sglang.srt.speculative.dflash_utils import (
        get_dflash_attention_sliding_window_size,
        get_dflash_layer_types,
    )

    layer_types = get_dflash_layer_types(draft_hf_config)
    if not layer_types or any(kind != "sliding_attention" for kind in layer_types):
        return None
    return get_dflash_attention_sliding_window_size(draft_hf_config)


def num_target_layers(model_config: ModelConfig) -> int:
    """Layers to capture; a looped model counts each pass of a layer."""
    config = model_config.hf_text_config
    return int(config.num_hidden_layers) * int(getattr(config, "num_loops", None) or 1)


def load_draft_config(cfg: ServerArgs) -> PretrainedConfig | None:
    """The config of ``--speculative-draft-model-path``, None without the flag."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = cfg.speculative_draft_model_path
    if path is None:
        return None
    config = get_config(
        path,
        trust_remote_code=cfg.trust_remote_code,
        revision=cfg.speculative_draft_model_revision,
        model_override_args=json.loads(cfg.json_model_override_args),
    )
    if config.architectures == ["DSparkMiniMaxDraftModel"]:
        from sglang.srt.configs.minimax_vl import configure_minimax_m3_dspark

        config = configure_minimax_m3_dspark(config)
    return config


def _draft_config_of(cfg: ServerArgs, target: ModelConfig) -> PretrainedConfig | None:
    """The config of an engine's draft: one bundled in the target, else the flag's."""
    from sglang.srt.speculative.dspark_components.dspark_config import (
        checkpoint_bundles_dspark_draft,
    )

    if cfg.speculative_algorithm is None and checkpoint_bundles_dspark_draft(
        target.hf_config
    ):
        return target.hf_config
    return load_draft_config(cfg)


def facts_of(
    cfg: ServerArgs,
    target: ModelConfig | None = None,
    draft_hf_config: PretrainedConfig | None = None,
) -> dict[str, Any]:
    """Facts about this engine for ``handoff_refusals``.

    Args:
        cfg: resolved server arguments.
        target: with it, what the models' configs say is included.
        draft_hf_config: the draft's config where it is loaded already.
    """
    names = (*rules.ARGUMENTS, *rules.GRAPH_ARGUMENTS)
    args = {name: getattr(cfg, name, None) for name in names}
    facts = rules.facts_from(args, os.environ, role=cfg.disaggregation_mode)
    if target is None:
        return facts
    hf_config = target.hf_config
    facts["architecture"] = hf_config.architectures[0]
    facts["model_type"] = getattr(hf_config, "model_type", None)
    facts["bundled_block_size"] = getattr(hf_config, "dspark_block_size", None)
    facts["num_layers"] = num_target_layers(target)
    facts["hidden_size"] = int(target.hidden_size)
    facts["dtype_bytes"] = target.dtype.itemsize
    in_tail = rules.captures(facts) or rules.expects_tail(facts)
    if in_tail or rules.captures_on_stages(facts):
        draft = draft_hf_config or _draft_config_of(cfg, target)
        if draft is not None:
            found = draft_facts(draft, target)
            facts["draft_layer_ids"], facts["window_need"] = found
    return facts


def refuse(facts: rules.Facts) -> None:
    """Refuse an engine for all reasons that apply.

    Raises:
        HandoffConfigError: each reason with what was found, and how to fix it.
    """
    found = rules.refusals(facts)
    if found:
        reasons = "".join(
            f"\n- {says}. To fix it, {fix}. [{rule.code}]" for rule, says, fix in found
        )
        raise HandoffConfigError(
            f"This {facts['role']} engine cannot take part in a DSpark handoff with the "
            f"settings it was started with:{reasons}"
        )


def spec_of(facts: rules.Facts, dtype: torch.dtype) -> TailSpec:
    """The tail of an engine whose facts include its models'.

    Raises:
        HandoffConfigError: as ``refuse``.
    """
    refuse(facts)
    return TailSpec(
        layer_ids=rules.layer_ids(facts),
        hidden_size=facts["hidden_size"],
        dtype=dtype,
        tail_tokens=rules.tail_tokens(facts),
        window_need=facts.get("window_need"),
    )


def resolve_spec(
    cfg: ServerArgs,
    target: ModelConfig,
    draft_hf_config: PretrainedConfig | None = None,
) -> TailSpec:
    """The tail that a capturing prefill sends, or that a DSPARK decode expects."""
    return spec_of(facts_of(cfg, target, draft_hf_config), target.dtype)


# -- what peers are told ------------------------------------------------------------------


def describe_prefill(server_args: ServerArgs, model_config: ModelConfig):
    """What this prefill hands over, or None for no draft context at all.

    Returns:
        mode (str, ``native`` or ``tail``), layer_ids (list[int], ascending),
        hidden_size (int, values), dtype (str, such as ``bfloat16``), tail_tokens
        (int; 0 when native), row_bytes (int, bytes of one token), window_need (int,
        tokens; None for the whole prompt).

    Raises:
        HandoffConfigError: arguments or variables that cannot work.
    """
    cfg = _resolved(server_args)
    if cfg.speculative_algorithm == "DSPARK":
        return _describe_native(cfg, model_config)
    if not capture_enabled():
        return None
    return _describe(resolve_spec(cfg, model_config))


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
    return _describe(resolve_spec(cfg, model_config))


def tail_expected() -> bool:
    """Whether a DSPARK decode was told to expect a tail from its prefill.

    Naming the tail length is the switch: a decode without it keeps the metadata
    buffers, and so the wire format, of a server that knows nothing of the handoff.
    """
    return TAIL_TOKENS in os.environ


def _describe_native(cfg: ServerArgs, model_config: ModelConfig) -> dict:
    facts = draft_facts(load_draft_config(cfg), model_config)
    native = TailSpec(
        layer_ids=facts.layer_ids,
        hidden_size=int(model_config.hidden_size),
        dtype=model_config.dtype,
        tail_tokens=0,
        window_need=facts.window_need,
    )
    return {**_describe(native), "mode": "native", "row_bytes": 0}


def describe_role(
    role: str, server_args: ServerArgs, model_config: ModelConfig
) -> dict | None:
    """This component's part of an engine's description, for the agreement."""
    describe = describe_decode if role == "decode" else describe_prefill
    return describe(server_args, model_config)


def _describe(spec: TailSpec) -> dict:
    return {
        "mode": "tail",
        "layer_ids": list(spec.layer_ids),
        "hidden_size": spec.hidden_size,
        "dtype": dtype_name(spec.dtype),
        "tail_tokens": spec.tail_tokens,
        "row_bytes": spec.token_bytes,
        "window_need": spec.window_need,
    }


def _resolved(server_args: ServerArgs) -> ServerArgs:
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)
