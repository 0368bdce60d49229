"""Which draft context crosses the prefill/decode split, resolved once per engine.

DSpark drafts from a *context KV* built of the target's hidden states of the prompt. With
prefill and decode in two engines there are two ways to move that context:

- ``native``: DSPARK runs on both engines and the draft KV travels with the target
  KV. Nothing here is active.
- ``tail``: prefill runs no draft. It keeps the hidden states of the last T prompt tokens
  and sends them with the request's metadata; decode writes its draft KV from them.

Life cycle: ``dspark_handoff_startup`` refuses arguments that cannot work before any
process is started; each scheduler keeps what it does in a handoff in one ``Handoff``
object (``activate``), and ``describe_role`` tells the peer. Prefill has to be told to
capture, by one variable; decode learns from prefill's description that a tail will
come, how long it is and of what shape, and the agreement's rules compare that with its
own draft before it registers.

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
from sglang.srt.speculative.dspark_components.handoff_refusals import HEADER_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dspark_components.dspark_handoff_decode import Draft
    from sglang.srt.speculative.dspark_components.dspark_handoff_tail import (
        TailBuffer,
        TailLayout,
        TailSlots,
    )


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
        """Bytes of one row: the header and room for the whole tail."""
        return HEADER_BYTES + self.tail_tokens * self.token_bytes

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
        spec: what a capturing prefill hands over, on every stage; None elsewhere.
        tail: rows of hidden states: of the last stage of a capturing prefill, and of a
            decode that has met one.
        peers: where decodes keep their rows, by agent name or session id. Kept as long
            as SGLang keeps a registration, which it never drops by age.
        draft: decode's draft, whose context is written or cleared here.
        slots: decode's metadata slots.
        peer_draft_tokens: tokens the decode of a DeepSeek-V4 prefill verifies at once.
    """

    spec: TailSpec | None = None
    tail: TailBuffer | None = None
    peers: dict[str, TailLayout] = dataclasses.field(default_factory=dict)
    draft: Draft | None = None
    slots: TailSlots | None = None
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
    """Whether this scheduler's forwards capture hidden states; asked in each of them."""
    return _handoff.spec is not None


def peer_draft_tokens() -> int:
    """Draft tokens of the decode this prefill hands over to; 0 when not capturing."""
    return _handoff.peer_draft_tokens


def refuse_client_hidden_states(requested_mode: CaptureHiddenMode) -> None:
    """Refuse a client that asks a capturing prefill for hidden states.

    Raises:
        ValueError: shown to the client.
    """
    if not requested_mode.need_capture():
        return
    # The tokenizer's process, which has no model to capture with.
    from sglang.srt.runtime_context import get_server_args

    if rules.captures(facts_of(_resolved(get_server_args()))):
        raise ValueError(
            "This prefill engine captures hidden states for its decode engines and cannot "
            "return any to clients. Leave return_hidden_states out of the request, or run "
            f"prefill without {rules.CAPTURE} and {rules.LAYER_IDS}."
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


_DRAFT_ARGUMENTS = (
    "model_path",
    "revision",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)


def load_draft_config(cfg: ServerArgs, target: ModelConfig) -> PretrainedConfig | None:
    """The config of an engine's draft where SGLang would look for it.

    In the target's own, at ``--speculative-draft-model-path``, in the checkpoint's
    folder for it; None where there is none.
    """
    from sglang.srt.disaggregation.agreement.description import draft_source
    from sglang.srt.utils.hf_transformers_utils import get_config

    args = {name: getattr(cfg, name, None) for name in _DRAFT_ARGUMENTS}
    source = draft_source(args, target.hf_config.to_dict())
    if source.bundled:
        return target.hf_config
    if source.path is None:
        return None
    config = get_config(
        source.path,
        trust_remote_code=cfg.trust_remote_code,
        revision=source.revision,
        model_override_args=json.loads(cfg.json_model_override_args),
    )
    if config.architectures == ["DSparkMiniMaxDraftModel"]:
        from sglang.srt.configs.minimax_vl import configure_minimax_m3_dspark

        return configure_minimax_m3_dspark(config)
    return config


def facts_of(
    cfg: ServerArgs,
    target: ModelConfig | None = None,
    draft_hf_config: PretrainedConfig | None = None,
    role: str | None = None,
) -> dict[str, Any]:
    """Facts about this engine for ``handoff_refusals``.

    Args:
        cfg: resolved server arguments.
        target: with it, what the models' configs say is included.
        draft_hf_config: the draft's config where it is loaded already.
        role: of an engine that has switched it; else as in the arguments.
    """
    names = (*rules.ARGUMENTS, *rules.GRAPH_ARGUMENTS)
    args = {name: getattr(cfg, name, None) for name in names}
    role = role or cfg.disaggregation_mode
    facts = rules.facts_from(args, os.environ, role=role)
    if target is None:
        return facts
    hf_config = target.hf_config
    facts["architecture"] = hf_config.architectures[0]
    facts["model_type"] = getattr(hf_config, "model_type", None)
    facts["bundled_block_size"] = getattr(hf_config, "dspark_block_size", None)
    facts["num_layers"] = num_target_layers(target)
    facts["hidden_size"] = int(target.hidden_size)
    facts["dtype_bytes"] = target.dtype.itemsize
    if rules.takes_part(facts) or rules.captures_on_stages(facts):
        draft = draft_hf_config or load_draft_config(cfg, target)
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
    """The tail of a capturing prefill whose facts include its models'.

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


# -- what peers are told ------------------------------------------------------------------


def describe_role(
    role: str, server_args: ServerArgs, model_config: ModelConfig
) -> dict | None:
    """This component's part of an engine's description, for the agreement.

    Returns:
        None for no draft context at all, else mode (str, ``native`` or ``tail``; a
        decode of mode ``tail`` takes both), layer_ids (list[int], ascending),
        hidden_size (int, values), dtype (str, such as ``bfloat16``), window_need (int,
        tokens; None for the whole prompt; left out by a prefill that knows no window).
        Where the length of the tail is known, tail_tokens (int). Of a decode, why it
        takes no tail (no_tail, str), or none that covers less than its draft reads
        (must_cover, str).
    """
    handoff = current()
    if role == "decode" and handoff.draft is not None:
        return _describe_decode(handoff.draft)
    if handoff.spec is not None:
        known = {k: v for k, v in _shape(handoff.spec).items() if v is not None}
        return {**known, "mode": "tail"}
    cfg = _resolved(server_args)
    if role == "decode" or cfg.speculative_algorithm != "DSPARK":
        return None
    facts = draft_facts(load_draft_config(cfg, model_config), model_config)
    return {**_shape(shape_of(facts, model_config)), "mode": "native"}


def _describe_decode(draft: Draft) -> dict:
    described = {**_shape(draft.shape), "mode": "native" if draft.no_tail else "tail"}
    notes = {
        "tail_tokens": draft.pinned_tokens,
        "no_tail": draft.no_tail,
        "must_cover": draft.must_cover,
    }
    return described | {key: value for key, value in notes.items() if value}


def shape_of(facts: DraftFacts, target: ModelConfig) -> TailSpec:
    """What hidden states for a draft look like, however many of them travel."""
    return TailSpec(
        layer_ids=facts.layer_ids,
        hidden_size=int(target.hidden_size),
        dtype=target.dtype,
        tail_tokens=0,
        window_need=facts.window_need,
    )


def _shape(spec: TailSpec) -> dict:
    shape = {
        "layer_ids": list(spec.layer_ids),
        "hidden_size": spec.hidden_size,
        "dtype": dtype_name(spec.dtype),
        "window_need": spec.window_need,
    }
    return shape | ({"tail_tokens": spec.tail_tokens} if spec.tail_tokens else {})


def _resolved(server_args: ServerArgs) -> ServerArgs:
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)
