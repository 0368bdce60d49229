"""A request has a leg on each engine: when one fails, the other ends and the client hears.

Two prefills and one decode with pools of different sizes, behind routers with the
recipe's flags. Measured: the answer, the time to it, and that nothing stays behind.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from pd_faults import (
    ask_many,
    during_requests,
    is_gone,
    killable,
    raise_in_scheduler,
    signal_group,
    wait_until,
)
from pd_mismatch import LIMIT_S, Answer, ask, spec

from dspark_pd.bed import Bed, Engine, Router, RouterSpec
from dspark_pd.bed.leftovers import empty_within

pytestmark = pytest.mark.e2e

SMALL, MEDIUM = 320, 800  # tokens in the pools of one prefill and of decode
LIMITS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "120",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    # Decode keeps the KV of a request whose prefill does not confirm its abort.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}
# Of decode, so that several requests fit in its pool.
POOL = {"max-total-tokens": MEDIUM, "num-reserved-decode-tokens": 32}
NEW_TOKENS = 64
TOO_LONG = "exceeds the maximum allowed length"
NO_PREFILL_S = 14  # decode asks fifteen times, once a second
OBSERVED: dict[str, Answer] = {}


@dataclass
class Legs:
    """`small` and `large` are prefills; each router sends to the engines of its name."""

    small: Engine
    large: Engine
    decode: Engine
    routers: dict[str, Router]
    missing: Future[Answer]  # of a request that begins before the tests and lasts 14 s
    orders: Path

    def url(self, name: str) -> str:
        return self.routers[name].url

    def hold_nothing(self, *engines: Engine) -> None:
        for engine in engines or (self.small, self.large, self.decode):
            assert empty_within(engine) == {}, f"{engine.name} still holds something"


@pytest.fixture(scope="module")
def legs(bed: Bed, tmp_path_factory) -> Iterator[Legs]:
    orders = tmp_path_factory.mktemp("orders")
    small, large, decode = bed.start(
        [
            spec("leg-small", "prefill", args={"max-total-tokens": SMALL}, env=LIMITS),
            spec("leg-large", "prefill", env={**LIMITS, **killable(orders)}),
            spec("leg-d", "decode", args=POOL, env=LIMITS),
        ]
    )
    chosen = {"small": [small], "large": [large], "both": [small, large]}
    routers = bed.start_routers(
        [
            RouterSpec(f"leg-r-{name}", [p.endpoint for p in ps], [decode.endpoint])
            for name, ps in chosen.items()
        ]
    )
    by_name = dict(zip(chosen, routers, strict=True))
    with ThreadPoolExecutor(1) as pool:
        missing = pool.submit(
            ask,
            decode.url,
            bootstrap_host="127.0.0.1",
            bootstrap_port=1,
            bootstrap_room=1,
        )
        for router in routers:  # first contact takes longer than later ones
            assert wait_until(lambda url=router.url: ask(url).served, 30) is not None
        yield Legs(small, large, decode, by_name, missing, orders)
    bed.stop(small, large, decode, *routers)


def prompt(tokens: int) -> list[int]:
    return [1 + place % 90 for place in range(tokens)]


def check_refused(fault: str, answer: Answer, text: str, stream: bool = False) -> None:
    """SGLang says in a stream of status 200 that a request is refused."""
    OBSERVED[fault] = answer
    assert answer.status == (200 if stream else 400), answer
    assert text in answer.body
    assert not stream or '"status_code":400' in answer.body.replace(" ", "")
    assert answer.seconds < LIMIT_S


@pytest.mark.parametrize("stream", [False, True])
def test_leg_that_prefill_refuses(legs: Legs, stream: bool) -> None:
    answer = ask(legs.url("small"), input_ids=prompt(500), stream=stream)
    check_refused(f"prefill refuses, stream={stream}", answer, TOO_LONG, stream)
    legs.hold_nothing(legs.small)


def test_leg_of_a_batch_that_prefill_refuses(legs: Legs) -> None:
    """One prompt of two."""
    answer = ask(legs.url("small"), input_ids=[prompt(20), prompt(500)])
    check_refused("prefill refuses one of a batch", answer, TOO_LONG)
    legs.hold_nothing(legs.small)


@pytest.mark.parametrize("stream", [False, True])
def test_leg_that_decode_refuses(legs: Legs, stream: bool) -> None:
    answer = ask(legs.url("large"), input_ids=prompt(900), stream=stream)
    check_refused(f"decode refuses, stream={stream}", answer, TOO_LONG, stream)
    legs.hold_nothing(legs.large)
    assert "[PD-BAD-REQUEST]" in legs.large.log_text(), "prefill was not told why"


def test_leg_that_decode_can_never_place(legs: Legs) -> None:
    """It fits in the pool, without the tokens that decode reserves for its answer."""
    answer = ask(legs.url("large"), input_ids=prompt(MEDIUM - 10))
    check_refused("decode can never place it", answer, "exceeds the maximum number")
    legs.hold_nothing(legs.large)


def test_leg_on_one_of_two_prefills_that_dies(legs: Legs) -> None:
    """Its requests are sent again, and those of the other prefill never notice."""
    url = legs.url("both")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(
            during_requests,
            url,
            24,
            lambda: signal_group(legs.small, signal.SIGKILL),
            0.2,
            NEW_TOKENS,
        )
        time.sleep(0.5)
        late = ask_many(url, 12, timeout_s=60)
        answers = [*early.result(), *late]
    OBSERVED["one prefill of two killed"] = max(answers, key=lambda a: a.seconds)
    assert [a.status for a in answers] == [200] * len(answers), answers
    after = ask_many(url, 12, timeout_s=60)
    OBSERVED["  later requests"] = max(after, key=lambda a: a.seconds)
    assert all(answer.served for answer in after)
    legs.hold_nothing(legs.large)


def test_leg_without_a_prefill_names_it(legs: Legs) -> None:
    answer = OBSERVED["no prefill at the address"] = legs.missing.result(30)
    assert answer.status == 500
    for text in ("[PD-NO-PREFILL]", "127.0.0.1:1 ", "15 attempts"):
        assert text in answer.body
    assert answer.seconds < NO_PREFILL_S + 5
    legs.hold_nothing(legs.decode)  # nor anything of the tests before


def test_leg_on_a_prefill_whose_scheduler_raises(legs: Legs) -> None:
    """Decode ends its legs at once; the router answers when prefill's front end is gone."""
    url = legs.url("large")
    assert ask(url).served
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            during_requests, url, 4, lambda: raise_in_scheduler(legs.orders), 0.1
        )
        gone = wait_until(lambda: is_gone(legs.large), 20)
        answers = asked.result()
    assert gone is not None, "prefill did not end"
    OBSERVED["prefill's scheduler raised"] = max(answers, key=lambda a: a.seconds)
    assert all(answer.status is not None for answer in answers), answers
    legs.hold_nothing(legs.decode)


def test_leg_table(capsys) -> None:
    """Print the slowest answer of each kind."""
    assert OBSERVED, "no leg was lost"
    with capsys.disabled():
        print(f"\n{'what happened':<34} {'slowest answer':>14}  status")
        for fault, answer in OBSERVED.items():
            print(f"{fault:<34} {answer.seconds:>12.2f} s  {answer.status}")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-m", "e2e"]))
