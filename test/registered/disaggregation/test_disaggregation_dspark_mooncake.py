"""Mooncake in place of NIXL: what other modules claim, on as few engines as will do.

KV of target and draft, and hidden states, cross over Mooncake's TCP transport. Two
prefills and two decodes make four pairs, of one and two stages, with and without overlap
on decode; two more have two ranks; then a tail. Mooncake, told no layer ids, would guess
where V begins from whether one count of layers divides the other; for both stages here
that guess is wrong, and the draft's context would show it. `--transfer-backend mooncake`
runs the other modules over Mooncake, with all they claim.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from pd_faults import (
    TIMEOUTS,
    abort_at_random,
    assert_answered,
    assert_recovered,
    control_port,
    control_ports,
    during_requests,
    pause,
    signal_group,
    throw_frames,
)
from pd_mismatch import LIMIT_S, ask, spec, stop_and_free
from pd_parity import (
    assert_both_paths_ran,
    assert_moved,
    assert_parity,
    largest_batch,
    native_specs,
    route,
)
from pd_prompts import PROMPT_SETS, References, send
from pd_tail import SETS, decode_spec, prefill_spec
from pd_tail import assert_moved as assert_tail_moved

from dspark_pd.bed import MODELS, Bed, Client, Engine, EngineSpec, Router
from dspark_pd.bed.leftovers import empty_within

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("mooncake")]

OVER = {"transfer_backend": "mooncake"}
# SGLang's own: every seventh step retracts, whether or not the pool is full.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
FRAMES = 1000
ALL, FEW = ("short", "mixed", "chunked", "beyond"), ("short", "chunked")
PAIRS = {"p-to-d": ALL, "pp2-to-d": ALL, "p-to-d2": ALL, "pp2-to-d2": FEW}
# Ranks that are not equal move KV token by token, a head of each at a time.
RANKS = {"tp2-to-dtp2": ALL, "p-to-dtp2": FEW, "tp2-to-d": FEW}


def retracted(decode: Engine) -> int:
    """Requests that lost their place, from the log."""
    found = re.findall(r"#retracted_reqs: (\d+)", decode.log_text())
    return sum(map(int, found))


@dataclass(frozen=True)
class Fleet:
    """Engines by name; every prefill hands over to every decode."""

    engines: dict[str, Engine]

    def client(self, pair: str) -> Client:
        prefill, decode = pair.split("-to-")
        return Client.direct(self.engines[prefill], self.engines[decode])

    def with_others(self, bed: Bed, specs: dict[str, EngineSpec]) -> Iterator[None]:
        """The body of a fixture that adds engines for a while."""
        self.engines.update(zip(specs, bed.start(list(specs.values())), strict=True))
        yield
        bed.stop(*(self.engines.pop(name) for name in specs))

    def assert_parity(
        self,
        references: References,
        pair: str,
        names: Sequence[str],
        copies: int = 4,
    ) -> None:
        """Answers of unified serving, and the bytes of KV with `copies` of metadata."""
        prefill = self.engines[pair.split("-to-")[0]]
        for name in names:
            before = prefill.bytes_posted()
            replies = send(self.client(pair), name)
            assert_parity(replies, name, references)
            assert_both_paths_ran(replies)
            assert_moved(prefill.bytes_posted() - before, name, copies)


@pytest.fixture(scope="module")
def fleet(bed: Bed, references: References, mooncake: None) -> Iterator[Fleet]:
    """One prefill and one decode for the whole module; classes add others."""
    references.get(SETS[0], MODELS.draft_swa)
    prefill, decode = native_specs("mc", **OVER)
    specs = {
        "p": replace(prefill, env=TIMEOUTS),
        # One test reads batch sizes from the log.
        "d": replace(decode, args={"decode-log-interval": 1}),
    }
    fleet = Fleet(dict(zip(specs, bed.start(list(specs.values())), strict=True)))
    yield fleet
    bed.stop(*fleet.engines.values())


@pytest.fixture(scope="class")
def more(bed: Bed, fleet: Fleet) -> Iterator[None]:
    """Engines poll while they wait, so these do not outlive their class."""
    prefill, decode = native_specs("mc-2", **OVER)
    specs = {
        "pp2": replace(prefill, pp=2),
        "d2": replace(decode, overlap=False, env=RETRACT),
    }
    yield from fleet.with_others(bed, specs)


@pytest.mark.usefixtures("more")
class TestNative:
    """One stage and two, with and without overlap on decode."""

    @pytest.mark.parametrize("pair", PAIRS)
    def test_mooncake_parity(
        self, fleet: Fleet, references: References, pair: str
    ) -> None:
        fleet.assert_parity(references, pair, PAIRS[pair])

    def test_mooncake_batches_and_retraction(self, fleet: Fleet) -> None:
        """What ran before did run in batches, and was retracted where that was asked."""
        assert largest_batch(fleet.engines["d"]) >= 3
        assert retracted(fleet.engines["d"]) == 0
        assert retracted(fleet.engines["d2"]) > 0

    def test_mooncake_radix_hit(self, fleet: Fleet, references: References) -> None:
        fleet.engines["pp2"].flush_cache()
        cold, warm = (send(fleet.client("pp2-to-d"), "radix") for _ in range(2))
        assert [reply.cached_tokens for reply in cold] == [0, 0, 0]
        for reply in warm:
            assert reply.cached_tokens >= reply.prompt_tokens - 1
        assert_parity(cold, "radix", references)
        assert_parity(warm, "radix", references)

    def test_mooncake_aborts(self, fleet: Fleet, references: References) -> None:
        engines = fleet.engines["pp2"], fleet.engines["d"]
        abort_at_random(*engines, PROMPT_SETS["chunked"])
        assert_parity(send(fleet.client("pp2-to-d"), "short"), "short", references)
        assert [empty_within(engine) for engine in engines] == [{}, {}]


class TestTensorParallel:
    """Two ranks on both engines, or on one of them."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def ranks(cls, bed: Bed, fleet: Fleet) -> Iterator[None]:
        prefill, decode = native_specs("mc-tp2", tp=2, **OVER)
        yield from fleet.with_others(bed, {"tp2": prefill, "dtp2": decode})

    @pytest.mark.parametrize("pair", RANKS)
    def test_mooncake_ranks(
        self, fleet: Fleet, references: References, pair: str
    ) -> None:
        fleet.assert_parity(references, pair, RANKS[pair], copies=8)


@dataclass(frozen=True)
class Tail:
    """A decode with a pool that is too small, and its prefills, one for each PP size."""

    decode: Engine
    prefills: dict[int, Engine]

    def client(self, pp: int) -> Client:
        return Client.direct(self.prefills[pp], self.decode)


@pytest.fixture(scope="class")
def tail(bed: Bed, fleet: Fleet) -> Iterator[Tail]:
    small = {"max-total-tokens": 640, "num-reserved-decode-tokens": 8}
    decode, *prefills = bed.start(
        [
            decode_spec("mc-tail-d", args=small, **OVER),
            prefill_spec("mc-tail-p", **OVER),
            prefill_spec("mc-tail-p2", pp=2, **OVER),
        ]
    )
    yield Tail(decode, dict(zip((1, 2), prefills, strict=True)))
    bed.stop(decode, *prefills)


class TestTail:
    """Prefill has no draft; decode gets hidden states for one that is all sliding."""

    @pytest.mark.parametrize("pp", [1, 2])
    def test_mooncake_tail_parity(
        self, tail: Tail, references: References, pp: int
    ) -> None:
        for name in SETS:
            before = tail.prefills[pp].bytes_posted()
            replies = send(tail.client(pp), name)
            assert_parity(replies, name, references, MODELS.draft_swa)
            moved = tail.prefills[pp].bytes_posted() - before
            assert_tail_moved(moved, name, pp)

    def test_mooncake_tail_survives_retraction(
        self, tail: Tail, references: References
    ) -> None:
        """A retracted request resumes with the draft KV it had."""
        name = "sliding-beyond"
        replies = send(tail.client(2), name, parallel=16)
        assert retracted(tail.decode) > 0
        assert_parity(replies, name, references, MODELS.draft_swa)

    def test_mooncake_tail_survives_aborts(
        self, tail: Tail, references: References
    ) -> None:
        abort_at_random(tail.prefills[2], tail.decode, PROMPT_SETS["sliding-long"])
        replies = send(tail.client(2), "sliding")
        assert_parity(replies, "sliding", references, MODELS.draft_swa)
        for engine in (tail.decode, *tail.prefills.values()):
            assert empty_within(engine) == {}
            assert "Traceback" not in engine.log_text()


DECODES = {
    "PD-PAGE-SIZE": {**OVER, "page_size": 16},
    "PD-BACKEND": {"args": {"disaggregation-transfer-backend": "nixl"}},
}


class TestMismatch:
    """Decodes that do not fit the prefill; `mismatch` has the others."""

    @pytest.fixture(scope="class")
    @classmethod
    def others(cls, bed: Bed, fleet: Fleet) -> Iterator[dict[str, Engine]]:
        specs = [
            spec(f"mc-{code.lower()}", "decode", **options)
            for code, options in DECODES.items()
        ]
        engines = dict(zip(DECODES, bed.start(specs), strict=True))
        yield engines
        bed.stop(*engines.values())

    @pytest.mark.parametrize("code", DECODES)
    def test_mooncake_mismatch_is_refused(
        self,
        bed: Bed,
        fleet: Fleet,
        others: dict[str, Engine],
        references: References,
        code: str,
    ) -> None:
        prefill = fleet.engines["p"]
        pair = route(bed, prefill, others[code])
        answers = [ask(pair.router.url) for _ in range(2)]
        bed.stop(pair.router)
        assert all(f"[{code}]" in answer.body for answer in answers), answers
        # One pause of a busy machine is not the engines'.
        assert min(answer.seconds for answer in answers) < LIMIT_S
        for engine in (prefill, others[code]):
            assert f"[{code}]" in engine.log_text(), f"{engine.name} does not say why"
            assert empty_within(engine) == {}
        assert_parity(send(fleet.client("p-to-d"), "short"), "short", references)


class TestFaults:
    """Decode stopped, hostile messages at both engines, decode killed; `fault` has more."""

    @pytest.fixture(scope="class")
    @classmethod
    def router(cls, bed: Bed, fleet: Fleet) -> Iterator[Router]:
        router = route(bed, fleet.engines["p"], fleet.engines["d"]).router
        yield router
        bed.stop(router)

    def test_mooncake_decode_stopped(self, fleet: Fleet, router: Router) -> None:
        decode = fleet.engines["d"]
        answers = during_requests(router.url, 4, lambda: pause(decode, 4.0), 0.3)
        assert_answered(answers)
        assert_recovered(router.url, fleet.engines["p"], decode)

    def test_mooncake_hostile_frames(self, fleet: Fleet, router: Router) -> None:
        """The threads that read them go on, and requests under way are served."""
        prefill, decode = fleet.engines["p"], fleet.engines["d"]
        ports = [control_port(prefill), *control_ports(decode)]
        assert len(ports) > 1, "decode's control port was not found"

        def throw() -> None:
            for seed, port in enumerate(ports):
                throw_frames(prefill.host, port, FRAMES, seed)

        answers = during_requests(router.url, 2, throw, 0.3)
        assert_answered(answers)
        assert [answer.status for answer in answers] == [200, 200]
        assert_recovered(router.url, prefill, decode)

    def test_mooncake_decode_killed(
        self, bed: Bed, fleet: Fleet, router: Router
    ) -> None:
        """Its sessions are dead for prefill; the restarted one has others."""
        decode = fleet.engines["d"]
        answers = during_requests(
            router.url, 4, lambda: signal_group(decode, signal.SIGKILL), 0.3
        )
        ports = stop_and_free(bed, decode)
        (fleet.engines["d"],) = bed.start([replace(decode.spec, **ports)])
        assert_answered(answers)
        assert_recovered(router.url, fleet.engines["p"], fleet.engines["d"])
