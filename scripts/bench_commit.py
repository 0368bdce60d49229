#!/usr/bin/env python3
"""What committing requests with a tail costs decode's scheduler thread.

    scripts/bench_commit.py [--requests N] [--rounds N]

N requests finish their transfer in one poll, with tails of Qwen3-8B's shape (5 layers of
4096 values in bfloat16, 127 tokens). Prints the time that `check_tails` and `hold_tail`
take for all of them, and that of a copy of their hidden states from host memory to host
memory, which a commit made before slots were held. One thread, as SGLang sets torch;
medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

PROMPT = 500


def request(slot: int) -> SimpleNamespace:
    return SimpleNamespace(
        rid=str(slot),
        origin_input_ids=[0] * PROMPT,
        metadata_buffer_index=slot,
        bootstrap_room=slot + 1,
        kv=SimpleNamespace(req_pool_idx=slot, holds_kv=True),
    )


def qwen3_8b() -> Any:
    import torch

    from sglang.srt.speculative.dspark_components.dspark_handoff import TailSpec

    return TailSpec(
        layer_ids=(1, 9, 17, 25, 33),
        hidden_size=4096,
        dtype=torch.bfloat16,
        tail_tokens=127,
        window_need=127,
    )


def seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(shape: Any, count: int, rounds: int) -> tuple[float, float]:
    """Median seconds of `count` commits, and of a copy of their hidden states."""
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.speculative.dspark_components import (
        dspark_handoff_decode as decode,
    )
    from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails
    from sglang.srt.speculative.dspark_components.dspark_handoff import activate

    tail, slots = tails.TailBuffer(shape, count), tails.TailSlots(count)
    tail.storage.random_(0, 100)
    activate(tail=tail, draft=decode.Draft(None, shape), slots=slots)
    requests = [request(slot) for slot in range(count)]
    queue = [
        SimpleNamespace(req=req, metadata_buffer_index=slot)
        for slot, req in enumerate(requests)
    ]

    def commit() -> None:
        decode.check_tails([int(KVPoll.Success)] * count, queue)
        for decode_req in queue:
            decode.hold_tail(decode_req)

    def copy() -> None:
        for slot in range(count):
            tail.hidden_states[slot].clone()

    committed, copied = [], []
    for _ in range(rounds):
        for slot, req in enumerate(requests):
            tail._filled[slot] = tails._Filled(req.rid, PROMPT)
            tail.finish(req)
        committed.append(seconds(commit))
        assert all(req.dspark_tail.hidden_states is not None for req in requests)
        slots.give_back(list(range(count)), None)
        copied.append(seconds(copy))
    return statistics.median(committed), statistics.median(copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    os.environ.setdefault("SGLANG_PLATFORM", "cpu_reference")
    import torch

    torch.set_num_threads(1)
    shape = qwen3_8b()
    commit, copy = measure(shape, options.requests, options.rounds)
    print(f"{options.requests} requests, {shape.slot_bytes / (1 << 20):.2f} MiB each")
    print(f"commit: {1e3 * commit:.2f} ms")
    print(f"copy on the host, no longer made: {1e3 * copy:.1f} ms")
    print(f"with the copy / without: {(commit + copy) / commit:.0f}")


if __name__ == "__main__":
    main()
