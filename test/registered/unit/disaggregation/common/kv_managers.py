"""Real KV managers without engines, and the other engine's end of their wire.

A manager is built around its constructor, which needs a device and a launched engine;
everything a control thread touches afterwards is upstream's own code.
"""

from __future__ import annotations

import inspect
import struct
import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import admission, conn, control_threads
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.nixl.conn import GUARD, NixlKVManager, NixlKVSender
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.test.test_utils import CustomTestCase

# A thread that dies in a test must not end the process that runs the tests.
ended: list[str] = []
real_end_engine = control_threads.end_engine
control_threads.end_engine = admission.end_engine = ended.append


class FakeAgent:
    """Stands for the NIXL agent: remembers which peers it was given."""

    name = "prefill-agent"

    def __init__(self):
        self.peers = []

    def add_remote_agent(self, metadata):
        self.peers.append(metadata)

    def remove_remote_agent(self, name):
        self.peers = [peer for peer in self.peers if name.encode() not in peer]


def make_manager(cls, mode: DisaggregationMode, **kv_args):
    """A KV manager of `cls` with all the state its control threads use."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    manager = object.__new__(cls)
    defaults = {
        "kv_item_lens": [],
        "kv_layer_ids": [],
        "kv_data_ptrs": [],
        "aux_data_ptrs": [],
        "state_types": [],
        "page_size": 1,
        "engine_rank": 0,
        "num_draft_entries": 0,
    }
    manager.__dict__.update(
        kv_args=SimpleNamespace(**(defaults | kv_args)),
        server_args=SimpleNamespace(port=0, enable_pd_role_switch=False, dp_size=1),
        disaggregation_mode=mode,
        _stopped=False,
        _zmq_ctx=context,
        server_socket=socket,
        rank_port=port,
        _socket_lock=threading.Lock(),
        _socket_cache={},
        _monitor_cache={},
        _socket_send_locks={},
        local_ip="127.0.0.1",
        kv_cache_dtype_str="auto",
        bootstrap_timeout=300,
        waiting_timeout=300,
        request_status={},
        transfer_infos={},
        req_to_decode_prefix_len={},
        decode_kv_args_table={},
        prefill_info_table={},
        connection_pool={},
        connection_lock=threading.Lock(),
        addr_to_rooms_tracker=defaultdict(set),
        prefill_response_tracker={},
        required_prefill_response_num_table={},
        failure_records={},
        failure_lock=threading.Lock(),
        session_lock=threading.Lock(),
        _deferred_ack_targets={},
        _deferred_ack_poisoned_rooms=set(),
        _staging_outstanding=defaultdict(int),
        deferred_bootstrap=None,
        defer_decode_allocation=False,
        enable_staging=False,
        _staging_handler=None,
        enable_deferred_decode_kv_release=False,
        is_dummy_cp_rank=False,
        is_mla_backend=False,
        is_hybrid_mla_backend=False,
        _kv_replica_factor=1,
        sender_trace_module=None,
        attn_tp_rank=0,
        attn_tp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        attn_dp_rank=0,
        pp_rank=0,
        pp_size=1,
        dcp_size=1,
        dcp_rank=0,
        kv_layout=None,
        dsv41_spec_layout=None,
        agent=FakeAgent(),
        prep_handles={},
        prep_handles_slice_dst={},
        _prepared_state_plans={},
        _state_layout_rejections={},
        _prepared_state_components=frozenset(),
        _worker_threads=[],
        failed_sessions=set(),
        session_failures={},
        enable_trace=False,
    )
    admission.guard_socket(manager)
    return manager


class _ClosedSocket:
    """What a control thread finds in place of its socket once the test is over."""

    def recv_multipart(self):
        raise zmq.ZMQError(zmq.ENOTSOCK)


def close(manager) -> None:
    """End the manager's control threads and close its sockets.

    A thread blocked in its receive is woken by a message and then meets a closed
    socket; sockets are closed by the thread that owns them no longer using them.
    """
    manager._stopped = True
    socket, manager.server_socket = manager.server_socket, _ClosedSocket()
    threads = [
        thread
        for thread in threading.enumerate()
        if getattr(thread, "_target", None) is not None
        and thread is not threading.current_thread()
    ]
    wake = manager._zmq_ctx.socket(zmq.PUSH)
    wake.connect(f"tcp://127.0.0.1:{manager.rank_port}")
    wake.send_multipart([b"WATERMARK"])
    names = ("bootstrap_thread", "decode_listener_thread", "decode_thread")
    for thread in threads:
        if any(name in thread.name for name in names):
            thread.join(timeout=2)
    wake.close(linger=0)
    socket.close(linger=0)
    manager._zmq_ctx.destroy(linger=0)


class Wire:
    """A decode engine's end of the control channel: sends frames, receives answers."""

    def __init__(self, manager):
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._out.connect(f"tcp://127.0.0.1:{manager.rank_port}")
        self._in = self._context.socket(zmq.PULL)
        self.port = self._in.bind_to_random_port("tcp://127.0.0.1")

    def send(self, *frames: bytes) -> None:
        self._out.send_multipart(list(frames))

    def answer(self, timeout_s: float = 5.0) -> list[bytes] | None:
        if not self._in.poll(timeout_s * 1000):
            return None
        return self._in.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


def nixl_registration(port, agent="decode-a", pointers=0):
    """Registration frames as a decode builds them, from the documented layout."""
    body = [b""] * 24
    body[0:5] = [b"None", b"127.0.0.1", str(port).encode(), agent.encode(), b"meta"]
    body[4] = b"metadata of " + agent.encode()
    body[5] = struct.pack(f"{pointers}Q", *range(pointers))
    body[8:12] = [b"0", b"1", b"0", b"8"]
    body[16] = b"4"
    body[18] = struct.pack(f"{pointers}Q", *[8] * pointers)
    body[21:23] = [b"1", b"0"]
    if pointers:
        from sglang.srt.disaggregation.nixl.conn import _pack_kv_mem_kinds

        body[17] = _pack_kv_mem_kinds(["VRAM"] * pointers)
    return [GUARD, *body]


def nixl_metadata(room, port, agent="decode-a"):
    indices = struct.pack("2i", 1, 2)
    frames = [str(room).encode(), b"127.0.0.1", str(port).encode(), agent.encode()]
    return [GUARD, *frames, indices, b"0", b"1", b"", b"0", b"0"]


def mooncake_registration(port, agent="host:1", pointers=0):
    body = [b"None", b"127.0.0.1", str(port).encode(), agent.encode()]
    body += [struct.pack(f"{pointers}Q", *range(pointers)), b"", b"", b"0", b"1", b"8"]
    return body + [b""] * 10


def mooncake_metadata(room, port, agent="host:1"):
    frames = [str(room).encode(), b"127.0.0.1", str(port).encode(), agent.encode()]
    return [*frames, struct.pack("2i", 1, 2), b"0", b"", b"1", b"0", b""]


def nixl_prefill(**kv_args):
    return make_manager(NixlKVManager, DisaggregationMode.PREFILL, **kv_args)


def nixl_decode(**kv_args):
    return make_manager(NixlKVManager, DisaggregationMode.DECODE, **kv_args)


def mooncake_prefill():
    manager = make_manager(MooncakeKVManager, DisaggregationMode.PREFILL)
    # From 0.5.23 on it looks at the layout of states, which this manager has not.
    manager._publish_peer_registration = manager.decode_kv_args_table.__setitem__
    return manager


def mooncake_decode():
    manager = make_manager(MooncakeKVManager, DisaggregationMode.DECODE)
    manager._start_heartbeat_checker_thread = mock.Mock()
    return manager


def patch_existing(module, **replacements):
    """`mock.patch.multiple` for the names that this release's module has."""
    known = {k: v for k, v in replacements.items() if hasattr(module, k)}
    return mock.patch.multiple(module, **known) if known else nullcontext()


def open_sender(manager, room):
    """A sender as the prefill scheduler creates it; needs the parallel context."""
    with patch_existing(
        conn,
        get_parallel=lambda: SimpleNamespace(num_dp_ranks=1, dp_size=1),
        get_observability=lambda: SimpleNamespace(enable_trace=False),
    ):
        # Releases before 0.5.21 also ask for the ranks a sender serves.
        asked = inspect.signature(NixlKVSender.__init__).parameters
        ranks = {"dest_tp_ranks": [0], "pp_rank": 0}
        known = {name: value for name, value in ranks.items() if name in asked}
        return NixlKVSender(manager, "127.0.0.1:1", room, **known)


def wait_for(condition, timeout_s: float = 5.0):
    """The condition's first true value; None when there is none in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    return None


class ThreadCase(CustomTestCase):
    """A manager whose control thread runs, and the wire to it."""

    def start(self, manager, start_thread):
        self.manager = manager
        self.addCleanup(close, manager)
        ended.clear()
        start_thread()
        self.wire = Wire(manager)
        self.addCleanup(self.wire.close)

    def becomes(self, room, status):
        table = self.manager.request_status
        return bool(wait_for(lambda: table.get(room) == status))

    def fails(self, room, *texts):
        """Whether the room fails, with a reason that holds these texts."""
        failed = self.becomes(room, KVPoll.Failed)
        for text in texts:
            self.assertIn(text, self.manager.failure_records[room])
        return failed

    def is_ready(self, room):
        return self.becomes(room, KVPoll.WaitingForInput)
