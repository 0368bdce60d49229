"""KV pools that store, move and copy rows by tensor indexing.

The platform hands the class to SGLang's pool configurator (``get_kv_pool_cls``);
layout, addressing and registration for transfers stay SGLang's own.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class ReferenceMHATokenToKVPool(MHATokenToKVPool):
    """``MHATokenToKVPool`` without Triton kernels."""

    def _init_kv_copy_and_warmup(self) -> None:
        # There is no kernel to tile or to warm up; moves index rows.
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the rows ``src_loc`` onto ``tgt_loc`` in every layer.

        Gathers before it writes, so overlapping source and target are safe.
        """
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]

    def set_kv_buffer_prefix_valid(
        self,
        layer: Any,
        loc_2d: torch.Tensor,
        commit_lens: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Store the first ``commit_lens[i]`` rows of each request's window.

        Args:
            loc_2d: ``[batch, window]`` KV slots.
            commit_lens: ``[batch]`` rows of each window that count.
            cache_k, cache_v: ``[batch * window, heads, head_dim]``.
        """
        window = loc_2d.shape[1]
        columns = torch.arange(window, device=loc_2d.device)
        keep = (columns < commit_lens.view(-1, 1)).view(-1)
        self.set_kv_buffer(
            layer,
            loc_2d.reshape(-1)[keep],
            cache_k.view(-1, *cache_k.shape[-2:])[keep],
            cache_v.view(-1, *cache_v.shape[-2:])[keep],
            k_scale,
            v_scale,
        )
