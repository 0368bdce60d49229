"""Environment defaults that stand for a device property no platform hook asks.

Applied once per process at activation, before torch looks for a GPU; children
inherit them. A value the user has set is kept, except for the GPU mask: a
process that named this platform must not find a GPU beside it.
"""

from __future__ import annotations

import os

DEFAULTS = {
    # The radix-hit early send of a prefill engine builds a CUDA event.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
    # KV moves as tensor indexing instead of a Triton kernel.
    "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
    # NIXL's wheel brings its own libibverbs and libnl, and UCX's EFA module loads the
    # system's beside them where rdma-core is installed. The two crash each other at exit
    # (https://github.com/ai-dynamo/nixl/pull/1929). No transfer here needs RDMA.
    "UCX_MODULES": "^ib",
    # Mooncake looks for RDMA devices and SGLang chooses one; there is none, and host
    # memory moves over TCP.
    "MC_FORCE_TCP": "1",
}


def apply() -> None:
    """Set the defaults in this process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def thread_binding(ranks: int, cores: int | None = None) -> str:
    """One core per rank, wrapping around, in SGLang's binding format.

    Args:
        ranks: scheduler processes of the engine (dp x tp x pp), at least 1.
        cores: cores to share; by default those this process may run on.

    Returns:
        For example ``"0|1|0|1"`` for 4 ranks on cores 0 and 1.
    """
    ids = sorted(os.sched_getaffinity(0)) if cores is None else range(cores)
    return "|".join(str(ids[rank % len(ids)]) for rank in range(ranks))
