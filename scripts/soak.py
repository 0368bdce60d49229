#!/usr/bin/env python3
"""Clients that come and go, for as long as asked: is each request answered?

    scripts/soak.py [--minutes N] [--seed N] [--in-flight N] [--leavers SHARE]
                    [--prompt-tokens LOW HIGH] [--new-tokens LOW HIGH]
                    [--prefills native tail-pp2 ...] [--limit SECONDS] [--stock]

Engines: one decode, the prefills asked for, one router. A share of the clients leaves
at a random time of its request. Every request is drawn from the seed and its number.

Passes when every client that stays is served before the limit, no engine holds a request
or a KV token afterwards, no engine's memory grows by more than 64 MiB, and a fixed probe
has the same tokens and verify steps before and after. For a request that hangs it says
what each engine held at that moment.

The default is what found the fault that this is for: thirty minutes of it belong to a
change of how rooms begin and end, not to CI.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from dspark_pd.bed import (  # noqa: E402
    MODELS,
    Bed,
    Client,
    Engine,
    EngineSpec,
    Router,
    RouterSpec,
)
from dspark_pd.bed.checks import check_applied, check_installed  # noqa: E402
from dspark_pd.bed.errors import BedError  # noqa: E402
from dspark_pd.bed.leftovers import empty_within, holdings, resident_mib  # noqa: E402
from dspark_pd.bed.prompts import make_prompts  # noqa: E402

EXPECT = {"SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": "-1"}
CAPTURE = {**EXPECT, "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
PREFILLS = ("native", "tail", "tail-pp2")
GROWTH_MIB = 64
WARM_UP = 100  # requests before memory is measured: caches and arenas fill
SERVED, HUNG = "served", "hung"
PROBE = make_prompts(6, seed=3, key_len=(10, 23), prompt_tokens=(30, 120))


def prefill_spec(kind: str, number: int) -> EngineSpec:
    """A prefill of one kind; the number keeps names apart."""
    name = f"prefill{number}-{kind}"
    if kind == "native":
        return EngineSpec(
            name, "prefill", MODELS.target, MODELS.draft_swa, chunked_prefill=256
        )
    return EngineSpec(
        name,
        "prefill",
        MODELS.target,
        pp=2 if kind == "tail-pp2" else 1,
        chunked_prefill=256,
        args={"speculative-draft-model-path": str(MODELS.draft_swa)},
        env=CAPTURE,
    )


@dataclass
class Traffic:
    """Requests until the time is up, and how each of them ended."""

    engines: list[Engine]
    router: Router
    options: argparse.Namespace
    until: float
    outcomes: Counter[str] = field(default_factory=Counter)
    hung: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    next_number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Send with all clients at once; returns when the last one is done."""
        with ThreadPoolExecutor(self.options.in_flight) as pool:
            for client in [
                pool.submit(self._client) for _ in range(self.options.in_flight)
            ]:
                client.result()

    def _client(self) -> None:
        options = self.options
        while time.monotonic() < self.until:
            with self.lock:
                number, self.next_number = self.next_number, self.next_number + 1
            dice = random.Random(f"{options.seed}/{number}")
            tokens = dice.randint(*options.prompt_tokens)
            body = {
                "input_ids": [dice.randrange(32, 127) for _ in range(tokens)],
                "sampling_params": {
                    "temperature": 0,
                    "ignore_eos": True,
                    "max_new_tokens": dice.randint(*options.new_tokens),
                },
            }
            leaves = dice.random() < options.leavers
            limit_s = dice.uniform(0.001, 0.5) if leaves else options.limit
            began = time.monotonic()
            outcome = self._send(body, limit_s, f"request {number}, {tokens} tokens")
            with self.lock:
                self.outcomes["left" if leaves and outcome == HUNG else outcome] += 1
                if not leaves:
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _send(self, body: dict, limit_s: float, name: str) -> str:
        """How a request ended; one that hangs is noted while the engines hold it."""
        connection = http.client.HTTPConnection(
            self.router.host, self.router.port, timeout=limit_s
        )
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            connection.request("POST", "/generate", json.dumps(body), headers)
            response = connection.getresponse()
            response.read()
            return SERVED if response.status == 200 else f"HTTP {response.status}"
        except TimeoutError:
            if limit_s >= self.options.limit:
                held = {engine.name: holdings(engine) for engine in self.engines}
                self.hung.append(f"{name}, at {time.strftime('%H:%M:%S')}: {held}")
            return HUNG
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()


def probe(router: Router) -> list[tuple[tuple[int, ...], int]]:
    """Tokens and verify steps of fixed prompts, each of which meets every prefill."""
    prompts = [p.ids for p in PROBE for _ in range(2)]
    replies = Client.router(router).generate(prompts, 24, parallel=1)
    return [(reply.output_ids, reply.verify_steps) for reply in replies]


def soak(engines: list[Engine], router: Router, options: argparse.Namespace) -> bool:
    """Run the traffic, print what was found, and say whether it passes."""
    before = probe(router)
    warm_up = Traffic(engines, router, options, time.monotonic() + 600)
    while warm_up.next_number < WARM_UP:
        warm_up.until = time.monotonic() + 1
        warm_up.run()
    memory = {engine.name: resident_mib(engine) for engine in engines}
    traffic = Traffic(engines, router, options, time.monotonic() + 60 * options.minutes)
    traffic.next_number = warm_up.next_number
    traffic.run()
    hung = warm_up.hung + traffic.hung
    left_over = {e.name: empty_within(e, 40.0) for e in engines}
    grown = {e.name: resident_mib(e) - memory[e.name] for e in engines}
    same = probe(router) == before
    dead = [e.name for e in engines if not e.alive()]
    total = warm_up.outcomes + traffic.outcomes
    print(", ".join(f"{count} {name}" for name, count in total.most_common()))
    print(f"slowest answer {traffic.slowest_s:.1f} s")
    print(f"hung: {len(hung)}" + "".join(f"\n  {text}" for text in hung))
    print(
        f"held afterwards: {({k: v for k, v in left_over.items() if v}) or 'nothing'}"
    )
    print("memory: " + ", ".join(f"{k} {v:+.0f} MiB" for k, v in grown.items()))
    print(f"probe equal: {'yes' if same else 'no'}; ended: {dead or 'none'}")
    answered = set(total) <= {SERVED, "left"}
    flat = max(grown.values()) <= GROWTH_MIB
    return answered and flat and same and not (dead or any(left_over.values()))


def above_zero(text: str) -> float:
    """A finite number above 0, of an option."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")


def share(text: str) -> float:
    """A part of a whole, of an option."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"expected 0 to 1, found {text!r}")


def count(text: str) -> int:
    """1 or more, of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text!r}")
    return int(text)


def main() -> int:
    """Start the engines, soak them, and exit with 1 unless all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = "minutes of traffic after the warm-up (default: %(default)s)"
    add("--minutes", metavar="N", type=above_zero, default=6, help=text)
    text = "requests are drawn from it (default: %(default)s)"
    add("--seed", metavar="N", type=int, default=1, help=text)
    text = "clients at a time (default: %(default)s)"
    add("--in-flight", metavar="N", type=count, default=8, help=text)
    text = "part of the clients that leave early, 0 to 1 (default: %(default)s)"
    add("--leavers", metavar="SHARE", type=share, default=0.05, help=text)
    low_high: dict[str, Any] = {"nargs": 2, "metavar": ("LOW", "HIGH"), "type": count}
    text = "tokens of a prompt (default: 1 700)"
    add("--prompt-tokens", default=(1, 700), help=text, **low_high)
    text = "tokens of an answer (default: 1 48)"
    add("--new-tokens", default=(1, 48), help=text, **low_high)
    text = "seconds after which a request counts as hung (default: %(default)s)"
    add("--limit", metavar="SECONDS", type=above_zero, default=90, help=text)
    text = "prefill engines, one for each word (default: native tail-pp2)"
    add(
        "--prefills",
        nargs="+",
        choices=PREFILLS,
        default=["native", "tail-pp2"],
        help=text,
    )
    text = "do not ask for the patch set, to compare with an SGLang that has only `cpu` of it"
    add("--stock", action="store_true", help=text)
    options = parser.parse_args()
    if options.stock and set(options.prefills) != {"native"}:
        parser.error("--stock: SGLang serves --prefills native only")
    for name in ("prompt_tokens", "new_tokens"):
        low, high = getattr(options, name)
        if low > high:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: expected LOW HIGH, found {low} {high}")
    try:
        return run(options)
    except BedError as error:
        print(f"\nsoak: {error}", file=sys.stderr)
        return 2 if error.usage else 1


def run(options: argparse.Namespace) -> int:
    """Start the engines and soak them; BedError when they cannot run here."""
    check_installed()
    if not options.stock:
        check_applied()
    specs = [prefill_spec(kind, n) for n, kind in enumerate(options.prefills)]
    decode = EngineSpec("decode", "decode", MODELS.target, MODELS.draft_swa, env=EXPECT)
    with Bed("soak", keep_logs=True) as bed:
        engines = bed.start([decode, *specs])
        router = bed.start_router(
            RouterSpec(
                "router", [e.endpoint for e in engines[1:]], [engines[0].endpoint]
            )
        )
        passed = soak(engines, router, options)
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
