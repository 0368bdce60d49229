"""What decode makes of prefill's messages, around upstream's own handling.

Life cycle: the thread that listens to prefills hands each message to
`note_prefill_message` right after receiving it. A message that says that prefill does
not know this decode makes the next request register again. If upstream's handling
raises, `blame_decode` fails the room of the message, whatever its kind (see
`control_thread_guard.py`).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.control_thread_guard import note_message
from sglang.srt.disaggregation.common.log_limits import RateLimitedLog
from sglang.srt.disaggregation.common.peer_admission import NOT_REGISTERED

# Messages that begin with their kind and go on with their room.
_TAGS_BEFORE_ROOM = (b"CHUNK_READY", b"AUX_DATA", b"STAGING_REQ", b"ABORT_ACK")
_log = RateLimitedLog()


def note_prefill_message(manager: Any, message: list[bytes] | None) -> None:
    """Remember the message for blame; see to it that a lost registration is renewed.

    None before each receive. Never raises for what a peer sent.
    """
    note_message(message)
    if not message:
        return
    try:
        room = _room_of_lost_registration(manager, message)
        if room is not None:
            _register_again(manager, room)
    except Exception as error:
        _log.record("A malformed message to decode", error)


def _room_of_lost_registration(manager: Any, message: list[bytes]) -> int | None:
    """The room of a status message by which prefill may say that it knows us no more.

    Mooncake's status has no reason for a peer that prefill does not know, so there any
    failure without one counts: to register twice is harmless.
    """
    tag = manager.kv_status_msg_tag
    if tag is not None and message[0] != tag:
        return None
    frames = message if tag is None else message[1:]
    if len(frames) < 3 or frames[0] in _TAGS_BEFORE_ROOM:
        return None
    if int(frames[1]) != int(KVPoll.Failed):
        return None
    reason = frames[3] if len(frames) > 3 else b""
    silent = not reason and not manager.kv_status_msg_carries_reason
    return int(frames[0]) if silent or NOT_REGISTERED.encode() in reason else None


def _register_again(manager: Any, room: int) -> None:
    """Forget the connection over which the room's prefill was registered with."""
    for address, rooms in list(manager.addr_to_rooms_tracker.items()):
        if room in rooms:
            with manager.connection_lock:
                pool = manager.connection_pool
                for key in [k for k in pool if k.startswith(f"{address}_")]:
                    del pool[key]


def blame_decode(manager: Any, message: list[bytes], error: Exception) -> None:
    """Fail the room of a prefill message whose handling raised."""
    if message[0] in _TAGS_BEFORE_ROOM:
        room = int(message[1])
    else:
        parsed = manager.parse_kv_status_message(message)
        if parsed is None:
            return
        room = parsed[0]
    if room in manager.request_status:
        reason = f"[PD-STATUS] handling prefill's message: {error}"
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)
