"""What an engine holds when it should hold nothing, and its memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_pd.bed import web
from dspark_pd.bed.errors import BedError

if TYPE_CHECKING:
    from dspark_pd.bed.bed import Engine

_POLL_S = 0.25


def holdings(engine: Engine) -> dict[str, int]:
    """Requests in any queue, and KV tokens in use that no cache could give up.

    Sums over the groups of an engine with data parallelism.
    """
    held: Counter[str] = Counter()
    for load in web.call(f"{engine.url}/v1/loads", timeout_s=10.0)["loads"]:
        for name, value in {**load["disaggregation"], **load["queues"]}.items():
            held[name] += value if isinstance(value, int) else 0
        for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"):
            held[name] += load[name]
    return {name: value for name, value in held.items() if value}


def empty_within(engine: Engine, timeout_s: float = 20.0) -> dict[str, int]:
    """What an engine still holds after its caches were emptied; {} when nothing."""
    held = {"busy": 1}
    end = time.monotonic() + timeout_s
    while held and time.monotonic() < end:
        with contextlib.suppress(BedError):  # it does not empty its caches while busy
            web.call(f"{engine.url}/flush_cache", {}, 10.0)
            held = holdings(engine)
        if held:
            time.sleep(_POLL_S)
    return held


def resident_mib(engine: Engine) -> float:
    """Memory of all processes of an engine."""
    pages = 0
    for pid in engine.pids():
        with contextlib.suppress(OSError):  # ended in the meantime
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
