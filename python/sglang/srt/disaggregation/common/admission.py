"""What a KV manager does with its peers' messages around SGLang's own handling.

Life cycle: `guard_socket` gives each manager one handler for its role when its socket
is made; the socket shows it every message (see `control_threads.py`).

Prefill (`PrefillAdmission`): a registration passes the readers of its trailing frames.
A room's metadata from a decode that was refused or is not registered fails that room on
both engines, with the reason. What decode says about a room before its request is
here waits for the request. When prefill refuses or fails a room, decodes that asked for
it get the reason, and one that asks later gets it at once. If SGLang's handling of a
registration raises, it is undone, and the rooms of that decode fail with the reason.

Decode (`DecodeAdmission`): when prefill says that it does not know this decode, the next
request registers again.

Message layouts of decode, after NIXL's guard frame: ``[room or "None", ip, port, agent
name or session id, ...]`` on both backends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.control_threads import (
    GuardedSocket,
    end_engine,
    log_once,
    should_log,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
    from sglang.srt.disaggregation.mooncake.conn import TransferKVChunk
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Decode refuses a room of this prefill: ``[ROOM_REFUSED, room, reason]``.
ROOM_REFUSED = b"ROOM_REFUSED"
# This prefill refused or failed a room: ``[ROOM_ENDED, room, reason]``, to its own
# control thread, which alone knows the decodes that asked for the room.
ROOM_ENDED = b"ROOM_ENDED"
# Decode knows by this code that it must register again.
NOT_REGISTERED = "[PD-NOT-REGISTERED]"
# An engine answers 400 by this code, in place of 500: the other one refused what the
# client sent. Routers send a request again after 500, and count it against the engine.
BAD_REQUEST = "[PD-BAD-REQUEST]"

# Readers of trailing frames of a registration, each called with the manager and the
# message. A reader may take its frame off the message, and returns why the decode is
# refused, or None.
registration_readers: list[
    Callable[["CommonKVManager", list[bytes]], "str | None"]
] = []

_NIXL_GUARD = b"NixlMsgGuard"
_ABORT = b"ABORT"
_ROOM_NEWS = (_ABORT, ROOM_REFUSED, ROOM_ENDED)
_REGISTRATION = "None"
# Messages of prefill that begin with their kind and go on with their room.
_KINDS_BEFORE_ROOM = (b"CHUNK_READY", b"AUX_DATA", b"STAGING_REQ", b"ABORT_ACK")
_MAX_ROOMS = 8192
_ANSWER_LINGER_MS = 1000
# From a scheduler's error to its end, for what it has to tell its peers.
_EXIT_DELAY_S = 0.5


def guard_socket(manager: CommonKVManager) -> None:
    """Give a new manager the handler of its role, and its socket to that."""
    if manager.disaggregation_mode == DisaggregationMode.PREFILL:
        manager.admission = PrefillAdmission(manager)
    else:
        manager.admission = DecodeAdmission(manager)
    GuardedSocket.guard(manager, manager.admission)


class Envelope(NamedTuple):
    """The frames every decode message about a room or a registration starts with."""

    room: int | None  # None for a registration
    endpoint: str
    port: int
    decode: str  # agent name (NIXL) or session id (Mooncake)

    @classmethod
    def read(cls, message: list[bytes]) -> Envelope | None:
        """None for messages of another kind or layout."""
        frames = message[1:] if message[:1] == [_NIXL_GUARD] else message
        try:
            room, endpoint, port, decode = (f.decode("ascii") for f in frames[:4])
            number = None if room == _REGISTRATION else int(room)
            return cls(number, endpoint, int(port), decode)
        except ValueError:
            return None


class RecentRooms(OrderedDict):
    """Something by room, for the latest rooms."""

    def __setitem__(self, room: int, value: object) -> None:
        super().__setitem__(room, value)
        while len(self) > _MAX_ROOMS:
            self.popitem(last=False)


@dataclasses.dataclass
class PrefillAdmission:
    """Prefill's `MessageHandler`; the control thread writes, the scheduler reads.

    Args:
        refused: why decodes are refused, by agent name or session id.
        verdicts: of rooms whose request has not arrived: why it will fail, and since
            when.
        opened: rooms whose request has arrived; a verdict that comes after the request
            must not fail a later request with the same room number.
        asked: who sent metadata for a room; of the control thread alone.
        ended: why this prefill refused or failed a room, and since when.
    """

    manager: CommonKVManager
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    verdicts: RecentRooms = dataclasses.field(default_factory=RecentRooms)
    opened: RecentRooms = dataclasses.field(default_factory=RecentRooms)
    asked: RecentRooms = dataclasses.field(default_factory=RecentRooms)
    ended: RecentRooms = dataclasses.field(default_factory=RecentRooms)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def admits(self, message: list[bytes]) -> bool:
        """False for news of a room, and for messages of a refused or unregistered decode."""
        if message[0] in _ROOM_NEWS and len(message) > 1:
            return self._admits_news(*message[:3])
        envelope = Envelope.read(message)
        if envelope is None:
            return True
        if envelope.room is None:
            return self._admits_registration(message, envelope.decode)
        return self._admits_metadata(envelope)

    def on_error(self, message: list[bytes], error: Exception) -> None:
        """Undo the registration, or fail the room, that raised in SGLang's handling."""
        envelope = Envelope.read(message)
        if envelope is None:
            return
        if envelope.room is None:
            self.refused[envelope.decode] = (
                f"[PD-REGISTRATION] registering decode {envelope.decode} failed: {error}. "
                "Give both engines the same model, draft and parallel sizes."
            )
            self._undo_registration(envelope.decode)
            return
        self.manager.transfer_infos.pop(envelope.room, None)
        self._fail_on_both(
            envelope,
            f"[PD-METADATA] handling decode's metadata failed: {error}. Run the same "
            "build of SGLang on both engines.",
        )

    def _admits_news(self, kind: bytes, room: bytes, text: bytes = b"") -> bool:
        """Take what is said of a room; True for an abort, on which SGLang works too."""
        number, reason = int(room), text.decode("utf-8", errors="replace")
        asked = self.asked.pop(number, [])
        if kind == _ABORT:
            if number not in self.manager.request_status:
                self.fail_room(number, "Aborted by decode before it got here")
            return True
        if kind == ROOM_REFUSED:
            reason = "refused by decode: " + reason
            if BAD_REQUEST not in reason:
                log_once(
                    logger.error, f"A decode engine refuses this prefill: {reason}"
                )
            self.fail_room(number, reason)
        else:
            self.ended[number] = (reason, time.monotonic())
            for envelope in asked:
                self._tell(envelope, reason)
        return False

    def _admits_registration(self, message: list[bytes], decode: str) -> bool:
        self.refused.pop(decode, None)
        for reader in registration_readers:
            reason = reader(self.manager, message)
            if reason is not None:
                log_once(logger.error, f"Refusing decode {decode}: {reason}")
                self.refused[decode] = reason
                return False
        return True

    def _admits_metadata(self, envelope: Envelope) -> bool:
        ended = self._fresh(self.ended.get(envelope.room))
        if ended is not None:
            self._tell(envelope, ended)
            return False
        reason = self.refused.get(envelope.decode)
        if reason is None:
            if envelope.decode in self.manager.decode_kv_args_table:
                asked = self.asked.get(envelope.room, [])
                self.asked[envelope.room] = [*asked, envelope]
                return True
            reason = (
                f"{NOT_REGISTERED} decode {envelope.decode} is not registered with this "
                "prefill, which may have been restarted. Send the request again: decode "
                "registers at its next request."
            )
        self._fail_on_both(envelope, reason)
        return False

    def _fail_on_both(self, envelope: Envelope, reason: str) -> None:
        self.fail_room(envelope.room, reason)
        self._tell(envelope, reason)

    def _tell(self, envelope: Envelope, reason: str) -> None:
        """Fail a room on the decode that asked for it.

        Over a socket of its own: SGLang keeps one for each address for ever, and a
        refused decode may be gone.
        """
        manager = self.manager
        parts = manager._encode_kv_status_message(
            bootstrap_room=envelope.room, status=KVPoll.Failed, failure_reason=reason
        )
        if not manager.kv_status_msg_carries_reason:  # decode reads it all the same
            parts.append(reason.encode("utf-8"))
        address = NetworkAddress(envelope.endpoint, envelope.port)
        with manager._zmq_ctx.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, _ANSWER_LINGER_MS)
            socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
            socket.connect(address.to_tcp())
            socket.send_multipart(parts)

    def fail_room(self, room: int, reason: str) -> None:
        """Fail a room that has its request; keep the verdict for one that has not."""
        if self._fail_open_room(room, reason):
            return
        with self.lock:
            if room not in self.opened:
                self.verdicts[room] = (reason, time.monotonic())
        # The scheduler may have opened it between the two questions.
        self._fail_open_room(room, reason)

    def _fresh(self, kept: tuple[str, float] | None) -> str | None:
        """A kept reason; None when there is none, or it is of an earlier room."""
        if kept is None or time.monotonic() - kept[1] > self.manager.bootstrap_timeout:
            return None
        return kept[0]

    def _fail_open_room(self, room: int, reason: str) -> bool:
        """False when the room has no request (yet, or any more)."""
        if room not in self.manager.request_status:
            return False
        if self.manager.request_status.get(room) != KVPoll.Success:
            self.manager.record_failure(room, reason)
            self.manager.update_status(room, KVPoll.Failed)
        return True

    def open_room(self, room: int) -> None:
        """Note that a room has its request now; fail it if its verdict came early."""
        with self.lock:
            self.opened[room] = None
            reason = self._fresh(self.verdicts.pop(room, None))
        self.ended.pop(room, None)
        if reason is not None:
            self._fail_open_room(room, reason)

    def _undo_registration(self, decode: str) -> None:
        """Remove what a registration that raised left behind.

        Only what is there: NIXL's manager has all of these, others the first.
        """
        manager = self.manager
        was_added = manager.decode_kv_args_table.pop(decode, None) is not None
        for name in ("prep_handles", "prep_handles_slice_dst", "_prepared_state_plans"):
            getattr(manager, name, {}).pop(decode, None)
        if was_added and hasattr(manager, "agent"):
            manager.agent.remove_remote_agent(decode)


def adopt_early_verdict(sender: CommonKVSender) -> None:
    """Fail a new sender whose room decode gave up before the sender existed."""
    sender.kv_mgr.admission.open_room(sender.bootstrap_room)


# -- rooms that prefill refuses or fails --------------------------------------------------


def end_room(manager: CommonKVManager, room: int, reason: str) -> None:
    """Give decode the reason why this prefill does not serve a room, now or when it asks.

    Without it decode holds the room until its waiting timeout, and the client with it:
    SGLang tells decode about transfers that fail, and about nothing else.
    """
    address = NetworkAddress(manager.local_ip, manager.rank_port)
    message = [ROOM_ENDED, str(room).encode("ascii"), reason.encode("utf-8")]
    endpoint = address.to_tcp()
    # Never waits: the control thread, which reads it, may be waiting for the caller.
    # Decode's timeout is what remains.
    with contextlib.suppress(zmq.ZMQError):
        socket = manager._connect(endpoint, is_ipv6=address.is_ipv6)
        with manager._socket_send_locks[endpoint]:
            socket.send_multipart(message, zmq.NOBLOCK)


def announce_failure(manager: CommonKVManager, room: int) -> None:
    """End a room that is about to fail on this engine, if it is a prefill.

    Not one whose KV may still be written: decode would give its memory to another
    request, unless it waits for an acknowledgment. Only NIXL marks such rooms.
    """
    if not isinstance(getattr(manager, "admission", None), PrefillAdmission):
        return
    status = manager.request_status.get(room)
    marks_writes = hasattr(manager, "agent")
    is_quiet = status == KVPoll.Bootstrapping or (
        status == KVPoll.WaitingForInput
        and (marks_writes or manager.enable_deferred_decode_kv_release)
    )
    if is_quiet:
        reason = manager.failure_records.get(room, "prefill failed this request")
        end_room(manager, room, reason)


def announces_refusals(add: Callable[..., None]) -> Callable[..., None]:
    """Decorate prefill's intake of a request: end the room of one that it refuses."""

    @functools.wraps(add)
    def add_or_end(
        queue: PrefillBootstrapQueue, req: Req, *args: object, **kwargs: object
    ) -> None:
        add(queue, req, *args, **kwargs)
        refusal = refusal_of(req)
        if refusal is not None:
            reason = f"refused by prefill: {refusal}"
            end_room(queue.kv_manager, req.bootstrap_room, reason)

    return add_or_end


def refusal_of(req: Req) -> str | None:
    """Why an engine refused a request at its intake; None for one that it took."""
    # Not at the top: those modules import this one's callers.
    from sglang.srt.disaggregation.utils import _is_fake_transfer
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    refusal = req.finished_reason
    if not isinstance(refusal, FINISH_ABORT) or _is_fake_transfer(req):
        return None
    is_clients = refusal.status_code == HTTPStatus.BAD_REQUEST
    return f"{BAD_REQUEST} {refusal.message}" if is_clients else refusal.message


def status_of(message: str, status: HTTPStatus | None) -> HTTPStatus | None:
    """The status of a request that fails with `message`, by default `status`."""
    return HTTPStatus.BAD_REQUEST if BAD_REQUEST in message else status


def leave_peers(scheduler: Scheduler | None) -> None:
    """Fail the rooms of a scheduler that raised on its peers, and let its process end.

    A control thread would keep the process, and the front end waits a minute for dumps
    of a living one. Meanwhile it answers heartbeats, but no request.
    """
    if scheduler is None or scheduler.disaggregation_mode == DisaggregationMode.NULL:
        return
    timer = threading.Timer(_EXIT_DELAY_S, os._exit, [1])
    timer.daemon = True
    timer.start()
    try:
        _end_rooms(scheduler)
    except Exception:  # of a scheduler that raised, anything may be half done
        logger.exception("Could not tell the peers of a scheduler that raised")


def _end_rooms(scheduler: Scheduler) -> None:
    if scheduler.disaggregation_mode == DisaggregationMode.PREFILL:
        manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
        with manager.admission.lock:
            rooms = list(manager.admission.opened)
        for room in rooms:
            # A pipelined prefill keeps statuses in a store that cannot be listed.
            if manager.request_status.get(room) not in (None, KVPoll.Success):
                end_room(manager, room, "prefill's scheduler raised; its log says why")
    else:
        held = scheduler.disagg_decode_prealloc_queue.queue
        for request in held + scheduler.disagg_decode_transfer_queue.queue:
            if request.kv_receiver is not None:
                request.kv_receiver.abort()


def fail_chunk(
    manager: CommonKVManager, chunk: TransferKVChunk | None, error: Exception
) -> bool:
    """Fail the room of a transfer chunk that raised; without a chunk, end the engine.

    Takes with it what SGLang's worker takes when it is done with a room. Its mark
    that the room may still be written to stays: no acknowledgment must be sent.
    """
    if chunk is None:
        end_engine(f"A transfer worker is dead: {type(error).__name__}: {error}")
        return False
    reason = (
        f"[PD-TRANSFER] sending KV failed: {type(error).__name__}: {error}. The "
        "traceback is in prefill's log."
    )
    shown = error if should_log(f"[PD-TRANSFER] {type(error).__name__}") else None
    logger.error("Room %s: %s", chunk.room, reason, exc_info=shown)
    manager.conclude_failure(bootstrap_room=chunk.room, failure_reason=reason)
    for name in ("transfer_infos", "req_to_decode_prefix_len", "_staging_outstanding"):
        getattr(manager, name, {}).pop(chunk.room, None)
    return True


@dataclasses.dataclass
class DecodeAdmission:
    """Decode's `MessageHandler`: it works on every message of a prefill."""

    manager: CommonKVManager

    def admits(self, message: list[bytes]) -> bool:
        room = self._room_without_registration(message)
        if room is not None:
            self._register_again(room)
        return True

    def on_error(self, message: list[bytes], error: Exception) -> None:
        """Fail the room of a prefill message that raised in SGLang's handling."""
        room = self._room_of(message)
        if room in self.manager.request_status:
            reason = (
                f"[PD-STATUS] handling prefill's message failed: {error}. Run the same "
                "build of SGLang on both engines."
            )
            self.manager.record_failure(room, reason)
            self.manager.update_status(room, KVPoll.Failed)

    def _room_of(self, message: list[bytes]) -> int | None:
        if message[0] in _KINDS_BEFORE_ROOM:
            return int(message[1])
        parsed = self.manager.parse_kv_status_message(message)
        return None if parsed is None else parsed[0]

    def _room_without_registration(self, message: list[bytes]) -> int | None:
        """The room of a message by which prefill says that it does not know this decode."""
        if message[0] in _KINDS_BEFORE_ROOM:
            return None
        if NOT_REGISTERED.encode() not in message[-1]:
            return None
        return self._room_of(message)

    def _register_again(self, room: int) -> None:
        """Forget the connection to the room's prefill, so that the next one registers."""
        for address, rooms in list(self.manager.addr_to_rooms_tracker.items()):
            if room in rooms:
                with self.manager.connection_lock:
                    pool = self.manager.connection_pool
                    for key in [k for k in pool if k.startswith(f"{address}_")]:
                        del pool[key]
