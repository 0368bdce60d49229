"""Prefill's door: which decode messages the bootstrap thread may work on.

Life cycle: the bootstrap thread hands every message to `admit` right after receiving
it. A registration is judged by the agreement's rows; a refused decode is never added as
a peer. A room's metadata from a refused or unregistered decode fails that room, on both
engines, with the reason. Everything else passes to upstream's own handling; if that
raises, `blame_prefill` undoes a half-made registration or fails the room (see
`control_thread_guard.py`).

Message layouts, after NIXL's guard frame is taken off: ``[room or "None", ip, port,
agent name or session id, ...]`` on both backends.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.control_thread_guard import (
    RateLimitedLog,
    note_message,
)
from sglang.srt.disaggregation.common.early_rooms import EarlyRooms
from sglang.srt.disaggregation.common.peer_agreement import (
    FRAME_MAGIC,
    REFUSED_TAG,
    judge,
    own_description,
    say_once,
)
from sglang.srt.disaggregation.common.peer_agreement_table import (
    REFUSE,
    UNPATCHED,
    Description,
)

logger = logging.getLogger(__name__)

NIXL_GUARD = b"NixlMsgGuard"
REGISTRATION = b"None"
_PASSED_ON = (b"WATERMARK", b"STAGING_RSP", b"BOOTSTRAP")
_POINTER_BYTES = 8
_MAX_FRAME_BYTES = 65536
_MAX_REJECTIONS = 4096
_MAX_NAME = 256
_MAX_REASON = 2048
_ANSWERS_PER_S = 200
_ANSWER_LINGER_MS = 2000
_malformed = RateLimitedLog()


class Rejected(NamedTuple):
    """Why a decode is no peer, and whether it understands a reason frame."""

    reason: str
    patched: bool


class Envelope(NamedTuple):
    """The frames every decode message starts with, decoded."""

    room: str
    endpoint: str
    port: int
    agent: str

    @classmethod
    def read(cls, message: list[bytes]) -> Envelope:
        """Raises ValueError (or a subclass) when the frames are not what they must be."""
        frames = body_of(message)
        if len(frames) < 4:
            raise ValueError(f"{len(frames)} frames, at least 4 expected")
        room, endpoint, port, agent = (frame.decode("ascii") for frame in frames[:4])
        if len(agent) > _MAX_NAME or len(endpoint) > _MAX_NAME:
            raise ValueError(f"a name of {max(len(agent), len(endpoint))} characters")
        return cls(room, endpoint, int(port), agent)


def body_of(message: list[bytes]) -> list[bytes]:
    """The message without NIXL's guard frame."""
    return message[1:] if message and message[0] == NIXL_GUARD else message


def early_rooms(manager: Any) -> EarlyRooms:
    """The manager's memory of rooms without a request, made on first use."""
    rooms = manager.__dict__.get("early_rooms")
    if rooms is None:
        rooms = manager.__dict__.setdefault(
            "early_rooms",
            EarlyRooms(max_age_s=float(getattr(manager, "bootstrap_timeout", 300))),
        )
    return rooms


def rejections(manager: Any) -> OrderedDict[str, Rejected]:
    """Refused decodes by agent name or session id, bounded."""
    return manager.__dict__.setdefault("peer_rejections", OrderedDict())


def admit(manager: Any, message: list[bytes] | None) -> bool:
    """True when the bootstrap thread may go on with `message`.

    None (a receive that timed out) and malformed messages are not admitted. Never
    raises for what a peer sent.
    """
    note_message(message)
    if not message:
        return False
    try:
        return _admit(manager, message)
    except (ValueError, IndexError) as error:
        _malformed.record("Dropped a malformed message to prefill", error)
        return False


def _admit(manager: Any, message: list[bytes]) -> bool:
    tag = message[0]
    if tag in _PASSED_ON:
        return True
    if tag == b"ABORT":
        _note_early_abort(manager, message)
        return True
    if tag == REFUSED_TAG:
        _take_refusal(manager, message)
        return False
    envelope = Envelope.read(message)
    if body_of(message)[0] == REGISTRATION:
        return _admit_registration(manager, message, envelope)
    return _admit_room(manager, message, envelope)


def _note_early_abort(manager: Any, message: list[bytes]) -> None:
    room = int(message[1])
    if room not in manager.request_status:
        early_rooms(manager).remember(
            room, "Aborted by decode before prefill had the request."
        )


def _take_refusal(manager: Any, message: list[bytes]) -> None:
    """Decode refused this prefill: fail the room with decode's reason."""
    room = int(message[1])
    reason = (
        "refused by decode: "
        + message[2].decode("utf-8", errors="replace")[:_MAX_REASON]
    )
    _log_refusal_once(manager, reason)
    conclude_room(manager, room, reason)


def _log_refusal_once(manager: Any, reason: str) -> None:
    said = manager.__dict__.setdefault("refusals_said", set())
    if reason not in said and len(said) < 1024:
        said.add(reason)
        logger.error("A decode engine does not accept this prefill; %s", reason)


def _admit_registration(manager, message, envelope: Envelope) -> bool:
    theirs = take_description(message)
    ours = own_description(manager)
    rejections(manager).pop(envelope.agent, None)
    note_described(manager, envelope.agent, theirs is not None)
    if ours is None:
        return True
    if theirs is None:
        theirs = _unpatched_decode(message)
    verdicts = judge(decode=theirs, prefill=ours)
    say_once(manager, f"decode {envelope.agent}", verdicts)
    if verdicts and verdicts[0].severity == REFUSE:
        reject(manager, envelope.agent, verdicts[0].text)
        return False
    return True


def take_description(message: list[bytes]) -> Description | None:
    """Remove decode's description from a registration; None when there is none.

    Raises ValueError for a frame that claims to be one and is not.
    """
    for index in range(len(message) - 1, 3, -1):
        if message[index].startswith(FRAME_MAGIC):
            frame = message.pop(index)
            if len(frame) > _MAX_FRAME_BYTES:
                raise ValueError(f"a description of {len(frame)} bytes")
            description = json.loads(frame[len(FRAME_MAGIC) :])
            if not isinstance(description, dict):
                raise ValueError("a description that is not an object")
            return description
    return None


def _unpatched_decode(message: list[bytes]) -> Description:
    """What a registration without description shows anyway: how many KV regions.

    The pointers follow the agent's metadata on NIXL and the session id on Mooncake.
    """
    frames = body_of(message)
    pointers = frames[5] if frames is not message else frames[4]
    return {**UNPATCHED, "kv_entries": len(pointers) // _POINTER_BYTES}


def note_described(manager: Any, agent: str, described: bool) -> None:
    """Remember which registered decodes run this agreement, bounded."""
    agents = manager.__dict__.setdefault("described_agents", OrderedDict())
    agents.pop(agent, None)
    if described:
        agents[agent] = None
    while len(agents) > _MAX_REJECTIONS:
        agents.popitem(last=False)


def is_described(manager: Any, agent: str) -> bool:
    return agent in manager.__dict__.get("described_agents", ())


def reject(manager: Any, agent: str, reason: str) -> None:
    """Remember a refused decode; the oldest of too many is forgotten."""
    rejected = rejections(manager)
    rejected[agent] = Rejected(reason, is_described(manager, agent))
    while len(rejected) > _MAX_REJECTIONS:
        rejected.popitem(last=False)


def _admit_room(manager, message, envelope: Envelope) -> bool:
    room = int(envelope.room)
    rejected = rejections(manager).get(envelope.agent)
    if rejected is None and envelope.agent not in manager.decode_kv_args_table:
        rejected = Rejected(
            f"[PD-NOT-REGISTERED] decode {envelope.agent} is not registered with this "
            "prefill (it may have been restarted); the next request registers again",
            patched=False,
        )
    if rejected is not None:
        fail_room(manager, envelope, rejected.reason, rejected.patched)
        return False
    for old in early_rooms(manager).metadata_without_request(room):
        forget_room(manager, old)
    return True


def fail_room(manager, envelope: Envelope, reason: str, patched: bool) -> None:
    """Fail one room on this engine and tell its decode why.

    A reason is sent only where the receiver is known to accept one: Mooncake's status
    message has none, and older releases unpack it strictly.
    """
    room = int(envelope.room)
    conclude_room(manager, room, reason)
    parts = manager._encode_kv_status_message(
        bootstrap_room=room, status=KVPoll.Failed, failure_reason=reason
    )
    if patched and not manager.kv_status_msg_carries_reason:
        parts.append(reason.encode("utf-8"))
    answer(manager, envelope, parts)


def answer(manager: Any, envelope: Envelope, parts: list[bytes]) -> None:
    """Send to the address in a message, without trusting that it exists.

    A socket of its own, closed at once with a short linger, and a bound per second:
    made-up addresses can neither block the control thread nor pile up sockets.
    """
    from sglang.srt.utils.network import NetworkAddress

    second, sent = manager.__dict__.get("answers_sent", (0, 0))
    now = int(time.monotonic())
    sent = sent + 1 if second == now else 1
    manager.__dict__["answers_sent"] = (now, sent)
    if sent > _ANSWERS_PER_S:
        return
    address = NetworkAddress(envelope.endpoint, envelope.port)
    socket = manager._zmq_ctx.socket(zmq.PUSH)
    try:
        socket.setsockopt(zmq.LINGER, _ANSWER_LINGER_MS)
        socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
        socket.connect(address.to_tcp())
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        _malformed.record(f"Decode at {address.to_tcp()} could not be told", error)
    finally:
        socket.close()


def conclude_room(manager: Any, room: int, reason: str) -> None:
    """Fail a room that has its sender; remember the verdict for one that has none."""
    if room in manager.request_status:
        if manager.request_status.get(room) != KVPoll.Success:
            manager.record_failure(room, reason)
            manager.update_status(room, KVPoll.Failed)
        return
    early_rooms(manager).remember(room, reason)


def adopt_early_verdict(sender: Any) -> None:
    """Fail a new sender whose room decode gave up before the sender existed."""
    manager, room = sender.kv_mgr, sender.bootstrap_room
    reason = early_rooms(manager).open(room)
    if reason is not None:
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)


def forget_room(manager: Any, room: int) -> None:
    """Drop what metadata left of a room for which no request ever came.

    Metadata makes upstream open the room (as ready for input) before its request.
    """
    manager.transfer_infos.pop(room, None)
    manager.req_to_decode_prefix_len.pop(room, None)
    manager.request_status.pop(room, None)
    with manager.failure_lock:
        manager.failure_records.pop(room, None)


# -- when upstream's handling raises --------------------------------------------------


def blame_prefill(manager: Any, message: list[bytes], error: Exception) -> None:
    """Make the peer or room of a message pay for the error it caused, nobody else."""
    if message[0] in _PASSED_ON or message[0] == b"ABORT":
        return
    envelope = Envelope.read(message)
    if body_of(message)[0] == REGISTRATION:
        undo_registration(manager, envelope.agent)
        reason = (
            f"[PD-REGISTRATION] registering decode {envelope.agent} failed: {error}"
        )
        reject(manager, envelope.agent, reason)
        return
    manager.transfer_infos.pop(int(envelope.room), None)
    reason = f"[PD-METADATA] handling decode's metadata failed: {error}"
    fail_room(manager, envelope, reason, is_described(manager, envelope.agent))


def undo_registration(manager: Any, agent: str) -> None:
    """Remove what a registration that raised left behind."""
    known = manager.decode_kv_args_table.pop(agent, None)
    for name in ("prep_handles", "prep_handles_slice_dst", "_prepared_state_plans"):
        getattr(manager, name, {}).pop(agent, None)
    remove = getattr(getattr(manager, "agent", None), "remove_remote_agent", None)
    if known is not None and remove is not None:
        try:
            remove(agent)
        except Exception as error:
            logger.debug("NIXL had no agent %s to remove: %s", agent, error)


def blame_decode(manager: Any, message: list[bytes], error: Exception) -> None:
    """Fail the room of a prefill status message whose handling raised."""
    parsed = manager.parse_kv_status_message(message)
    if parsed is None or parsed[0] not in manager.request_status:
        return
    manager.record_failure(parsed[0], f"[PD-STATUS] handling prefill's status: {error}")
    manager.update_status(parsed[0], KVPoll.Failed)


def fail_chunk(manager: Any, chunk: Any, error: Exception) -> bool:
    """Fail the room of a transfer chunk that raised; False when there is no chunk."""
    if chunk is None:
        return False
    reason = f"[PD-TRANSFER] sending KV failed: {type(error).__name__}: {error}"
    logger.error("Room %s: %s", chunk.room, reason, exc_info=error)
    manager.conclude_failure(bootstrap_room=chunk.room, failure_reason=reason)
    return True
