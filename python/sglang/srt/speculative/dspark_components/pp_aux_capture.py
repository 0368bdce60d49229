"""Hidden rows of a draft's target layers, carried through a pipelined prefill.

A model captures the layers its draft reads on the last pipeline stage only. Here every
stage captures the layers it owns and passes them on beside the hidden states, so that
the last stage holds all rows in ascending layer order, as without a pipeline.

Life cycle: ``configure`` divides the layers over the stages once, after the model is
loaded. In each forward the model's capture list announces itself (``note``); a stage
that is not the last packs received and own rows for the next one (``export``), which
keeps them with its batch (``stash``); the last stage joins them to its own in front of
the logits processor (``merge``).

Rows travel under upstream's own proxy key, sized by upstream's own hook: CUDA-graph
input registries copy the keys they preallocated and drop every other one silently.
"""

from __future__ import annotations

from typing import Any

import torch

PROXY_KEY = "dspark_hidden_states"
_BATCH_ATTR = "dspark_rows_received"
_WIDTH_ATTR = "dspark_rows_before_stage"

# Models whose pipeline path was read: they cross stages through the shared residual
# boundary and snapshot a layer's output at the next layer's input.
SUPPORTED_MODELS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")


class _Forward:
    """The capture list of the forward in progress; a process runs one at a time."""

    enabled = False
    captured: list | None = None


def owned_layers(layer_ids: list[int], start_layer: int, end_layer: int) -> list[int]:
    """The capture points of one stage: "before layer i" for start <= i < end.

    The output of layer k is taken before layer k + 1, hence by the stage that owns
    layer k + 1: the last layer of a stage is captured by the next one.
    """
    points = [layer_id + 1 for layer_id in layer_ids]
    return [point for point in points if start_layer <= point < end_layer]


def configure(model: Any, layer_ids: list[int]) -> bool:
    """Divide the captured layers over the pipeline; False where upstream's way works.

    Raises:
        ValueError: the model's pipeline path is not one this module knows.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.pp_size <= 1 or hasattr(model, "get_pp_proxy_dspark_hidden_size"):
        return False
    name = type(model).__name__
    if name == "DeepseekV4ForCausalLM":
        return False  # Its own setter comes here again, see keep_stage_layers.
    if name not in SUPPORTED_MODELS:
        raise ValueError(
            f"Capturing target layers under pipeline parallelism is not verified for "
            f"{name}; it is for {', '.join(SUPPORTED_MODELS)} and for models that "
            "carry the rows themselves. Use --pp-size 1."
        )
    inner = model.model
    _set_points(inner, owned_layers(layer_ids, inner.start_layer, inner.end_layer))
    # A model unpacks a pair whenever this is set, but returns one tensor when it
    # captured nothing; a tensor of two rows would even unpack without an error.
    model.capture_aux_hidden_states = parallel.pp_group.is_last_rank and bool(
        inner.layers_to_capture
    )
    before = sum(1 for layer_id in layer_ids if layer_id + 1 < inner.start_layer)
    setattr(model, _WIDTH_ATTR, before * int(model.config.hidden_size))
    _Forward.enabled = True
    return True


def _set_points(inner: Any, points: list[int]) -> None:
    # Mixture models mark the layer objects, so points of other stages would touch
    # placeholders; dense ones read the list.
    setter = getattr(inner, "set_dflash_layers_to_capture", None)
    if setter is not None:
        setter(points)
    else:
        inner.layers_to_capture = points


def proxy_width(model: Any) -> int:
    """Values per token this stage receives from the previous one."""
    return getattr(model, _WIDTH_ATTR, 0)


def note(captured: list) -> None:
    """Remember the list the running forward captures into."""
    if _Forward.enabled:
        _Forward.captured = captured


def export(tensors: dict[str, torch.Tensor], forward_batch: Any) -> None:
    """Add received and own rows ``[tokens, n * hidden]`` to a stage's output."""
    if not _Forward.enabled:
        return
    rows = _received(forward_batch) + _take_captured()
    if rows:
        tensors[PROXY_KEY] = torch.cat(rows, dim=-1)


def stash(forward_batch: Any, proxy: Any) -> None:
    """Keep the previous stage's rows with the batch; dummy runs bring none."""
    if _Forward.enabled:
        setattr(forward_batch, _BATCH_ATTR, proxy.tensors.get(PROXY_KEY))


def merge(aux_hidden_states: Any, forward_batch: Any) -> Any:
    """Received rows in front of the last stage's own, for the logits processor.

    Raises:
        RuntimeError: both sides hold different numbers of tokens.
    """
    if not _Forward.enabled:
        return aux_hidden_states
    _Forward.captured = None
    received = _received(forward_batch)
    if not received:
        return aux_hidden_states
    if aux_hidden_states is None:
        own: list[torch.Tensor] = []
    elif isinstance(aux_hidden_states, torch.Tensor):
        own = [aux_hidden_states]
    else:
        own = list(aux_hidden_states)
    tokens = {part.shape[0] for part in received + own}
    if len(tokens) != 1:
        raise RuntimeError(
            f"Pipeline stages captured different token counts: {sorted(tokens)}."
        )
    return received + own


def _received(forward_batch: Any) -> list[torch.Tensor]:
    rows = getattr(forward_batch, _BATCH_ATTR, None)
    return [] if rows is None else [rows]


def _take_captured() -> list[torch.Tensor]:
    captured, _Forward.captured = _Forward.captured, None
    return [] if captured is None else list(captured)


# DeepSeek-V4 does not cross stages through the shared boundary and snapshots a layer
# behind it, so its rows are owned by the layer's own stage.


def keep_stage_layers(model: Any, layer_ids: list[int]) -> bool:
    """Divide a DeepSeek-V4 target's layers over the pipeline; False without one."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.pp_size <= 1 or layer_ids is None:
        return False
    inner = model.model
    owned = [i for i in layer_ids if inner.start_layer <= i < inner.end_layer]
    before = sum(1 for i in layer_ids if i < inner.start_layer)
    inner.dspark_layers_to_capture = owned if owned or before else None
    inner.dspark_received_layers = before
    model.capture_aux_hidden_states = parallel.pp_group.is_last_rank and bool(
        owned or before
    )
    setattr(model, _WIDTH_ATTR, before * int(model.config.hidden_size))
    return True


def start_packer(inner: Any, packer: Any, proxy: Any) -> Any:
    """The packer of a DeepSeek-V4 stage, with the received rows already in it.

    A dummy run's proxy brings no rows; zeros keep the packed width.
    """
    received = getattr(inner, "dspark_received_layers", 0)
    if packer is None or not received:
        return packer
    from sglang.srt.layers.aux_hidden_states import AuxHiddenStatePacker

    hidden = proxy["hidden_states"]
    rows = proxy.tensors.get(PROXY_KEY)
    if rows is None:
        rows = hidden.new_zeros(hidden.shape[0], received * inner.hidden_size)
    joined = AuxHiddenStatePacker(received + len(inner.dspark_layers_to_capture))
    joined.extend(rows.split(inner.hidden_size, dim=-1))
    return joined


def stage_output(hidden_states: torch.Tensor, packer: Any) -> Any:
    """A DeepSeek-V4 stage's output with its rows; ``hidden_states`` is flattened."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    return PPProxyTensors(
        {"hidden_states": hidden_states.flatten(1), PROXY_KEY: packer.finalize()}
    )
