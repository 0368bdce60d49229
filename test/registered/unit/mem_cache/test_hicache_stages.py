"""HiCache storage on a pipelined prefill: only the last stage has the draft's pool.

Each acknowledgement of a storage read is a reduction over all stages, so every stage
must make the same number of them.
"""

from __future__ import annotations

import sys
from queue import Queue
from types import SimpleNamespace

import pytest

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

DRAFT = PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)


def acknowledgements(transfers: list[PoolTransfer] | None) -> int:
    """Results that one stage exchanges for its extra pools after a read."""
    controller = object.__new__(HybridCacheController)
    controller.prefetch_sync_queue = Queue()
    operation = SimpleNamespace(
        pool_transfers=transfers, request_id="r", is_terminated=lambda: True
    )
    controller._page_transfer_sidecar(operation, 4)
    return controller.prefetch_sync_queue.qsize()


def test_a_draft_that_follows_the_target_adds_no_exchange():
    assert acknowledgements([DRAFT]) == acknowledgements(None) == 0


def test_a_pool_with_pages_of_its_own_is_still_exchanged():
    assert acknowledgements([PoolTransfer(PoolName.SWA), DRAFT]) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
