"""Hooks that SGLang asked before 0.5.22, answered with the same classes.

A newer SGLang never calls them. What an older release does not ask at all is
served by an adaptation that steps aside once the hook exists (``unless``).
"""

from __future__ import annotations


class OlderPlatformHooks:
    """The platform interface of 0.5.16 to 0.5.21, where it differs."""

    def get_mha_kv_pool_cls(self) -> type:
        from sglang_cpu_reference.kv_pool import ReferenceMHATokenToKVPool

        return ReferenceMHATokenToKVPool

    def get_paged_allocator_cls(self) -> type | None:
        """The in-tree allocator, which older releases want named.

        Theirs needs Triton for pages of several tokens. None, "the in-tree
        default", wherever the release understands it.
        """
        from sglang.srt.platforms.interface import SRTPlatform

        if hasattr(SRTPlatform, "get_kv_pool_cls"):
            return None
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator

    def support_cuda_graph(self) -> bool:
        return False

    def support_piecewise_cuda_graph(self) -> bool:
        return False
