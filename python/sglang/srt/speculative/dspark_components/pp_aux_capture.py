"""Hidden states of a draft's target layers, carried through a pipelined prefill.

A model captures the layers its draft reads on the last pipeline stage only. Here every
stage captures the layers it owns and passes them on beside its own output, so that the
last stage holds all of them in ascending layer order, as without a pipeline.

Life cycle: ``configure`` divides the layers over the stages once, after the model is
loaded, and keeps the stage's ``StageShare``. In each forward the model's capture list
announces itself (``note``); a stage that is not the last packs what it received and its
own for the next one (``export``), which keeps them with its batch (``stash``); the last
stage joins them to its own in front of the logits processor (``merge``).

They travel under SGLang's own proxy key, sized by SGLang's own hook: CUDA-graph
input registries copy the keys they preallocated and drop every other one silently.

Prefill CUDA graphs are refused: they record a stage's body once, with a batch of their
own, and replay it without Python, so what is received later would never be read.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import torch

from sglang.srt.speculative.dspark_components.handoff_refusals import (
    PP_PARTITION,
    STAGED_TARGETS,
    crosses_stages,
)

if TYPE_CHECKING:
    from sglang.srt.layers.aux_hidden_states import (
        AuxHiddenStateList,
        AuxHiddenStatePacker,
    )
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.model_executor.forward_batch_info import (
        ForwardBatch,
        PPProxyTensors,
    )

PROXY_KEY = "dspark_hidden_states"
_BATCH_ATTR = "dspark_received"
_WIDTH_ATTR = "dspark_width_before_stage"

_share: StageShare | None = None


@dataclasses.dataclass
class StageShare:
    """A stage's share of the captured values of one token.

    Args:
        received_width: values of all earlier stages.
        total_width: the same with this stage's own.
        captured: the capture list of the forward in progress.
    """

    received_width: int
    total_width: int
    captured: AuxHiddenStateList | None = None

    def check(self, parts: list[torch.Tensor]) -> None:
        """Refuse parts that are not all of this stage's.

        A draft of one layer would read final hidden states of equal width in their
        place.

        Raises:
            RuntimeError: more or fewer values than expected.
        """
        found = sum(part.shape[-1] for part in parts)
        if found != self.total_width:
            raise RuntimeError(
                f"This pipeline stage holds {found} captured values a token, expected "
                f"{self.total_width}, of which {self.received_width} from earlier "
                "stages. Its body did not run on this batch, as under a CUDA graph, or "
                "a layer was not captured."
            )


def share() -> StageShare | None:
    """This process's stage; None where it carries nothing."""
    return _share


def keep(share: StageShare | None) -> None:
    """Make ``share`` this process's stage; a process runs one."""
    global _share
    _share = share


def owned_layers(layer_ids: list[int], start_layer: int, end_layer: int) -> list[int]:
    """The capture points of one stage: "before layer i" for start <= i < end.

    The output of layer k is taken before layer k + 1, hence by the stage that owns
    layer k + 1: the last layer of a stage is captured by the next one.
    """
    points = [layer_id + 1 for layer_id in layer_ids]
    return [point for point in points if start_layer <= point < end_layer]


def is_stage(model: torch.nn.Module) -> bool:
    """Whether a model is one of several pipeline stages."""
    group = getattr(model, "pp_group", None)
    return group is not None and group.world_size > 1


def configure(model: torch.nn.Module, layer_ids: list[int]) -> bool:
    """Divide the captured layers over the pipeline; False where SGLang's way works.

    Raises:
        ValueError: the pipeline path of the model is not one this module knows.
    """
    if not is_stage(model) or hasattr(model, "get_pp_proxy_dspark_hidden_size"):
        return False
    name = type(model).__name__
    if name not in STAGED_TARGETS:
        if not _crosses_stages(model, layer_ids):
            return False
        raise ValueError(
            f"Capturing target layers with --pp-size > 1 is not supported for {name}; "
            f"it is for {', '.join(STAGED_TARGETS)}, and for models that carry the "
            "hidden states themselves. Use --pp-size 1."
        )
    if name == "DeepseekV4ForCausalLM":
        return False  # Its own setter comes here again, see keep_stage_layers.
    inner = model.model
    _set_points(inner, owned_layers(layer_ids, inner.start_layer, inner.end_layer))
    # A model unpacks a pair whenever this is set, but returns one tensor when it
    # captured nothing; a tensor of two tokens would even unpack without an error.
    model.capture_aux_hidden_states = model.pp_group.is_last_rank and bool(
        inner.layers_to_capture
    )
    before = sum(1 for layer_id in layer_ids if layer_id + 1 < inner.start_layer)
    hidden_size = int(model.config.hidden_size)
    received, own = before * hidden_size, len(inner.layers_to_capture) * hidden_size
    setattr(model, _WIDTH_ATTR, received)
    keep(StageShare(received, received + own))
    return True


def _crosses_stages(model: torch.nn.Module, layer_ids: list[int]) -> bool:
    config = getattr(model.config, "text_config", model.config)
    facts = {
        "draft_layer_ids": layer_ids,
        "num_layers": getattr(config, "num_hidden_layers", None),
        "pp_size": model.pp_group.world_size,
        PP_PARTITION: os.environ.get(PP_PARTITION),
    }
    return crosses_stages(facts)


def _set_points(inner: torch.nn.Module, points: list[int]) -> None:
    # Mixture models mark the layer objects, so points of other stages would touch
    # placeholders; dense ones read the list.
    setter = getattr(inner, "set_dflash_layers_to_capture", None)
    if setter is not None:
        setter(points)
    else:
        inner.layers_to_capture = points


def proxy_width(model: torch.nn.Module) -> int:
    """Values per token this stage receives from the previous one."""
    return getattr(model, _WIDTH_ATTR, 0)


def note(captured: AuxHiddenStateList) -> None:
    """Remember the list the running forward captures into."""
    if _share is not None:
        _share.captured = captured


def export(tensors: dict[str, torch.Tensor], forward_batch: ForwardBatch) -> None:
    """Add what was received and captured, ``[tokens, n * hidden]``, to a stage's output.

    Raises:
        RuntimeError: this stage holds fewer or more layers than it was given.
    """
    if _share is None:
        return
    captured, _share.captured = _share.captured, None
    parts = _received(forward_batch) + list(captured or ())
    if tensors["hidden_states"].shape[0]:
        _share.check(parts)
    if parts:
        tensors[PROXY_KEY] = torch.cat(parts, dim=-1)


def stash(forward_batch: ForwardBatch, proxy: PPProxyTensors) -> None:
    """Keep the previous stage's hidden states with the batch.

    A stage never sends a batch without them (``export`` checks), so a proxy that has
    none was made here for a dummy run; zeros keep the width.
    """
    if _share is None or not _share.received_width:
        return
    received = proxy.tensors.get(PROXY_KEY)
    if received is None:
        hidden = proxy.tensors["hidden_states"]
        received = hidden.new_zeros(hidden.shape[0], _share.received_width)
    setattr(forward_batch, _BATCH_ATTR, received)


def merge(
    aux_hidden_states: list[torch.Tensor] | torch.Tensor | None,
    forward_batch: ForwardBatch | LogitsMetadata,
) -> list[torch.Tensor] | torch.Tensor | None:
    """What was received in front of the last stage's own, for the logits processor.

    Raises:
        RuntimeError: both sides hold different numbers of tokens, or not all layers.
    """
    if _share is None:
        return aux_hidden_states
    _share.captured = None
    if aux_hidden_states is None:
        own: list[torch.Tensor] = []
    elif isinstance(aux_hidden_states, torch.Tensor):
        own = [aux_hidden_states]
    else:
        own = list(aux_hidden_states)
    parts = _received(forward_batch) + own
    tokens = {part.shape[0] for part in parts}
    if len(tokens) > 1:
        raise RuntimeError(
            f"Pipeline stages captured different token counts: {sorted(tokens)}."
        )
    if tokens != {0} and not forward_batch.forward_mode.is_idle():
        _share.check(parts)
    return parts if _share.received_width else aux_hidden_states


def _received(forward_batch: ForwardBatch | LogitsMetadata) -> list[torch.Tensor]:
    received = getattr(forward_batch, _BATCH_ATTR, None)
    return [] if received is None else [received]


# DeepSeek-V4 does not pass stages through the shared boundary, and it captures a layer at
# its output, so a layer's own stage captures it.


def keep_stage_layers(model: torch.nn.Module, layer_ids: list[int] | None) -> bool:
    """Divide a DeepSeek-V4 target's layers over the pipeline; False without one."""
    if not is_stage(model) or layer_ids is None:
        return False
    inner = model.model
    owned = [i for i in layer_ids if inner.start_layer <= i < inner.end_layer]
    before = sum(1 for i in layer_ids if i < inner.start_layer)
    inner.dspark_layers_to_capture = owned if owned or before else None
    inner.dspark_received_layers = before
    model.capture_aux_hidden_states = model.pp_group.is_last_rank and bool(
        owned or before
    )
    setattr(model, _WIDTH_ATTR, before * int(model.config.hidden_size))
    return True


def start_packer(
    inner: torch.nn.Module,
    packer: AuxHiddenStatePacker | None,
    proxy: PPProxyTensors | None,
) -> AuxHiddenStatePacker | None:
    """The packer of a DeepSeek-V4 stage, with what was received already in it.

    A dummy run's proxy holds none; zeros keep the packed width.
    """
    received = getattr(inner, "dspark_received_layers", 0)
    if packer is None or not received:
        return packer
    from sglang.srt.layers.aux_hidden_states import AuxHiddenStatePacker

    hidden = proxy["hidden_states"]
    states = proxy.tensors.get(PROXY_KEY)
    if states is None:
        states = hidden.new_zeros(hidden.shape[0], received * inner.hidden_size)
    joined = AuxHiddenStatePacker(received + len(inner.dspark_layers_to_capture))
    joined.extend(states.split(inner.hidden_size, dim=-1))
    return joined


def stage_output(
    hidden_states: torch.Tensor, packer: AuxHiddenStatePacker
) -> PPProxyTensors:
    """A DeepSeek-V4 stage's output with its captures; ``hidden_states`` is flattened."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    return PPProxyTensors(
        {"hidden_states": hidden_states.flatten(1), PROXY_KEY: packer.finalize()}
    )
