"""What a prefill engine learns about a room before, or instead of, its request.

The router sends a request to both engines at once, so decode's refusal or abort may
reach prefill before prefill has a sender for the room. Upstream drops such a message
and prefill then holds the request for its bootstrap timeout (300 s). `EarlyRooms`
remembers the verdict, bounded in number and age, until the sender is created. It also
remembers rooms whose metadata came without a request, so that they do not stay for ever.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Container


class EarlyRooms:
    """Thread-safe; the control thread writes, the scheduler thread reads.

    Args:
        max_rooms: bound of each of the three memories; the oldest entry goes first.
        max_age_s: verdicts and metadata older than this are dropped.
    """

    def __init__(self, max_rooms: int = 8192, max_age_s: float = 300.0) -> None:
        self._max_rooms = max_rooms
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[int, tuple[float, str]] = OrderedDict()
        self._opened: OrderedDict[int, None] = OrderedDict()
        self._unclaimed: OrderedDict[int, float] = OrderedDict()

    def remember(self, room: int, reason: str) -> bool:
        """Keep `reason` for a sender still to come; False when the room had one.

        A room that was opened before is over: its verdict must not hit a later request
        that reuses the number.
        """
        now = time.monotonic()
        with self._lock:
            if room in self._opened:
                return False
            self._verdicts[room] = (now, reason)
            self._verdicts.move_to_end(room)
            while self._verdicts and self._is_old(next(iter(self._verdicts)), now):
                self._verdicts.popitem(last=False)
            return True

    def _is_old(self, room: int, now: float) -> bool:
        too_many = len(self._verdicts) > self._max_rooms
        return too_many or now - self._verdicts[room][0] > self._max_age_s

    def open(self, room: int) -> str | None:
        """Note that the room has its sender; returns the verdict that came early."""
        now = time.monotonic()
        with self._lock:
            self._unclaimed.pop(room, None)
            self._opened[room] = None
            self._opened.move_to_end(room)
            while len(self._opened) > self._max_rooms:
                self._opened.popitem(last=False)
            when, reason = self._verdicts.pop(room, (0.0, None))
        return reason if reason and now - when <= self._max_age_s else None

    def metadata_without_request(self, room: int, senders: Container[int]) -> list[int]:
        """Note metadata of a room; returns rooms without sender to forget now.

        Args:
            senders: rooms that have their sender; asked under the lock, so that a
                sender that comes meanwhile finds the note and takes it back.
        """
        now = time.monotonic()
        forget = []
        with self._lock:
            if room not in senders:
                self._unclaimed.setdefault(room, now)
            while self._unclaimed:
                oldest, since = next(iter(self._unclaimed.items()))
                if (
                    len(self._unclaimed) <= self._max_rooms
                    and now - since <= 2 * self._max_age_s
                ):
                    break
                self._unclaimed.popitem(last=False)
                forget.append(oldest)
        return forget

    def sizes(self) -> tuple[int, int, int]:
        """(verdicts, opened rooms, unclaimed rooms), for tests and debugging."""
        with self._lock:
            return len(self._verdicts), len(self._opened), len(self._unclaimed)
