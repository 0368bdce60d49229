"""Engines that disagree: the client gets a reason at once, everybody else goes on.

Each row pairs engines that cannot work together (or that can, although they differ)
behind a router of their own. One good prefill and one good decode engine are shared by
all rows and must serve after each. Before a row's first request the doctor is asked
about the two running engines; it must foretell what happens. The last test prints rows
by seconds to the error.
"""

from __future__ import annotations

import time
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

from dspark_pd.bed import MODELS, Bed, Engine

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CAPTURE = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
LAYER_IDS = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
OBSERVED: dict[str, tuple[Answer, Diagnosis]] = {}
# An engine without the set is known to the doctor by its arguments, to its peer by the
# memory it registers.
DOCTOR_SAYS = {"PD-UNPATCHED-DECODE-NO-DRAFT": "PD-DRAFT-ONLY-ON-PREFILL"}


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
            folder / "partial", "native", "robustness", "handshake", "cpu"
        ),
    }
    prefill, decode = bed.start([spec("good-p", "prefill"), spec("good-d", "decode")])
    router = route(bed, prefill, decode)
    shared = Shared(bed, prefill, decode, router.url, trees)
    assert shared.serves()
    yield shared
    bed.stop(router, prefill, decode)


def observe(shared: Shared, row: str, prefill: Engine, decode: Engine) -> Answer:
    """Ask the pair behind a fresh router; keep the answer for the table."""
    diagnosis = consult_doctor(prefill, decode)
    router = route(shared.bed, prefill, decode)
    try:
        answer = ask(router.url)
        again = ask(router.url)
    finally:
        shared.bed.stop(router)
    OBSERVED[row] = (answer, diagnosis)
    assert diagnosis.works == answer.served, f"the doctor said {diagnosis}"
    assert again.served == answer.served, "the second request fared otherwise"
    return answer


def assert_refused(shared, row, answer: Answer, code: str, *engines: Engine) -> None:
    """The reason is in the client's error, in time, and nobody was harmed."""
    assert not answer.served, f"{row} was accepted"
    assert f"[{code}]" in answer.body, answer.body
    assert DOCTOR_SAYS.get(code, code) in OBSERVED[row][1].codes
    assert answer.seconds < LIMIT_S, f"{row}: {answer.seconds:.1f} s"
    assert not unhealthy(shared.prefill, shared.decode, *engines)
    assert shared.serves(), "the good pair no longer serves"


def start_one(shared: Shared, engine_spec) -> Engine:
    return shared.bed.start([engine_spec])[0]


def test_mismatch_none(shared: Shared) -> None:
    """The good pair itself: served, and the doctor has nothing to say."""
    answer = observe(shared, "mismatch: none", shared.prefill, shared.decode)
    assert answer.served, answer.body
    assert OBSERVED["mismatch: none"][1].codes == ()


DECODES = {
    "mismatch: DSPARK only on prefill": ("PD-DRAFT-ONLY-ON-PREFILL", {"draft": None}),
    "mismatch: page size 1 and 16": ("PD-PAGE-SIZE", {"page_size": 16}),
    "mismatch: KV dtype": ("PD-KV-DTYPE", {"args": {"kv-cache-dtype": "bfloat16"}}),
    "mismatch: draft KV dtype": (
        "PD-DRAFT-KV-DTYPE",
        {"args": {"speculative-draft-kv-cache-dtype": "bfloat16"}},
    ),
}


@pytest.mark.parametrize("row", DECODES, ids=lambda row: row.replace(" ", "-"))
def test_decode_that_differs(shared: Shared, row: str) -> None:
    code, options = DECODES[row]
    decode = start_one(shared, spec("bad-d", "decode", **options))
    answer = observe(shared, row, shared.prefill, decode)
    assert_refused(shared, row, answer, code, decode)
    assert f"[{code}]" in shared.prefill.log_text(), "prefill's log does not say why"
    shared.bed.stop(decode)


DRAFTS = {
    "mismatch: draft of other shape": ("PD-DRAFT-GEOMETRY", draft_of_other_shape),
    "mismatch: draft of other weights": ("PD-DRAFT-WEIGHTS", draft_of_other_weights),
}


@pytest.mark.parametrize("row", DRAFTS, ids=lambda row: row.replace(" ", "-"))
def test_draft_that_differs(shared: Shared, row: str, tmp_path) -> None:
    code, make = DRAFTS[row]
    decode = start_one(shared, spec("bad-d", "decode", make(tmp_path)))
    answer = observe(shared, row, shared.prefill, decode)
    assert_refused(shared, row, answer, code, decode)
    shared.bed.stop(decode)


PREFILLS = {
    "mismatch: DSPARK only on decode": ("PD-COLD-DRAFT", {"draft": None}, None),
    "mismatch: stock prefill": ("PD-UNPATCHED-PREFILL", {}, "stock"),
}
WORKING = {
    "mismatch: block of 4 and 2, harmless": (
        "PD-BLOCK-SIZE",
        {"args": {"speculative-dspark-block-size": 2}},
    ),
    "mismatch: TP 1 to 2, works": (None, {"tp": 2}),
}


@pytest.mark.parametrize("row", WORKING, ids=lambda row: row.replace(" ", "-"))
def test_difference_that_works(shared: Shared, row: str) -> None:
    code, options = WORKING[row]
    decode = start_one(shared, spec("other-d", "decode", **options))
    answer = observe(shared, row, shared.prefill, decode)
    assert answer.served, answer.body
    assert not unhealthy(shared.prefill, decode)
    assert code is None or f"[{code}]" in decode.log_text()
    shared.bed.stop(decode)


def test_mismatch_decode_without_this_set(shared: Shared) -> None:
    """A stock decode: served where it fits, refused by prefill where it does not."""
    env = running_from(shared.trees["stock"])
    fits = start_one(shared, spec("stock-d", "decode", env=env))
    row = "mismatch: stock decode with DSPARK, works"
    answer = observe(shared, row, shared.prefill, fits)
    assert answer.served, answer.body
    assert "[PD-UNPATCHED-DECODE]" in shared.prefill.log_text()
    shared.bed.stop(fits)
    plain = start_one(shared, spec("stock-plain", "decode", None, env=env))
    row = "mismatch: stock decode without DSPARK"
    answer = observe(shared, row, shared.prefill, plain)
    assert_refused(shared, row, answer, "PD-UNPATCHED-DECODE-NO-DRAFT", plain)
    shared.bed.stop(plain)


@pytest.mark.parametrize("row", PREFILLS, ids=lambda row: row.replace(" ", "-"))
def test_prefill_that_differs(shared: Shared, row: str) -> None:
    """DSPARK on decode only, and a prefill that cannot say what it runs."""
    code, options, tree = PREFILLS[row]
    env = running_from(shared.trees[tree]) if tree else {}
    prefill = start_one(shared, spec("bad-p", "prefill", env=env, **options))
    answer = observe(shared, row, prefill, shared.decode)
    assert_refused(shared, row, answer, code, prefill)
    shared.bed.stop(prefill)


def test_mismatch_cold_draft_that_is_asked_for(shared: Shared) -> None:
    """The opt-out restores what upstream does, and decode says so once."""
    allow = {"SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT": "1"}
    plain, cold = shared.bed.start(
        [spec("plain-p", "prefill", None), spec("cold-d", "decode", env=allow)]
    )
    row = "mismatch: DSPARK only on decode, opt-out"
    assert observe(shared, row, plain, cold).served
    assert cold.log_text().count("[PD-COLD-DRAFT-ALLOWED]") == 1
    shared.bed.stop(plain, cold)


def test_mismatch_stages_without_layer_ids(shared: Shared) -> None:
    """PP 2 on prefill where plain MHA pools publish no layer ids."""
    env = running_from(shared.trees["no layer ids"])
    prefill, decode = shared.bed.start(
        [
            spec("staged-p", "prefill", None, pp=2, env=env),
            spec("staged-d", "decode", None, env=env),
        ]
    )
    row = "mismatch: PP 2 to 1 without layer ids"
    answer = observe(shared, row, prefill, decode)
    assert_refused(shared, row, answer, "PD-PP-LAYER-IDS", prefill, decode)
    shared.bed.stop(prefill, decode)


def test_mismatch_tails(shared: Shared) -> None:
    """Prefill and decode disagree on the tail's length or on the captured layers."""
    decode = start_one(
        shared, spec("tail32-d", "decode", MODELS.draft_swa, env={TAIL: "32"})
    )
    for row, code, ids, tokens in (
        ("mismatch: tail of 16 and 32 rows", "PD-TAIL-TOKENS", "0,1,2", "16"),
        ("mismatch: captured layers", "PD-TAIL-LAYERS", "0,1", "32"),
    ):
        env = {**CAPTURE, LAYER_IDS: ids, TAIL: tokens}
        prefill = start_one(shared, spec("tail-p", "prefill", None, env=env))
        answer = observe(shared, row, prefill, decode)
        assert_refused(shared, row, answer, code, prefill, decode)
        shared.bed.stop(prefill)
    shared.bed.stop(decode)


def test_mismatch_prefill_restarted_with_other_flags(shared: Shared) -> None:
    """Same ports, another page size, then the right one: decode needs no restart."""
    first = start_one(shared, spec("again-p", "prefill"))
    router = route(shared.bed, first, shared.decode)
    assert ask(router.url).served
    shared.bed.stop(router)
    ports = stop_and_free(shared.bed, first)
    for row, code, options in (
        (
            "mismatch: prefill restarted with page size 16",
            "PD-PAGE-SIZE",
            {"page_size": 16},
        ),
        ("mismatch: prefill restarted as it was, works", None, {}),
    ):
        engine = start_one(shared, spec("again-p", "prefill", **ports, **options))
        time.sleep(1.5)  # a cached refusal is looked at again after a second
        answer = observe(shared, row, engine, shared.decode)
        if code is None:
            assert answer.served, answer.body
        else:
            assert_refused(shared, row, answer, code, engine)
        stop_and_free(shared.bed, engine)


def test_mismatch_table(capsys) -> None:
    """Print every row with what happened and how long it took."""
    assert OBSERVED, "no row was run"
    with capsys.disabled():
        print(f"\n{'row':<48} {'outcome':<8} {'seconds':>7}  doctor, worst finding")
        for row, (answer, diagnosis) in OBSERVED.items():
            name = row.removeprefix("mismatch: ")
            outcome = "served" if answer.served else "refused"
            finding = (diagnosis.codes or ("nothing",))[0]
            print(f"{name:<48} {outcome:<8} {answer.seconds:>7.2f}  {finding}")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-m", "e2e"]))
