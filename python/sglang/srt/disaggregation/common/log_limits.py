"""Bounds on what a peer can make this engine write to its log.

Peers are told apart by names that they choose themselves, so "once per peer" is no
bound: what is counted here is lines, by subject.
"""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger(__name__)

# Log every error up to here, then one per LOG_INTERVAL_S: a peer that keeps sending
# garbage must not fill the disk.
LOGGED_IN_FULL = 20
LOG_INTERVAL_S = 10.0
_MAX_SUBJECTS = 4096


class RateLimitedLog:
    """Logs the first errors in full, then one line per interval with a count."""

    def __init__(self) -> None:
        self._count = 0
        self._skipped = 0
        self._last = 0.0

    def record(self, text: str, error: Exception) -> None:
        """Log `text` with the error's traceback, or count it."""
        self._count += 1
        now = time.monotonic()
        if self._count <= LOGGED_IN_FULL:
            logger.error(text, exc_info=error)
        elif now - self._last >= LOG_INTERVAL_S:
            logger.error("%s: %s (%d more not shown)", text, error, self._skipped)
            self._last, self._skipped = now, 0
        else:
            self._skipped += 1


def may_say(manager: Any, subject: str, in_full: int = LOGGED_IN_FULL) -> bool:
    """Whether a line about `subject` may be logged: the first ones, then a few.

    Never silent for good, so that a new peer is named sooner or later.
    """
    counts = manager.__dict__.setdefault("peer_lines", {})
    if subject not in counts and len(counts) >= _MAX_SUBJECTS:
        counts.clear()
    count, last = counts.get(subject, (0, 0.0))
    now = time.monotonic()
    if count >= in_full and now - last < LOG_INTERVAL_S:
        return False
    counts[subject] = (count + 1, now)
    return True
