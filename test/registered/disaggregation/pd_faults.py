"""Ways to hurt a running pair."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import struct
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import zmq
from pd_mismatch import Answer, ask, unhealthy

from dspark_pd.bed import Engine, web
from dspark_pd.bed.bed import Server
from dspark_pd.bed.leftovers import empty_within
from dspark_pd.bed.prompts import Prompt

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LONG = 256
KILLER = Path(__file__).parent / "control_thread_killer"
# A request whose other engine is gone is held for these timeouts (300 s by default), and
# the router tries it again before it knows; together they bound the client's wait.
TIMEOUT_S = 10
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(TIMEOUT_S),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(TIMEOUT_S),
    # Decode keeps the KV of a request whose prefill does not confirm its abort.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}
ANSWER_LIMIT_S = 2 * TIMEOUT_S + 15.0
BACK_LIMIT_S = 30.0
SLOTS = 32  # metadata slots of an engine with --max-running-requests 16


def get_json(url: str, timeout_s: float = 10.0):
    with _opener.open(url, timeout=timeout_s) as response:
        return json.loads(response.read())


def ask_many(url: str, count: int, **options) -> list[Answer]:
    """`count` requests at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: ask(url, **options), range(count)))


def assert_answered(answers: Sequence[Answer]) -> None:
    """Each client has a result or an error, within the bound."""
    # The end of a body says what the engine measured.
    said = [(a.status, round(a.seconds, 1), a.body[-800:]) for a in answers]
    assert all(answer.status is not None for answer in answers), said
    late = [entry for entry in said if entry[1] >= ANSWER_LIMIT_S]
    assert not late, f"{len(late)} of {len(said)} after {ANSWER_LIMIT_S} s: {late}"


def assert_recovered(url: str, *engines: Engine) -> None:
    """The pair behind `url` serves, holds nothing, and has all its slots."""
    back = wait_until(lambda: ask(url).served, BACK_LIMIT_S)
    assert back is not None, "the pair does not serve again"
    served = [answer.served for answer in ask_many(url, SLOTS + 8, timeout_s=120)]
    assert all(served), f"{served.count(False)} of {len(served)} were not served"
    for engine in engines:
        assert empty_within(engine) == {}, f"{engine.name} still holds something"
    assert not unhealthy(*engines)


def abort_at_random(
    prefill: Engine, decode: Engine, prompts: Sequence[Prompt], count: int = 24
) -> None:
    """Long requests, each aborted on both engines within half a second."""
    rng = random.Random(7)
    plans = [(number, rng.random() / 2, rng.getrandbits(62)) for number in range(count)]

    def one(number: int, delay: float, room: int) -> None:
        rid = f"{prefill.name}-{number}"
        sampling = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}
        body = {
            "rid": rid,
            "input_ids": list(prompts[number % len(prompts)].ids),
            "sampling_params": sampling,
            "bootstrap_host": prefill.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": room,
        }
        with ThreadPoolExecutor(2) as posts:
            for engine in (prefill, decode):
                posts.submit(web.call, f"{engine.url}/generate", body, 60)
            time.sleep(delay)
            for engine in (decode, prefill):
                web.call(f"{engine.url}/abort_request", {"rid": rid}, 20)

    with ThreadPoolExecutor(count) as pool:
        for aborted in [pool.submit(one, *plan) for plan in plans]:
            aborted.result()


def during_requests(
    url: str,
    count: int,
    hurt: Callable[[], None],
    after_s: float,
    new_tokens: int = LONG,
) -> list[Answer]:
    """Start long requests, hurt something `after_s` later; their answers."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    with ThreadPoolExecutor(count + 1) as pool:
        asked = [
            pool.submit(ask, url, timeout_s=90, sampling_params=sampling)
            for _ in range(count)
        ]
        time.sleep(after_s)
        hurt()
        return [future.result() for future in asked]


def signal_group(engine: Server, number: int) -> None:
    """Send a signal to every process of an engine or router."""
    os.killpg(os.getpgid(engine.pid), number)


def pause(engine: Server, seconds: float) -> None:
    """SIGSTOP, wait, SIGCONT."""
    signal_group(engine, signal.SIGSTOP)
    time.sleep(seconds)
    signal_group(engine, signal.SIGCONT)


def killable(folder: Path) -> dict[str, str]:
    """Environment of an engine whose control threads `kill_thread` can end."""
    path = os.pathsep.join(filter(None, [str(KILLER), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "CONTROL_THREAD_KILLER_DIR": str(folder)}


def kill_thread(folder: Path, function: str) -> None:
    """End the thread that runs this function; returns when its process has seen it."""
    order = folder / function
    order.touch()
    assert wait_until(lambda: not order.exists(), 10) is not None, "no such thread"


def raise_in_scheduler(folder: Path) -> None:
    """Make a prefill's scheduler raise; returns when its process has been told."""
    kill_thread(folder, "raise-in-scheduler-of-bootstrap_thread")


def is_gone(engine: Engine) -> bool:
    """Whether none of an engine's processes lives and its port refuses."""
    if engine.alive() or engine.pids():
        return False
    with socket.socket() as probe:
        return probe.connect_ex((engine.host, engine.port)) == errno.ECONNREFUSED


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Seconds until the condition held; None when it did not in time."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if condition():
            return time.monotonic() - began
        time.sleep(0.25)
    return None


def control_port(prefill: Engine) -> int:
    """The port on which the first rank of a prefill listens to decodes."""
    query = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    base = f"http://{prefill.host}:{prefill.bootstrap_port}"
    return get_json(f"{base}/route?{query}")["rank_port"]


def control_ports(engine: Engine) -> list[int]:
    """Ports of an engine on which it reads control messages, which nobody tells."""
    listening = {
        connection.laddr
        for pid in engine.pids()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.ip == engine.host
    }
    return sorted(address.port for address in listening if _greets(*address))


def _greets(host: str, port: int) -> bool:
    """Whether ZeroMQ listens: it speaks first."""
    with socket.create_connection((host, port), timeout=2) as probe:
        probe.settimeout(0.5)
        try:
            return probe.recv(1) == b"\xff"
        except OSError:
            return False


def throw_frames(host: str, port: int, count: int, seed: int) -> None:
    """Send hostile control messages: garbage, and good ones with damage."""
    dice = random.Random(seed)
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.setsockopt(zmq.LINGER, 5000)
    sender.connect(f"tcp://{host}:{port}")
    for number in range(count):
        sender.send_multipart(_hostile(dice, number))
    sender.close()
    context.term()


def _hostile(dice: random.Random, number: int) -> list[bytes]:
    room, port = str(dice.getrandbits(40)).encode(), str(dice.randrange(65536)).encode()
    name = f"decode-{number}".encode()
    kinds = (
        [b"NixlMsgGuard", b"None", b"127.0.0.1", port, name, b"meta", b"12345678"] * 1,
        [
            b"NixlMsgGuard",
            room,
            b"127.0.0.1",
            port,
            name,
            struct.pack("i", 1),
            b"0",
            b"1",
        ],
        [b"None", b"127.0.0.1", port, name, b"12345678", b"1234", b"", b"0"],
        [room, b"127.0.0.1", port, name, b"1234", b"0", b"", b"1", b"0"],
        [b"AUX_DATA", room, b"99", b"0", struct.pack(">I", 5), b"longer than 5"],
        [room, b"4", b"0", b"why"],
        [b"ABORT", room, b"127.0.0.1", port],
        [b"ROOM_REFUSED", room, b"why"],
        [dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(1, 26))],
        [b"STAGING_RSP", room],
        [b"WATERMARK"],
    )
    frames = list(dice.choice(kinds))
    if dice.random() < 0.5:
        frames[dice.randrange(len(frames))] = dice.randbytes(dice.randrange(12))
    return frames
