"""Descriptions, and KV managers without engines, for the tests of the agreement.

A manager is made around its constructor, which needs a device and a launched engine;
it has what first contact, refusals and heartbeats use. Bootstrap servers are upstream's.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import requests
import zmq

from sglang.srt.disaggregation.agreement import decode_side
from sglang.srt.disaggregation.agreement.description import describe
from sglang.srt.disaggregation.agreement.rules import REFUSE, decide
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import get_free_port
from sglang.test.test_utils import CustomTestCase

NATIVE = {
    "version": 2,
    "backend": "nixl",
    "algorithm": "DSPARK",
    "mode": "native",
    "block_size": 5,
    "page_size": 1,
    "kv_dtype": "auto",
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "attention": "mha",
    "kv_layer_ids": True,
    "stage_pairing": "none",
    "target": {"architecture": "T", "layers": 4},
    "draft": {"architecture": "D", "layers": 2},
    "draft_weights": "aaaa",
    "draft_kv_dtype": "auto",
    "aux": ["output_ids", "bootstrap_room"],
}
PLAIN = {
    key: value
    for key, value in {**NATIVE, "algorithm": None, "mode": "none"}.items()
    if not key.startswith("draft") and key != "block_size"
}
# Arguments and configs of models, for descriptions.
TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}
DRAFT = {
    **TARGET,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 0},
}
V4 = {**TARGET, "compress_ratios": [0, 4, 128, 4]}
ARGS = {
    "disaggregation_transfer_backend": "nixl",
    "speculative_algorithm": "DSPARK",
    "speculative_num_draft_tokens": 5,
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "tp_size": 2,
}
PLAIN_ARGS = {**ARGS, "speculative_algorithm": None}
TOPOLOGY_QUERY = (
    "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
)


def describe_role(role, args=ARGS, *, draft=DRAFT, target=TARGET, environ=None):
    return describe(
        args,
        role=role,
        target_config=target,
        draft_config=draft,
        environ=environ,
    )


def refusal(decode, prefill):
    """The verdict that forbids this pair, or None."""
    verdicts = decide(decode, prefill)
    return verdicts[0] if verdicts and verdicts[0].severity == REFUSE else None


def wait_for(condition, timeout_s: float = 10.0):
    """The condition's first true value; None when there is none in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    return None


def serve(port: int = 0) -> CommonKVBootstrapServer:
    server = CommonKVBootstrapServer("127.0.0.1", port or get_free_port())
    url = f"http://127.0.0.1:{server.port}/health"

    def up():
        try:
            return requests.get(url, timeout=1).status_code == 200
        except requests.RequestException:
            return False

    assert wait_for(up), "the bootstrap server did not start"
    return server


def topology_of(server) -> requests.Response:
    """The answer that a decode gets on first contact."""
    return requests.get(
        f"http://127.0.0.1:{server.port}/route?{TOPOLOGY_QUERY}", timeout=5
    )


def make_manager(mode: DisaggregationMode, description, **kv_args) -> NixlKVManager:
    manager = object.__new__(NixlKVManager)
    known = {"page_size": 1, "engine_rank": 0, "state_types": []}
    manager.__dict__.update(
        kv_args=SimpleNamespace(engine_description=description, **(known | kv_args)),
        disaggregation_mode=mode,
        _stopped=False,
        kv_cache_dtype_str="auto",
        kv_layout=None,
        dsv41_spec_layout=None,
        is_mla_backend=False,
        is_hybrid_mla_backend=False,
        enable_all_cp_ranks_for_transfer=False,
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_cp_size=1,
        attn_cp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        system_dp_size=1,
        system_dp_rank=0,
        pp_size=1,
        pp_rank=0,
        dcp_size=1,
        local_ip="127.0.0.1",
    )
    return manager


def make_decode(description, **kv_args) -> NixlKVManager:
    manager = make_manager(DisaggregationMode.DECODE, description, **kv_args)
    manager.__dict__.update(
        waiting_timeout=300,
        defer_decode_allocation=False,
        enable_staging=False,
        _staging_handler=None,
        enable_deferred_decode_kv_release=False,
        prefill_info_table={},
        connection_pool={},
        connection_lock=threading.Lock(),
        addr_to_rooms_tracker=defaultdict(set),
        prefill_response_tracker={},
        required_prefill_response_num_table={},
        request_status={},
        transfer_statuses={},  # of NIXL before 0.5.23
        failure_records={},
        failure_lock=threading.Lock(),
        _deferred_ack_targets={},
        _deferred_ack_poisoned_rooms=set(),
        _staging_outstanding=defaultdict(int),
        heartbeat_interval=0.02,
        heartbeat_failures={},
        max_failures=2,
        _heartbeat_shutdown=threading.Event(),
        session_pool=defaultdict(requests.Session),
        session_pool_lock=threading.Lock(),
    )
    return manager


def stop(decode) -> None:
    """End its heartbeats as a teardown does; a thread that just ends, ends the engine."""
    decode._stopped = True
    decode._heartbeat_shutdown.set()
    decode.prefill_info_table.clear()  # before 0.5.21 there is no shutdown


def make_prefill(description, **changes) -> NixlKVManager:
    """A prefill rank whose control messages arrive at `control`, a PULL socket."""
    manager = make_manager(DisaggregationMode.PREFILL, description)
    manager.zmq_context = zmq.Context()
    manager.control = manager.zmq_context.socket(zmq.PULL)
    manager.rank_port = manager.control.bind_to_random_port("tcp://127.0.0.1")
    manager.__dict__.update(changes)
    return manager


def register(manager, server) -> None:
    """Run upstream's own registration of one prefill rank."""
    manager.__dict__.update(
        dist_init_addr=None, bootstrap_host="127.0.0.1", bootstrap_port=server.port
    )
    parallel = SimpleNamespace(
        enable_cp_tp_group_sharing=False,
        load_balance_method="round_robin",
        enable_dsa_cache_layer_split=False,
        enable_kv_cache_sharding=False,
    )
    policy = SimpleNamespace(disaggregation_decode_allocation_policy="early")
    with patch_existing(
        conn,
        get_parallel=lambda: parallel,
        get_disagg=lambda: policy,
        get_serving=lambda: SimpleNamespace(port=1),
    ):
        manager.register_to_bootstrap()


def patch_existing(module, **replacements):
    """`mock.patch.multiple` for the names that this release's module has."""
    known = {k: v for k, v in replacements.items() if hasattr(module, k)}
    return mock.patch.multiple(module, **known) if known else ExitStack()


class WithServer(CustomTestCase):
    """A bootstrap server of upstream's, and managers that end with the test."""

    def setUp(self):
        # A busy machine must not turn an answer into none.
        patience = mock.patch.object(decode_side, "_PATIENCE_S", 10.0)
        patience.start()
        self.addCleanup(patience.stop)
        self.server = serve()
        self.addCleanup(lambda: self.server.close())
        self.addr = f"127.0.0.1:{self.server.port}"

    def restart_server(self):
        self.server.close()
        self.server = serve(self.server.port)

    def prefill(self, description=NATIVE, *, page_size=1, **changes):
        manager = make_prefill(description, **changes)
        manager.kv_args.page_size = page_size
        self.addCleanup(manager.zmq_context.destroy, linger=0)
        register(manager, self.server)
        return manager

    def decode(self, description=NATIVE, **kv_args):
        decode = make_decode(description, **kv_args)
        self.addCleanup(stop, decode)
        return decode

    def request(self, decode, room=7):
        """What upstream's scheduler does with a request: contact, then begin."""
        receiver = NixlKVReceiver(decode, self.addr, room)
        if decode.try_ensure_parallel_info(self.addr):
            early = SimpleNamespace(disaggregation_decode_allocation_policy="early")
            with patch_existing(conn, get_disagg=lambda: early):
                with mock.patch.object(NixlKVReceiver, "_register_kv_args") as sent:
                    sent.return_value = True
                    receiver.init(0)
        return receiver

    def told(self, prefill):
        """The next control message that reached prefill; None when there is none."""
        if not prefill.control.poll(5000):
            return None
        return prefill.control.recv_multipart()
