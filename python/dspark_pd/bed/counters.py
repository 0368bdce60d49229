"""Bytes that engines moved, read from what the CPU reference platform writes down.

Each rank of an engine keeps `transfers-<pid>.json` in the directory named by
`SGLANG_CPU_REFERENCE_STATS_DIR`, replaced whole after every transfer that it completed.
"""

from __future__ import annotations

import json
from pathlib import Path


def bytes_posted(stats_dir: Path) -> int:
    """Sum of `bytes_posted` over all ranks; 0 when nothing was ever posted."""
    total = 0
    for path in sorted(stats_dir.glob("transfers-*.json")):
        total += int(json.loads(path.read_text())["bytes_posted"])
    return total
