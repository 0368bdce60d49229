"""The doctor and the tail: it asks the overlay's table what an engine refuses to start with."""

from __future__ import annotations

import json

import pytest

from doctor_bench import DRAFT, QWEN, Bench, command, dspark
from dspark_pd.doctor.engine import Finding
from dspark_pd.doctor.fields import FIELDS, VARIABLES
from dspark_pd.doctor.tables import load
from outcome import Run

pytestmark = pytest.mark.unit


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
    ("TAIL-ROLE-SWITCH", "", "--enable-pd-role-switch", "", f"{TAIL}=31"),
    ("TAIL-GRAPHS", "--pp-size 2 --cuda-graph-backend-prefill full", "", "", ""),
    ("TAIL-GRAPHS", f"--pp-size 2 {GRAPHS}", "", "", ""),
    ("TAIL-CP", "--attn-cp-size 2 --tp 2", "--tp 2", "", ""),
    ("TAIL-DCP", "", "--dcp-size 2", "", f"{TAIL}=31"),
    ("TAIL-HICACHE", "", "--enable-hicache", "", f"{TAIL}=31"),
    ("TAIL-LAYERNORM-SP", "--enable-layernorm-sp --tp 2", "--tp 2", "", ""),
    ("TAIL-RUST-SERVER", "", "", "SGLANG_RUST_SERVER=1", ""),
    ("TAIL-BACKEND", "--disaggregation-transfer-backend mori", "", "", ""),
    ("TAIL-AUX-TCP", MOONCAKE, "", "SGLANG_MOONCAKE_SEND_AUX_TCP=1", ""),
    ("TAIL-TOKENS", "", "", "", f"{TAIL}=-2"),
    ("TAIL-CAPTURE-DRAFT", "--speculative-algorithm dspark", "", "", ""),
    ("TAIL-CAPTURE-ROLE", "", "", "", CAPTURE),
    ("TAIL-DECODE-LAYER-IDS", "", "", "", "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1"),
]
ACCEPTED = [
    ("", "", "", ""),
    ("--cuda-graph-backend-prefill full", "", "", ""),
    ("", "--disaggregation-decode-host-receive-threshold 1.0", "", ""),
    ("", RADIX, "", f"{TAIL}=-1"),
    ("", "--dcp-size 2", "", ""),
    ("", "", "", "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2"),
    ("", "--enable-pdmux --enable-return-hidden-states", "", ""),
]


def refusals(bench: Bench, given: tuple[str, ...]) -> dict[str, Finding]:
    """Refusals, by code, of a pair that, but for what is given, works."""
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
            env=decode_env,
        ),
    )
    codes = {f"DOC-{refusal.code}" for refusal in load("handoff_refusals").REFUSALS}
    return {finding.code: finding for finding in found if finding.code in codes}


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
    assert refusals(bench, given) == {}


def test_a_refusal_is_an_error_that_names_its_engine(bench: Bench) -> None:
    found = refusals(bench, ("--attn-cp-size 2 --tp 2", "--tp 2", "", ""))
    finding = found["DOC-TAIL-CP"]
    assert finding.severity == "error"
    assert finding.message.startswith("prefill: prefill captures hidden states and has")
    assert finding.consequence.endswith("prefill refuses to start")
    assert finding.fix.startswith("run prefill without context parallelism")


def test_the_targets_config_is_read(bench: Bench) -> None:
    model = bench.model("other", {**QWEN, "architectures": ["OtherForCausalLM"]})
    env = f"{TAIL}=31 {CAPTURE} SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2"
    prefill = command(model, "prefill", "--pp-size 2", env=env)
    decode = command(model, "decode", dspark(bench, SLIDING, "swa"))
    assert "DOC-TAIL-STAGES" in bench.codes(prefill, decode)


def test_the_commands_of_the_proof_of_concept_are_a_pair(bench: Bench) -> None:
    """One variable on prefill, which may be given to decode as well, and short flags."""
    model = bench.model("qwen", QWEN)
    bench.model("qwen/dspark", SLIDING)
    ids = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2"
    prefill = command(model, "prefill", "--pp-size 2 --disable-radix-cache", env=ids)
    for env in ("", ids):
        decode = command(
            model, "decode", "--speculative-algo DSPARK --pp-size 1", env=env
        )
        found = bench.findings(prefill, decode)
        assert [f.code for f in found if f.severity == "error"] == []
    other = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,2"
    wrong = command(model, "prefill", "--pp-size 2", env=other)
    found = {f.code: f for f in bench.findings(wrong, decode)}
    message = found["PD-TAIL-LAYERS"].message
    assert "[0, 2]" in message and "[0, 1, 2]" in message


def test_a_target_of_deepseek_v41_is_refused(bench: Bench) -> None:
    config = {**QWEN, "architectures": ["DeepseekV4ForCausalLM"]}
    model = bench.model("v41", {**config, "model_type": "deepseek_v41"})
    env = f"{CAPTURE} SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2"
    prefill = command(model, "prefill", "", env=env)
    decode = command(model, "decode", dspark(bench, SLIDING, "swa"))
    assert "DOC-TAIL-DSV41" in bench.codes(prefill, decode)


def test_what_decode_cannot_take_is_found_with_the_pair(bench: Bench) -> None:
    """It serves native prefills, so nothing is wrong with it alone."""
    model = bench.model("qwen", QWEN)
    env = f"{CAPTURE} SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2"
    drafting = dspark(bench, SLIDING, "swa")
    decode = command(model, "decode", f"{drafting} --dcp-size 2 --tp 2")
    native = command(model, "prefill", f"{drafting} --tp 2")
    tail = command(model, "prefill", "--tp 2", env=env)
    assert "PD-MODE" not in bench.codes(native, decode)
    (found,) = (f for f in bench.findings(tail, decode) if f.code == "PD-MODE")
    assert "decode cannot take a tail with --dcp-size 2" in found.message


def test_a_running_engine_was_not_refused(bench: Bench, run: Run) -> None:
    told = {"mode": "tail", "version": 2}
    info = {
        "dcp_size": 2,
        "model_path": bench.model("qwen", QWEN),
        "version": "0.5.23",
        "internal_states": [{"peer_description": told}],
    }
    saved = bench.file("info.json", json.dumps(info))
    outcome = run("doctor", "--prefill", saved, "--decode", saved)
    codes = [finding["code"] for finding in outcome.data["findings"]]
    assert codes and "DOC-TAIL-DCP" not in codes


def test_all_that_the_table_asks_for_is_read() -> None:
    table = load("handoff_refusals")
    assert set(table.ARGUMENTS) <= set(FIELDS)
    assert set(table.VARIABLES) <= set(VARIABLES)


def test_every_refusal_has_an_explanation(run: Run) -> None:
    for refusal in load("handoff_refusals").REFUSALS:
        for code in (refusal.code, f"DOC-{refusal.code}"):
            (lines,) = run("explain", code).data["explained"]
            assert refusal.says in "".join(lines)
