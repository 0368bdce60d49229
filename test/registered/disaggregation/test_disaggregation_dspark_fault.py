"""Faults: the client is answered, nothing stays behind, the pair serves again.

Engines, the router and messages are hurt at random points of running requests (seeded).
Every request must be answered within a bound, with a result or an error; afterwards no
queue holds a request and no KV token is in use, and more requests than there are
metadata slots go through.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from pd_faults import (
    BACK_LIMIT_S,
    TIMEOUT_S,
    TIMEOUTS,
    ask_many,
    assert_answered,
    assert_recovered,
    control_port,
    during_requests,
    is_gone,
    kill_thread,
    killable,
    pause,
    signal_group,
    throw_frames,
    wait_until,
)
from pd_mismatch import Answer, ask, spec, stop_and_free

from dspark_pd.bed import Bed, Engine, Router, RouterSpec
from dspark_pd.bed.leftovers import empty_within, resident_mib

pytestmark = pytest.mark.e2e

GONE_LIMIT_S = 15.0  # the front end sleeps 5 s before it ends what is left
FRAMES = 10_000
FLAT_MIB = 32
OBSERVED: dict[str, tuple[float, str]] = {}


# Per role and backend: the function its control thread runs.
CONTROL_THREADS = {
    "prefill": {"nixl": "bootstrap_thread", "mooncake": "bootstrap_thread"},
    "decode": {"nixl": "decode_listener_thread", "mooncake": "decode_thread"},
}


def fault_spec(role: str, env: dict[str, str], **options):
    return spec(f"fault-{role}", role, env={**TIMEOUTS, **env}, **options)


def any_moment(running: Running) -> float:
    return running.dice.uniform(0.05, 1.5)


@dataclass
class Running:
    """The pair of the module; engines are replaced by their restarted selves.

    Only the first ones have threads that can be ended to order.
    """

    bed: Bed
    prefill: Engine
    decode: Engine
    router: Router
    dice: random.Random
    orders: Path

    def restart(self, which: str) -> None:
        options = stop_and_free(self.bed, getattr(self, which))
        [started] = self.bed.start([fault_spec(which, {}, **options)])
        setattr(self, which, started)

    def serves(self) -> bool:
        return ask(self.router.url).served


@pytest.fixture(scope="module")
def running(bed: Bed, tmp_path_factory) -> Iterator[Running]:
    orders = tmp_path_factory.mktemp("orders")
    prefill, decode = bed.start(
        [fault_spec(role, killable(orders)) for role in ("prefill", "decode")]
    )
    router = bed.start_router(
        RouterSpec("fault-r", [prefill.endpoint], [decode.endpoint])
    )
    running = Running(bed, prefill, decode, router, random.Random(20261129), orders)
    assert wait_until(running.serves, BACK_LIMIT_S) is not None
    yield running
    bed.stop(running.router, running.prefill, running.decode)


def check_answered(fault: str, answers: list[Answer]) -> None:
    """All answered in time; keep the slowest for the table."""
    slowest = max(answer.seconds for answer in answers)
    outcomes = sorted({str(answer.status) for answer in answers})
    OBSERVED[fault] = (slowest, ", ".join(outcomes))
    assert_answered(answers)


def check_recovered(running: Running) -> None:
    assert_recovered(running.router.url, running.prefill, running.decode)


@pytest.mark.parametrize("which", CONTROL_THREADS)
def test_fault_control_thread_killed(running: Running, which: str) -> None:
    """Its engine is gone within seconds; requests end; a restart cures it."""
    engine = getattr(running, which)
    function = CONTROL_THREADS[which][engine.spec.transfer_backend]
    peer = running.decode if which == "prefill" else running.prefill
    kill_thread(running.orders, function)
    with ThreadPoolExecutor(1) as pool:
        # A thread that waits for a message ends when the next one comes.
        asked = pool.submit(ask_many, running.router.url, 2, timeout_s=90)
        gone = wait_until(lambda: is_gone(engine), GONE_LIMIT_S)
        answers = asked.result()
    assert gone is not None, f"the engine still has processes {engine.pids()}"
    assert f"Control thread '{function}' is dead: SystemExit" in engine.log_text()
    assert empty_within(peer, 2 * TIMEOUT_S) == {}, f"{peer.name} holds a request"
    running.restart(which)
    check_answered(f"{which}'s control thread killed", answers)
    check_recovered(running)


# Seconds after the requests: while they are handed over, and while they are decoded.
MOMENTS = {"early": (0.0, 0.25), "late": (0.25, 1.5)}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_fault_engine_killed(running: Running, which: str, moment: str) -> None:
    engine = getattr(running, which)
    answers = during_requests(
        running.router.url,
        4,
        lambda: signal_group(engine, signal.SIGKILL),
        running.dice.uniform(*MOMENTS[moment]),
    )
    running.restart(which)
    check_answered(f"{which} killed, {moment}", answers)
    check_recovered(running)


@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_fault_engine_stopped_for_a_while(running: Running, which: str) -> None:
    engine = getattr(running, which)
    answers = during_requests(
        running.router.url, 4, lambda: pause(engine, 4.0), any_moment(running)
    )
    check_answered(f"{which} stopped for 4 s", answers)
    check_recovered(running)


def test_fault_router_stopped_for_a_while(running: Running) -> None:
    answers = during_requests(
        running.router.url, 4, lambda: pause(running.router, 4.0), any_moment(running)
    )
    check_answered("router stopped for 4 s", answers)
    assert all(answer.status == 200 for answer in answers)
    check_recovered(running)


def test_fault_router_killed(running: Running) -> None:
    """Clients lose their connection; the engines must not keep their requests."""
    old = running.router
    answers = during_requests(
        old.url, 4, lambda: signal_group(old, signal.SIGKILL), any_moment(running)
    )
    OBSERVED["router killed"] = (max(a.seconds for a in answers), "connection lost")
    running.bed.stop(old)
    running.router = running.bed.start_router(
        RouterSpec(
            "fault-r2",
            [running.prefill.endpoint],
            [running.decode.endpoint],
        )
    )
    check_recovered(running)


def test_fault_clients_go_away(running: Running) -> None:
    """More abandoned requests than there are slots."""
    for _ in range(3):
        ask_many(running.router.url, 16, timeout_s=running.dice.uniform(0.02, 0.4))
    check_recovered(running)


def test_fault_hostile_frames(running: Running) -> None:
    """Garbage at prefill's control port, while requests are served; memory stays flat."""
    prefill = running.prefill
    port = control_port(prefill)
    throw_frames(prefill.host, port, FRAMES // 5, seed=4)
    assert wait_until(running.serves, BACK_LIMIT_S) is not None
    before = resident_mib(prefill)
    answers = during_requests(
        running.router.url,
        2,
        lambda: throw_frames(prefill.host, port, FRAMES, seed=5),
        any_moment(running),
    )
    check_answered(f"{FRAMES} hostile frames", answers)
    assert all(answer.status == 200 for answer in answers)
    check_recovered(running)
    assert resident_mib(prefill) - before < FLAT_MIB


def test_fault_table(capsys) -> None:
    """Print every fault with the slowest answer."""
    assert OBSERVED, "no fault was run"
    with capsys.disabled():
        print(f"\n{'fault':<32} {'slowest answer':>14}  statuses")
        for fault, (seconds, outcomes) in OBSERVED.items():
            print(f"{fault:<32} {seconds:>12.1f} s  {outcomes}")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-m", "e2e"]))
