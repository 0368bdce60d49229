"""SGLang attention backend ``cpu_reference``.

Life cycle: built once per model runner; :meth:`init_forward_metadata` lays out
each forward (which query rows, how many keys, which KV slots per request), then
every layer calls :meth:`forward`. Serves extend, mixed, decode, target verify and
the DSpark draft block, which is a target verify of the draft's own block whose
layers are encoder-only (every block position sees the whole block) unless the
draft's configuration makes them causal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang_cpu_reference.attention import NO_WINDOW, attend, visible_keys


@dataclass
class RequestSpan:
    """One request's part of a forward.

    Attributes:
        rows: its query rows in the flattened batch.
        key_len: keys it attends to, its own new ones included.
        slots: int64 ``[key_len]`` KV slots in position order.
        window_slots: the same in the sliding-window pool, if there is one.
    """

    rows: slice
    key_len: int
    slots: torch.Tensor
    window_slots: torch.Tensor | None
    masks: dict[tuple[bool, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, causal: bool, window_left: int) -> torch.Tensor | None:
        """The mask for a kind of layer, built once per forward."""
        kind = (causal, window_left)
        if kind not in self.masks:
            query_len = self.rows.stop - self.rows.start
            self.masks[kind] = visible_keys(
                query_len, self.key_len, causal=causal, window_left=window_left
            )
        return self.masks[kind]


@dataclass
class ForwardLayout:
    """What a forward's layers share: request spans and write slots."""

    spans: list[RequestSpan]
    window_write_slots: torch.Tensor | None


class ReferenceAttentionBackend(AttentionBackend):
    """Dense multi-head attention over SGLang's paged KV pool.

    Raises:
        NotImplementedError: the model needs a KV pool or an attention feature
            that this backend does not serve.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.pool = model_runner.token_to_kv_pool
        # Some models (Qwen3-MoE) ask the backend for the pool under this name.
        self.token_to_kv_pool = self.pool
        if not isinstance(self.pool, (MHATokenToKVPool, SWAKVPool)):
            raise NotImplementedError(
                f"cpu_reference attention serves multi-head KV pools; this model "
                f"uses {type(self.pool).__name__}. Use a model with plain "
                f"multi-head or grouped-query attention."
            )
        self.has_window_pool = (
            isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        )
        self.layout: ForwardLayout | None = None

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # What a padded row of attention data parallelism asks for.
    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        self.layout = None
        if mode.is_idle():
            return
        key_lens = forward_batch.seq_lens.tolist()
        query_lens = _query_lens(forward_batch, len(key_lens))
        if mode.is_target_verify():
            # A verify's seq_lens count the committed prefix only.
            key_lens = [k + q for k, q in zip(key_lens, query_lens, strict=True)]
        requests = forward_batch.req_pool_indices.tolist()
        self.layout = ForwardLayout(
            spans=self._spans(requests, query_lens, key_lens),
            window_write_slots=self._to_window(forward_batch.out_cache_loc),
        )

    def _spans(
        self, requests: list[int], query_lens: list[int], key_lens: list[int]
    ) -> list[RequestSpan]:
        spans, start = [], 0
        for request, query_len, key_len in zip(
            requests, query_lens, key_lens, strict=True
        ):
            slots = self.req_to_token[request, :key_len].to(torch.int64)
            rows = slice(start, start + query_len)
            spans.append(RequestSpan(rows, key_len, slots, self._to_window(slots)))
            start += query_len
        return spans

    def _to_window(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        if not self.has_window_pool or slots is None:
            return None
        return self.pool.translate_loc_from_full_to_swa(slots).to(torch.int64)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            q: ``[rows, heads * head_dim]``.
            k, v: new keys and values ``[rows, kv_heads, head_dim]``, or None when
                the layer reads what another one stored.

        Returns:
            ``[rows, heads * value_dim]``; rows past the last request are zero.
        """
        _refuse_unserved(layer, kwargs)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if self.layout is None:
            return out.flatten(1)
        new_rows = None
        if k is not None:
            if save_kv_cache:
                self._store(layer, forward_batch, k, v)
            else:
                new_rows = (k, v)
        self._attend_requests(
            q.view(q.shape[0], layer.tp_q_head_num, -1), out, layer, new_rows
        )
        return out.flatten(1)

    def _store(self, layer: Any, forward_batch: Any, k: Any, v: Any) -> None:
        window = self.layout.window_write_slots
        if hasattr(KVWriteLoc, "for_batch"):
            slots = KVWriteLoc.for_batch(forward_batch, swa_loc=window)
        else:
            slots = KVWriteLoc(forward_batch.out_cache_loc, window)
        self.pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)

    def _attend_requests(
        self, q: torch.Tensor, out: torch.Tensor, layer: Any, new_rows: Any
    ) -> None:
        keys = self.pool.get_key_buffer(layer.layer_id)
        values = self.pool.get_value_buffer(layer.layer_id)
        in_window_pool = (
            self.has_window_pool and self.pool.layers_mapping[layer.layer_id][1]
        )
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size
        window = NO_WINDOW if window is None or window < 0 else window
        for span in self.layout.spans:
            slots = span.window_slots if in_window_pool else span.slots
            key, value = keys[slots], values[slots]
            if new_rows is not None:
                fresh = span.rows.stop - span.rows.start
                key[-fresh:] = new_rows[0][span.rows].to(key.dtype)
                value[-fresh:] = new_rows[1][span.rows].to(value.dtype)
            out[span.rows] = attend(
                q[span.rows],
                key,
                value,
                scale=layer.scaling,
                mask=span.mask(causal, window),
            )


def _query_lens(forward_batch: Any, requests: int) -> list[int]:
    """New rows of each request in this forward.

    Raises:
        NotImplementedError: the mode's rows are not laid out per request.
    """
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return [1] * requests
    if mode.is_target_verify():
        return _verify_lens(forward_batch, requests)
    if forward_batch.extend_seq_lens is None:
        raise NotImplementedError(
            f"cpu_reference attention has no layout for forward mode {mode.name}"
        )
    return forward_batch.extend_seq_lens.tolist()


def _verify_lens(forward_batch: Any, requests: int) -> list[int]:
    rows = forward_batch.input_ids.shape[0]
    custom_mask = getattr(forward_batch.spec_info, "custom_mask", None)
    if rows % requests or custom_mask is not None:
        raise NotImplementedError(
            f"cpu_reference attention verifies chains of one length: {rows} rows for "
            f"{requests} requests, custom mask: {custom_mask is not None}. Use "
            f"SGLANG_RAGGED_VERIFY_MODE=static and --speculative-eagle-topk 1."
        )
    return [rows // requests] * requests


def _refuse_unserved(layer: Any, kwargs: dict[str, Any]) -> None:
    asked = sorted(name for name, value in kwargs.items() if value is not None)
    if layer.is_cross_attention:
        asked.append("cross attention")
    if layer.logit_cap:
        asked.append("logit cap")
    if asked:
        raise NotImplementedError(
            f"cpu_reference attention does not serve {', '.join(asked)} "
            f"(layer {layer.layer_id})"
        )
