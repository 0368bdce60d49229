"""Prefill's door: which decode messages the bootstrap thread may work on.

Life cycle: the bootstrap thread hands every message to `admit` right after receiving
it. A registration is judged by the agreement's rows, where that component is applied; a
refused decode is never added as a peer. A room's metadata from a refused or unregistered
decode fails that room, on both engines, with the reason. Everything else passes to
upstream's own handling; if that raises, `blame_prefill` undoes a half-made registration
or fails the room (see `control_thread_guard.py`).

Message layouts, after NIXL's guard frame is taken off: ``[room or "None", ip, port,
agent name or session id, ...]`` on both backends.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.control_thread_guard import note_message
from sglang.srt.disaggregation.common.early_rooms import EarlyRooms
from sglang.srt.disaggregation.common.log_limits import RateLimitedLog, may_say

try:
    from sglang.srt.disaggregation.common import peer_agreement as agreement
except ImportError:  # applied without the component that compares engines
    agreement = None

logger = logging.getLogger(__name__)

NIXL_GUARD = b"NixlMsgGuard"
REGISTRATION = b"None"
# Decode knows by this code that it must register again.
NOT_REGISTERED = "[PD-NOT-REGISTERED]"
_PASSED_ON = (b"WATERMARK", b"STAGING_RSP", b"BOOTSTRAP")
_POINTER_BYTES = 8
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
    except Exception as error:
        _malformed.record("Dropped a malformed message to prefill", error)
        return False


def _admit(manager: Any, message: list[bytes]) -> bool:
    tag = message[0]
    if tag in _PASSED_ON:
        return True
    if tag == b"ABORT":
        _note_early_abort(manager, message)
        return True
    if agreement is not None and tag == agreement.REFUSED_TAG:
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
    if may_say(manager, reason, in_full=1):
        logger.error("A decode engine does not accept this prefill; %s", reason)
    conclude_room(manager, room, reason)


def _admit_registration(manager, message, envelope: Envelope) -> bool:
    description = None
    if agreement is not None:
        description = agreement.take_description(message)
    agent = envelope.agent
    # What upstream's handling must be taken back to if it raises.
    manager.registering = (agent, manager.decode_kv_args_table.get(agent))
    rejections(manager).pop(agent, None)
    note_described(manager, agent, description is not None)
    if agreement is None:
        return True
    regions = _kv_regions(message)
    reason = agreement.refuse_decode(manager, agent, description, regions)
    if reason is None:
        return True
    reject(manager, agent, reason)
    return False


def _kv_regions(message: list[bytes]) -> int:
    """How many KV regions a registration holds.

    The pointers follow the agent's metadata on NIXL and the session id on Mooncake.
    """
    frames = body_of(message)
    pointers = frames[5] if frames is not message else frames[4]
    return len(pointers) // _POINTER_BYTES


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
            f"{NOT_REGISTERED} decode {envelope.agent} is not registered with this "
            "prefill (it may have been restarted); a decode with sglang-dspark-pd "
            "registers again at its next request, restart another",
            patched=False,
        )
    if rejected is not None:
        fail_room(manager, envelope, rejected.reason, rejected.patched)
        return False
    senders = manager.request_status
    for old in early_rooms(manager).metadata_without_request(room, senders):
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
    if _fail_open_room(manager, room, reason):
        return
    if not early_rooms(manager).remember(room, reason):
        # The scheduler may have opened it between the two questions.
        _fail_open_room(manager, room, reason)


def _fail_open_room(manager: Any, room: int, reason: str) -> bool:
    """False when the room has no sender (yet, or any more)."""
    if room not in manager.request_status:
        return False
    if manager.request_status.get(room) != KVPoll.Success:
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)
    return True


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
        if undo_registration(manager, envelope.agent):
            return  # it was a peer before this message and is one still
        reason = (
            f"[PD-REGISTRATION] registering decode {envelope.agent} failed: {error}"
        )
        reject(manager, envelope.agent, reason)
        return
    manager.transfer_infos.pop(int(envelope.room), None)
    reason = f"[PD-METADATA] handling decode's metadata failed: {error}"
    fail_room(manager, envelope, reason, is_described(manager, envelope.agent))


def undo_registration(manager: Any, agent: str) -> bool:
    """Remove what a registration that raised left behind, and nothing older.

    True when the agent had registered before: anybody can name it in a message.
    """
    table = manager.decode_kv_args_table
    registering, before = manager.__dict__.get("registering", (None, None))
    if registering == agent and before is not None:
        table[agent] = before
        return True
    known = table.pop(agent, None)
    for name in ("prep_handles", "prep_handles_slice_dst", "_prepared_state_plans"):
        getattr(manager, name, {}).pop(agent, None)
    remove = getattr(getattr(manager, "agent", None), "remove_remote_agent", None)
    if known is not None and remove is not None:
        try:
            remove(agent)
        except Exception as error:
            logger.debug("NIXL had no agent %s to remove: %s", agent, error)
    return False


def fail_chunk(manager: Any, chunk: Any, error: Exception) -> bool:
    """Fail the room of a transfer chunk that raised; False when there is no chunk.

    Takes with it what upstream's worker takes when it is done with a room. Its mark
    that the room may still be written to stays: no acknowledgment must be sent.
    """
    if chunk is None:
        return False
    reason = f"[PD-TRANSFER] sending KV failed: {type(error).__name__}: {error}"
    shown = error if may_say(manager, f"[PD-TRANSFER] {type(error).__name__}") else None
    logger.error("Room %s: %s", chunk.room, reason, exc_info=shown)
    manager.conclude_failure(bootstrap_room=chunk.room, failure_reason=reason)
    for name in ("transfer_infos", "req_to_decode_prefix_len", "_staging_outstanding"):
        getattr(manager, name, {}).pop(chunk.room, None)
    return True
