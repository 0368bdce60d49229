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

Prefill CUDA graphs are refused: they record a stage's body once, with a batch of their
own, and replay it without Python, so rows received later would never be read.
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
    """This stage's share, and the capture list of the one forward in progress."""

    enabled = False
    received_width = 0  # values per token of all earlier stages
    total_width = 0  # the same with this stage's own
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
        ValueError: the model's pipeline path is not one this module knows, or prefill
            runs as a CUDA graph.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.pp_size <= 1 or hasattr(model, "get_pp_proxy_dspark_hidden_size"):
        return False
    _refuse_prefill_graphs()
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
    hidden_size = int(model.config.hidden_size)
    setattr(model, _WIDTH_ATTR, before * hidden_size)
    _expect(before * hidden_size, (before + len(inner.layers_to_capture)) * hidden_size)
    return True


def _expect(received_width: int, total_width: int) -> None:
    _Forward.enabled = True
    _Forward.received_width, _Forward.total_width = received_width, total_width


def _refuse_prefill_graphs() -> None:
    from sglang.srt.runtime_context import get_exec

    backend = get_exec().graph.cuda_graph_config.prefill.backend
    if reason := graph_refusal(backend):
        raise ValueError(f"Capturing target layers cannot be combined with: {reason}.")


def graph_refusal(backend: str) -> str | None:
    """Why a prefill graph backend cannot serve a pipelined capture; None if it can."""
    if backend == "disabled":
        return None
    return (
        f"prefill CUDA graphs (backend {backend!r}) with --pp-size > 1, which replay a "
        "stage without the rows of earlier ones (set --cuda-graph-backend-prefill "
        "disabled)"
    )


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
    """Add received and own rows ``[tokens, n * hidden]`` to a stage's output.

    Raises:
        RuntimeError: this stage holds fewer or more layers than it was given.
    """
    if not _Forward.enabled:
        return
    rows = _received(forward_batch) + _take_captured()
    if tensors["hidden_states"].shape[0]:
        _check_width(rows)
    if rows:
        tensors[PROXY_KEY] = torch.cat(rows, dim=-1)


def stash(forward_batch: Any, proxy: Any) -> None:
    """Keep the previous stage's rows with the batch.

    A stage never sends a batch without its rows (``export`` checks), so a proxy that
    has none was made here for a dummy run; zeros keep the width.
    """
    if not _Forward.enabled or not _Forward.received_width:
        return
    rows = proxy.tensors.get(PROXY_KEY)
    if rows is None:
        hidden = proxy.tensors["hidden_states"]
        rows = hidden.new_zeros(hidden.shape[0], _Forward.received_width)
    setattr(forward_batch, _BATCH_ATTR, rows)


def merge(aux_hidden_states: Any, forward_batch: Any) -> Any:
    """Received rows in front of the last stage's own, for the logits processor.

    Raises:
        RuntimeError: both sides hold different numbers of tokens, or not all layers.
    """
    if not _Forward.enabled:
        return aux_hidden_states
    _Forward.captured = None
    if aux_hidden_states is None:
        own: list[torch.Tensor] = []
    elif isinstance(aux_hidden_states, torch.Tensor):
        own = [aux_hidden_states]
    else:
        own = list(aux_hidden_states)
    rows = _received(forward_batch) + own
    tokens = {part.shape[0] for part in rows}
    if len(tokens) > 1:
        raise RuntimeError(
            f"Pipeline stages captured different token counts: {sorted(tokens)}."
        )
    if tokens != {0} and not forward_batch.forward_mode.is_idle():
        _check_width(rows)
    return rows if _Forward.received_width else aux_hidden_states


def _check_width(rows: list[torch.Tensor]) -> None:
    # A draft of one layer would read final hidden states of equal width in their place.
    found = sum(part.shape[-1] for part in rows)
    if found != _Forward.total_width:
        raise RuntimeError(
            f"This pipeline stage holds {found} captured values a token, expected "
            f"{_Forward.total_width}, of which {_Forward.received_width} from earlier "
            "stages. Its body did not run on this batch, as under a CUDA graph, or a "
            "layer was not captured."
        )


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
