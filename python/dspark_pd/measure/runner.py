"""Sends all requests, a few at a time, and keeps what is known when it is interrupted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dspark_pd.measure.client import Client, Served, Where
from dspark_pd.measure.prompts import Prompt

Say = Callable[[str], None]
_SAY_EVERY_S = 2.0
_POLL_S = 0.05


@dataclass
class Side:
    """One place that gets the prompts, and what it answered.

    ``places``: prefill, if it is known, and where to send; each gets every prompt.
    """

    name: str
    places: Sequence[tuple[str | None, Where]]
    client: Client
    served: list[Served] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Every prompt goes to every side ``rounds`` times, ``parallel`` at a time."""

    prompts: Sequence[Prompt]
    rounds: int
    parallel: int


def run(plan: Plan, sides: Sequence[Side], say: Say) -> bool:
    """Send all; returns False when it was interrupted, with the answers so far kept.

    The sides take turns, round by round: what is known early can be compared.
    """
    try:
        for number in range(plan.rounds):
            for side in sides:
                _send_round(plan, side, number, say)
    except KeyboardInterrupt:
        return False
    return True


def _send_round(plan: Plan, side: Side, number: int, say: Say) -> None:
    jobs: queue.SimpleQueue[tuple[int, str | None, Where]] = queue.SimpleQueue()
    for index in range(len(plan.prompts)):
        for prefill, where in side.places:
            jobs.put((index, prefill, where))
    total = jobs.qsize()
    before, began = len(side.served), time.monotonic()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                index, prefill, where = jobs.get_nowait()
            except queue.Empty:
                return
            served = side.client.ask(where, plan.prompts[index], index, number)
            if not stop.is_set():
                side.served.append(replace(served, prefill=prefill))

    # Daemons: an interrupted run does not wait for streams that hang.
    workers = [
        threading.Thread(target=work, daemon=True)
        for _ in range(min(plan.parallel, total))
    ]
    title = f"{side.name}, round {number + 1} of {plan.rounds}"
    said = began
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(_POLL_S)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                say(_progress(title, side.served[before:], total))
    finally:
        stop.set()
        side.seconds += time.monotonic() - began
    say(_progress(title, side.served[before:], total))


def _progress(title: str, served: Sequence[Served], total: int) -> str:
    steps = sum(s.verify_steps or 0 for s in served)
    tokens = sum(s.completion_tokens for s in served if s.verify_steps)
    failed = sum(s.error is not None for s in served)
    text = f"{title}: {len(served)} of {total} requests"
    text += f", accept length {tokens / steps:.2f}" if steps else ""
    return text + (f", {failed} failed" if failed else "")
