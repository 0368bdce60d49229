"""The doctor and the tail: it asks the overlay's table what an engine refuses to start with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doctor_bench import DRAFT, QWEN, Bench, command, dspark
from dspark_pd.doctor import tail
from dspark_pd.doctor.agreement import load_file
from dspark_pd.doctor.fields import FIELDS, VARIABLES
from outcome import Run

pytestmark = pytest.mark.unit

# A table with the interface of the overlay's, which is proved by its own tests.
TABLE = """
from __future__ import annotations
import dataclasses
from typing import Any

@dataclasses.dataclass(frozen=True)
class Refusal:
    code: str
    role: str
    applies: Any
    says: str
    fix: str

def facts_from(args, environ, target_config=None, draft_config=None, role="null"):
    configs = bool(target_config), bool(draft_config)
    return {**args, **environ, "role": role, "configs": configs}

REFUSALS = (
    Refusal("TAIL-X", "both", lambda f: f.get("pp_size") == 2, "{role} has 2", "have 1"),
    Refusal("TAIL-Y", "decode", lambda f: f["configs"] == (True, True), "read", "-"),
)

def refusals(facts):
    return [
        (r, r.says.format(**facts), r.fix)
        for r in REFUSALS
        if r.role in ("both", facts["role"]) and r.applies(facts)
    ]
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(TABLE)
    monkeypatch.setattr(tail, "load_refusals", lambda: load_file(path))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.usefixtures("table")
def test_a_refusal_at_start_up_is_an_error_that_names_its_engine(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    found = bench.findings(
        command(model, "prefill", "--pp-size 2"), command(model, "decode")
    )
    (finding,) = [f for f in found if f.code == "DOC-TAIL-X"]
    assert (finding.severity, finding.fix) == ("error", "have 1")
    assert finding.message == "prefill: prefill has 2"
    assert "refuses to start" in finding.consequence


@pytest.mark.usefixtures("table")
def test_the_table_gets_what_is_known_of_the_models(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    decode = command(model, "decode", dspark(bench, DRAFT))
    assert "DOC-TAIL-Y" in bench.codes(command(model, "prefill"), decode)
    assert "DOC-TAIL-Y" not in bench.codes(
        command(model, "prefill"), command(model, "decode")
    )


@pytest.mark.usefixtures("table")
def test_a_running_engine_was_not_refused(bench: Bench, run: Run) -> None:
    info = {"pp_size": 2, "model_path": bench.model("qwen", QWEN), "version": "0.5.23"}
    saved = bench.file("info.json", json.dumps(info))
    outcome = run("doctor", "--prefill", saved, "--decode", saved)
    codes = [finding["code"] for finding in outcome.data["findings"]]
    assert "DOC-TAIL-X" not in codes


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("code", ["TAIL-X", "DOC-TAIL-X"])
def test_a_refusal_is_explained_under_both_names(run: Run, code: str) -> None:
    assert "have 1" in run("explain", code, text=True).out


# -- the overlay's own table ------------------------------------------------------------

SLIDING = {**DRAFT, "layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1"
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
PARTIAL = "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT=1"
MOONCAKE = "--disaggregation-transfer-backend mooncake"
RADIX = "--disaggregation-decode-enable-radix-cache"
GRAPHS = '--cuda-graph-config \'{"prefill": {"backend": "full"}}\''

# (code, flags of prefill, of decode, variables of prefill, of decode)
REFUSED = [
    ("TAIL-TBO", "--enable-two-batch-overlap", "", "", ""),
    ("TAIL-HIDDEN-STATES", "--return-hidden-states-mode full", "", "", ""),
    ("TAIL-ROLE-SWITCH", "", "--enable-pd-role-switch", "", ""),
    ("TAIL-GRAPHS", "--pp-size 2 --cuda-graph-backend-prefill full", "", "", ""),
    ("TAIL-GRAPHS", f"--pp-size 2 {GRAPHS}", "", "", ""),
    ("TAIL-CP", "--attn-cp-size 2 --tp 2", "--tp 2", "", ""),
    ("TAIL-DCP", "", "--dcp-size 2", "", ""),
    ("TAIL-HICACHE", "", "--enable-hicache", "", ""),
    ("TAIL-BACKEND", "--disaggregation-transfer-backend mori", "", "", ""),
    ("TAIL-AUX-TCP", MOONCAKE, "", "SGLANG_MOONCAKE_SEND_AUX_TCP=1", ""),
    ("TAIL-TOKENS", "", "", "", f"{TAIL}=-2"),
    ("TAIL-CAPTURE-DRAFT", "--speculative-algorithm dspark", "", "", ""),
    ("TAIL-CAPTURE-ROLE", "", "", "", CAPTURE),
    ("DECODE-RADIX", "", RADIX, f"{TAIL}=8", f"{TAIL}=8 {PARTIAL}"),
]
ACCEPTED = [
    ("", "", "", ""),
    ("--cuda-graph-backend-prefill full", "", "", ""),
    ("", "--disaggregation-decode-host-receive-threshold 1.0", "", ""),
    ("", RADIX, "", f"{TAIL}=-1"),
    ("", "--enable-pdmux --enable-return-hidden-states", "", ""),
]


def refusals(bench: Bench, given: tuple[str, ...]) -> set[str]:
    """Codes of a pair that, but for what is given, works."""
    model = bench.model("qwen", QWEN)
    prefill, decode, prefill_env, decode_env = given
    ids = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2"
    found = bench.findings(
        command(
            model, "prefill", prefill, env=f"{TAIL}=31 {CAPTURE} {ids} {prefill_env}"
        ),
        command(
            model,
            "decode",
            f"{dspark(bench, SLIDING, 'swa')} {decode}",
            env=f"{TAIL}=31 {decode_env}",
        ),
    )
    codes = {f"DOC-{refusal.code}" for refusal in tail.load_refusals().REFUSALS}
    return {finding.code for finding in found} & codes


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_start_up_refuses_the_doctor_refuses(
    bench: Bench, given: tuple[str, ...]
) -> None:
    code, *pair = given
    assert f"DOC-{code}" in refusals(bench, tuple(pair))


@pytest.mark.parametrize("given", ACCEPTED, ids=" ".join)
def test_what_start_up_accepts_the_doctor_accepts(
    bench: Bench, given: tuple[str, ...]
) -> None:
    assert refusals(bench, given) == set()


def test_all_that_the_table_asks_for_is_read() -> None:
    table = tail.load_refusals()
    assert set(table.ARGUMENTS) <= set(FIELDS)
    assert set(table.VARIABLES) <= set(VARIABLES)


def test_every_refusal_has_an_explanation(run: Run) -> None:
    for refusal in tail.load_refusals().REFUSALS:
        (lines,) = run("explain", refusal.code).data["explained"]
        assert refusal.says in "".join(lines)
