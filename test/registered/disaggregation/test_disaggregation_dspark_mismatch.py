"""Engines that disagree: the client gets a reason at once, everybody else goes on.

Each case pairs engines that cannot work together (or that can, although they differ)
behind a router of their own. One good prefill and one good decode engine are shared by
all cases and must serve after each. Before a case's first request the doctor is asked
about the two running engines; it must predict the outcome. The last test prints the cases
with the seconds to the error.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from pd_mismatch import (
    LIMIT_S,
    Answer,
    Diagnosis,
    ask,
    consult_doctor,
    draft_of_other_shape,
    draft_of_other_weights,
    route,
    running_from,
    spec,
    stop_and_free,
    tree_with,
    unhealthy,
)

from dspark_pd.bed import MODELS, Bed, Engine, EngineSpec

pytestmark = pytest.mark.e2e

CAPTURE = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
LAYER_IDS = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
# Decode's default: SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.
HEARTBEAT_S = 5.0
OBSERVED: dict[str, tuple[Answer, Diagnosis]] = {}
# A decode without the set judges nothing: the doctor knows it by its arguments, prefill by
# the memory it registers.
DOCTOR_SAYS = {"PD-REGISTRATION": "PD-DRAFT-ONLY-ON-PREFILL"}


@dataclass(frozen=True)
class Shared:
    """The good pair of the module and the router before it."""

    bed: Bed
    prefill: Engine
    decode: Engine
    url: str
    trees: dict = field(default_factory=dict)

    def serves(self) -> bool:
        return ask(self.url).served


@pytest.fixture(scope="module")
def shared(bed: Bed, tmp_path_factory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("trees")
    trees = {
        "stock": tree_with(folder / "stock", "cpu"),
        "no layer ids": tree_with(
            folder / "partial", "native", "robustness", "agreement", "cpu"
        ),
    }
    # Releases before 0.5.23 report none for plain pools, as SGLang's own file here.
    reports_ids = "sglang/srt/disaggregation/utils.py"
    shutil.copy(trees["stock"] / reports_ids, trees["no layer ids"] / reports_ids)
    prefill, decode = bed.start([spec("good-p", "prefill"), spec("good-d", "decode")])
    router = route(bed, prefill, decode)
    shared = Shared(bed, prefill, decode, router.url, trees)
    assert shared.serves()
    yield shared
    bed.stop(router, prefill, decode)


def observe(shared: Shared, case: str, prefill: Engine, decode: Engine) -> Answer:
    """Ask the pair behind a fresh router; keep the answer for the table."""
    diagnosis = consult_doctor(prefill, decode)
    router = route(shared.bed, prefill, decode)
    try:
        answer = ask(router.url)
        again = ask(router.url)
    finally:
        shared.bed.stop(router)
    OBSERVED[case] = (answer, diagnosis)
    # One pause of a busy machine is not the engines'.
    quicker = min(answer.seconds, again.seconds)
    assert answer.served or quicker < LIMIT_S, f"{case}: {quicker:.1f} s"
    assert diagnosis.works == answer.served, f"the doctor said {diagnosis}"
    assert again.served == answer.served, "the second request ended differently"
    return answer


def assert_refused(shared, case, answer: Answer, code: str, *engines: Engine) -> None:
    """The client gets the reason in time, and all engines stay healthy."""
    assert not answer.served, f"{case} was accepted"
    assert f"[{code}]" in answer.body, answer.body
    assert DOCTOR_SAYS.get(code, code) in OBSERVED[case][1].codes
    assert not unhealthy(shared.prefill, shared.decode, *engines)
    assert shared.serves(), "the good pair no longer serves"


@contextlib.contextmanager
def started(
    shared: Shared, specs: dict[str, EngineSpec]
) -> Iterator[dict[str, Engine]]:
    """Engines by name, all started at once: mostly they wait for each other's imports."""
    engines = shared.bed.start(list(specs.values()))
    yield dict(zip(specs, engines, strict=True))
    shared.bed.stop(*engines)


def in_words(case: str) -> str:
    """A test's id from its case."""
    return case.replace(" ", "-")


def test_mismatch_none_is_served(shared: Shared) -> None:
    """The good pair itself: served, and the doctor has nothing to say."""
    answer = observe(shared, "mismatch: none", shared.prefill, shared.decode)
    assert answer.served, answer.body
    assert OBSERVED["mismatch: none"][1].codes == ()


# case -> (what both logs and the client must say, how decode differs)
DECODES = {
    "mismatch: DSPARK only on prefill": ("PD-DRAFT-ONLY-ON-PREFILL", {"draft": None}),
    "mismatch: page size 1 and 16": ("PD-PAGE-SIZE", {"page_size": 16}),
    "mismatch: KV dtype": ("PD-KV-DTYPE", {"args": {"kv-cache-dtype": "bfloat16"}}),
    "mismatch: draft KV dtype": (
        "PD-DRAFT-KV-DTYPE",
        {"args": {"speculative-draft-kv-cache-dtype": "bfloat16"}},
    ),
}


class TestDecodesThatDiffer:
    """Against the good prefill; each is refused, with the reason in both logs."""

    @pytest.fixture(scope="class")
    @classmethod
    def decodes(cls, shared: Shared) -> Iterator[dict[str, Engine]]:
        specs = {
            case: spec(f"bad-d{number}", "decode", **options)
            for number, (case, (_, options)) in enumerate(DECODES.items())
        }
        with started(shared, specs) as engines:
            yield engines

    @pytest.mark.parametrize("case", DECODES, ids=in_words)
    def test_refused(self, shared: Shared, decodes: dict, case: str) -> None:
        code, decode = DECODES[case][0], decodes[case]
        answer = observe(shared, case, shared.prefill, decode)
        assert_refused(shared, case, answer, code, decode)
        for engine in (shared.prefill, decode):
            assert f"[{code}]" in engine.log_text(), f"{engine.name} does not say why"


DRAFTS = {
    "mismatch: draft of other shape": ("PD-DRAFT-GEOMETRY", draft_of_other_shape),
    "mismatch: draft of other weights": ("PD-DRAFT-WEIGHTS", draft_of_other_weights),
}
WORKING = {
    "mismatch: block of 4 and 2, harmless": (
        "PD-BLOCK-SIZE",
        {"args": {"speculative-dspark-block-size": 2}},
    ),
    "mismatch: TP 1 to 2, works": (None, {"tp": 2}),
}


class TestDrafts:
    """Another draft is refused; another block size or rank count is not."""

    @pytest.fixture(scope="class")
    @classmethod
    def decodes(cls, shared: Shared, tmp_path_factory) -> Iterator[dict[str, Engine]]:
        specs = {}
        for number, (case, (_, make)) in enumerate(DRAFTS.items()):
            draft = make(tmp_path_factory.mktemp("draft"))
            specs[case] = spec(f"draft-d{number}", "decode", draft)
        for number, (case, (_, options)) in enumerate(WORKING.items()):
            specs[case] = spec(f"other-d{number}", "decode", **options)
        with started(shared, specs) as engines:
            yield engines

    @pytest.mark.parametrize("case", DRAFTS, ids=in_words)
    def test_refused(self, shared: Shared, decodes: dict, case: str) -> None:
        answer = observe(shared, case, shared.prefill, decodes[case])
        assert_refused(shared, case, answer, DRAFTS[case][0], decodes[case])

    @pytest.mark.parametrize("case", WORKING, ids=in_words)
    def test_served(self, shared: Shared, decodes: dict, case: str) -> None:
        code, decode = WORKING[case][0], decodes[case]
        answer = observe(shared, case, shared.prefill, decode)
        assert answer.served, answer.body
        assert not unhealthy(shared.prefill, decode)
        assert code is None or f"[{code}]" in decode.log_text()


class TestWithoutThisSet:
    """Engines of a stock SGLang, and a prefill without a draft."""

    @pytest.fixture(scope="class")
    @classmethod
    def others(cls, shared: Shared) -> Iterator[dict[str, Engine]]:
        stock = running_from(shared.trees["stock"])
        specs = {
            "stock-d": spec("stock-d", "decode", env=stock),
            "stock-plain-d": spec("stock-plain-d", "decode", None, env=stock),
            "stock-p": spec("stock-p", "prefill", env=stock),
            "plain-p": spec("plain-p", "prefill", None),
        }
        with started(shared, specs) as engines:
            yield engines

    def test_mismatch_stock_decode_that_fits(self, shared: Shared, others) -> None:
        case = "mismatch: stock decode with DSPARK, works"
        answer = observe(shared, case, shared.prefill, others["stock-d"])
        assert answer.served, answer.body

    def test_mismatch_stock_decode_without_draft(self, shared: Shared, others) -> None:
        decode, case = others["stock-plain-d"], "mismatch: stock decode without DSPARK"
        answer = observe(shared, case, shared.prefill, decode)
        assert_refused(shared, case, answer, "PD-REGISTRATION", decode)
        assert "fewer KV regions (8) than prefill (12)" in answer.body

    def test_mismatch_stock_prefill(self, shared: Shared, others) -> None:
        """It has no description."""
        prefill, case = others["stock-p"], "mismatch: stock prefill"
        answer = observe(shared, case, prefill, shared.decode)
        assert_refused(shared, case, answer, "PD-UNDESCRIBED-PREFILL", prefill)

    def test_mismatch_prefill_without_draft(self, shared: Shared, others) -> None:
        prefill, case = others["plain-p"], "mismatch: DSPARK only on decode"
        answer = observe(shared, case, prefill, shared.decode)
        assert_refused(shared, case, answer, "PD-COLD-DRAFT", prefill)


class TestPlainPrefills:
    """A cold draft that was allowed, and stages whose layers cannot be placed."""

    @pytest.fixture(scope="class")
    @classmethod
    def engines(cls, shared: Shared) -> Iterator[dict[str, Engine]]:
        allow = {"SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT": "1"}
        no_ids = running_from(shared.trees["no layer ids"])
        specs = {
            "cold-p": spec("cold-p", "prefill", None),
            "cold-d": spec("cold-d", "decode", env=allow),
            "staged-p": spec("staged-p", "prefill", None, pp=2, env=no_ids),
            "staged-d": spec("staged-d", "decode", None, env=no_ids),
        }
        with started(shared, specs) as engines:
            yield engines

    def test_mismatch_cold_draft_that_is_asked_for(
        self, shared: Shared, engines
    ) -> None:
        """The opt-out restores what upstream does, and decode says so once."""
        cold, case = engines["cold-d"], "mismatch: DSPARK only on decode, opt-out"
        assert observe(shared, case, engines["cold-p"], cold).served
        assert cold.log_text().count("[PD-COLD-DRAFT-ALLOWED]") == 1

    def test_mismatch_stages_without_layer_ids(self, shared: Shared, engines) -> None:
        """PP 2 on prefill where plain MHA pools publish no layer ids.

        Mooncake places stages of equal size of a target alone.
        """
        pair = engines["staged-p"], engines["staged-d"]
        case = "mismatch: PP 2 to 1 without layer ids"
        answer = observe(shared, case, *pair)
        if pair[0].spec.transfer_backend == "mooncake":
            assert answer.served, answer.body
        else:
            assert_refused(shared, case, answer, "PD-PP-LAYER-IDS", *pair)


class TestTails:
    """Prefill and decode disagree on the hidden states that cross."""

    @pytest.fixture(scope="class")
    @classmethod
    def engines(cls, shared: Shared) -> Iterator[dict[str, Engine]]:
        def capture(ids: str, tokens: str) -> dict[str, str]:
            return {**CAPTURE, LAYER_IDS: ids, TAIL: tokens}

        specs = {
            "decode": spec("tail-d", "decode", MODELS.draft_swa, env={TAIL: "32"}),
            "short": spec("short-p", "prefill", None, env=capture("0,1,2", "16")),
            "narrow": spec("narrow-p", "prefill", None, env=capture("0,1", "32")),
        }
        with started(shared, specs) as engines:
            yield engines

    def check(self, shared: Shared, case: str, code: str, *pair: Engine) -> None:
        assert_refused(shared, case, observe(shared, case, *pair), code, *pair)

    def test_mismatch_tail_tokens(self, shared: Shared, engines) -> None:
        case, pair = "mismatch: tail of 16 and 32 tokens", ("short", "decode")
        self.check(shared, case, "PD-TAIL-TOKENS", *(engines[name] for name in pair))

    def test_mismatch_tail_layers(self, shared: Shared, engines) -> None:
        case, pair = "mismatch: captured layers", ("narrow", "decode")
        self.check(shared, case, "PD-TAIL-LAYERS", *(engines[name] for name in pair))

    def test_mismatch_tail_shorter_than_the_draft_reads(
        self, shared: Shared, engines
    ) -> None:
        """A decode without any variable learns of the tail and judges it."""
        case = "mismatch: a tail of 16 tokens, a draft that reads all"
        self.check(shared, case, "PD-TAIL-WINDOW", engines["short"], shared.decode)


def test_mismatch_prefill_restarted_with_other_flags(shared: Shared) -> None:
    """Same ports, another page size, then the right one: decode needs no restart.

    A request that meets the new prefill before decode's next heartbeat may be lost, but
    it is answered as soon as that heartbeat has noticed the restart.
    """
    first, decode = shared.bed.start(
        [spec("again-p", "prefill"), spec("again-d", "decode")]
    )
    router = route(shared.bed, first, decode)
    assert ask(router.url).served
    shared.bed.stop(router)
    ports = stop_and_free(shared.bed, first)
    for case, code, options in (
        (
            "mismatch: prefill restarted with page size 16",
            "PD-PAGE-SIZE",
            {"page_size": 16},
        ),
        ("mismatch: prefill restarted as it was, works", None, {}),
    ):
        [engine] = shared.bed.start([spec("again-p", "prefill", **ports, **options)])
        router = route(shared.bed, engine, decode)
        at_once = ask(router.url)
        shared.bed.stop(router)
        assert at_once.status is not None, at_once.body
        assert at_once.seconds < HEARTBEAT_S + LIMIT_S
        assert not (code and at_once.served), "served in spite of the page size"
        answer = observe(shared, case, engine, decode)
        if code is None:
            assert answer.served, answer.body
        else:
            assert_refused(shared, case, answer, code, engine, decode)
        stop_and_free(shared.bed, engine)
    shared.bed.stop(decode)


def test_mismatch_table(capsys) -> None:
    """Print every case with what happened and how long it took."""
    assert OBSERVED, "no case was run"
    with capsys.disabled():
        print(f"\n{'case':<48} {'outcome':<8} {'seconds':>7}  doctor, worst finding")
        for case, (answer, diagnosis) in OBSERVED.items():
            name = case.removeprefix("mismatch: ")
            outcome = "served" if answer.served else "refused"
            finding = (diagnosis.codes or ("nothing",))[0]
            print(f"{name:<48} {outcome:<8} {answer.seconds:>7.2f}  {finding}")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-m", "e2e"]))
