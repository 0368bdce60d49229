"""How many bytes a process moved, in one small JSON file.

``transfers-<pid>.json`` holds ``{"bytes_posted": int, "transfers": int}``. It is
replaced as a whole after every completed transfer, so a reader never sees half a
file and a killed process loses nothing but the transfer in flight.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

STATS_DIR_ENV = "SGLANG_CPU_REFERENCE_STATS_DIR"

_lock = threading.Lock()
_total = {"bytes_posted": 0, "transfers": 0}


class TransferStats:
    """Counts completed transfers; all of a process share the file and the total."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"transfers-{os.getpid()}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, moved: int) -> None:
        """Add a finished transfer of ``moved`` bytes and write the file."""
        with _lock:
            _total["bytes_posted"] += moved
            _total["transfers"] += 1
            partial = self._path.with_suffix(".tmp")
            partial.write_text(json.dumps(_total))
            os.replace(partial, self._path)


def asked_for() -> TransferStats | None:
    """Where this process shall count; None unless the environment names a directory."""
    directory = os.environ.get(STATS_DIR_ENV)
    return TransferStats(directory) if directory else None
