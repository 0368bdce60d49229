"""HiCache's host pools, copied by tensor indexing.

A host pool keeps all layers of a token together or all tokens of a layer,
depending on its layout; SGLang moves rows with one kernel per layout. Here every
layout is turned into a per-layer view ``[..., heads, head_dim]`` and rows are
indexed through it, so that all layouts and both I/O backends share one path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Host memory left alone when pools are sized; their layers are small here.
HOST_MEMORY_RESERVE_BYTES = 256 * 1024**2


def unpin(original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``HostKVCache.__init__``: there is no GPU to pin memory for."""
    call = inspect.signature(original).bind(pool, *args, **kwargs)
    call.arguments["pin_memory"] = False
    original(*call.args, **call.kwargs)


def device_buffers(pool: Any) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Keys and values of the device pool, one ``[slots, heads, dim]`` per layer."""
    if hasattr(pool, "device_k_buffers"):
        return pool.device_k_buffers, pool.device_v_buffers
    return pool.device_pool.k_buffer, pool.device_pool.v_buffer


def layer_view(buffer: torch.Tensor, layout: str, layer: int) -> torch.Tensor:
    """One layer of a host buffer, without copying.

    Args:
        buffer: keys or values of a host pool in ``layout``.
        layout: SGLang's ``--hicache-mem-layout``.
        layer: index of the layer in the pool.

    Returns:
        ``[tokens, heads, head_dim]`` or, for page layouts,
        ``[pages, page_size, heads, head_dim]``; writes reach the buffer.

    Raises:
        NotImplementedError: the layout has no per-layer view.
    """
    if layout == "layer_first":
        return buffer[layer]
    if layout in ("page_first", "page_first_direct"):
        return buffer[:, layer]
    if layout == "page_head":
        return buffer[:, :, :, layer].transpose(1, 2)
    raise NotImplementedError(
        f"cpu_reference does not copy the host layout {layout!r}. "
        f"Use --hicache-mem-layout layer_first, page_first or page_first_direct."
    )


def token_index(view: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The index of ``tokens`` (int64) in a view of :func:`layer_view`."""
    if view.dim() == 3:
        return (tokens,)
    page_size = view.shape[1]
    return (tokens // page_size, tokens % page_size)


def load_to_device_per_layer(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy host rows of one layer to the KV pool."""
    del device_pool, io_backend
    target_layers = getattr(self, "target_layer_num", self.layer_num)
    if not is_draft and not 0 <= layer_id < target_layers:
        return
    hosts = (self.k_buffer, self.v_buffer)
    for layers, host in zip(device_buffers(self), hosts, strict=True):
        view = layer_view(host, self.layout, layer_id)
        layers[layer_id][device_indices] = view[token_index(view, host_indices)]


def backup_from_device_all_layer(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str,
) -> None:
    """Copy KV pool rows of every layer to the host."""
    del device_pool, io_backend
    hosts = (self.k_buffer, self.v_buffer)
    for layers, host in zip(device_buffers(self), hosts, strict=True):
        for layer in range(self.layer_num):
            view = layer_view(host, self.layout, layer)
            view[token_index(view, host_indices)] = layers[layer][device_indices]
