"""The doctor and the tail: it refuses what the overlay's start-up refuses, no more."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from doctor_bench import DRAFT, QWEN, Bench, command, dspark
from dspark_pd.doctor_conditions import MAX_TAIL_TOKENS, TAIL_BACKENDS
from dspark_pd.doctor_fields import FIELDS, VARIABLES
from dspark_pd.doctor_tail_checks import TAIL_CHECKS

pytestmark = pytest.mark.unit

OVERLAY = Path(__file__).resolve().parents[2] / "python/sglang"
COMPONENTS = OVERLAY / "srt/speculative/dspark_components"
SLIDING = {**DRAFT, "layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1"
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
PARTIAL = "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT=1"
COLD = "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT=1"
AUX_TCP = "SGLANG_MOONCAKE_SEND_AUX_TCP"
POOL = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
RADIX = "--disaggregation-decode-enable-radix-cache"
MOONCAKE = "--disaggregation-transfer-backend mooncake"
THRESHOLD = "--disaggregation-decode-host-receive-threshold"
GRAPHS = "--cuda-graph-backend-prefill"

# (code, flags of prefill, of decode, variables of prefill, of decode)
REFUSED = [
    ("DOC-TAIL-TBO", "--enable-two-batch-overlap", "", "", ""),
    ("DOC-TAIL-PDMUX", "--enable-pdmux", "", "", ""),
    ("DOC-TAIL-KV-SHARDING", "--enable-kv-cache-sharding", "", "", ""),
    ("DOC-TAIL-SESSION", "--enable-streaming-session", "", "", ""),
    ("DOC-TAIL-HIDDEN-STATES", "--enable-return-hidden-states", "", "", ""),
    ("DOC-TAIL-HIDDEN-STATES", "--return-hidden-states-mode full", "", "", ""),
    ("DOC-TAIL-AUX-STATES", "--enable-return-aux-hidden-states", "", "", ""),
    ("DOC-TAIL-ROLE-SWITCH", "--enable-pd-role-switch", "", "", ""),
    ("DOC-TAIL-ROLE-SWITCH", "", "--enable-pd-role-switch", "", ""),
    ("DOC-TAIL-GRAPHS", f"--pp-size 2 {GRAPHS} full", "", "", ""),
    ("DOC-TAIL-GRAPHS", f"--pp-size 2 {GRAPHS} breakable", "", "", ""),
    ("DOC-TAIL-UNIFIED-MEMORY", "", "--enable-unified-memory", "", ""),
    ("DOC-TAIL-HOST-RECEIVE", "", f"{THRESHOLD} 0.5", "", ""),
    ("DOC-TAIL-DCP", "", "--dcp-size 2", "", ""),
    ("DOC-TAIL-BACKEND", "--disaggregation-transfer-backend mori", "", "", ""),
    ("DOC-TAIL-BACKEND", "", "--disaggregation-transfer-backend ascend", "", ""),
    ("DOC-TAIL-AUX-TCP", MOONCAKE, "", f"{AUX_TCP}=1", ""),
    ("DOC-TAIL-AUX-TCP", "", MOONCAKE, "", f"{AUX_TCP}=true"),
    ("DOC-TAIL-AUX-TCP", MOONCAKE, "", f"{POOL}=NVLINK", ""),
    ("DOC-TAIL-AUX-TCP", MOONCAKE, "", f"{POOL}=True", ""),
    ("DOC-TAIL-AUX-TCP", "", "", f"{POOL}=INTRA_NODE_NVLINK", ""),
    ("DOC-TAIL-TOKENS", "", "", f"{TAIL}=0", ""),
    ("DOC-TAIL-TOKENS", "", "", f"{TAIL}=4097", ""),
    ("DOC-TAIL-TOKENS", "", "", "", f"{TAIL}=-2"),
    ("DOC-DECODE-RADIX", "", RADIX, f"{TAIL}=8", f"{TAIL}=8 {PARTIAL}"),
]
ACCEPTED = [
    (f"{GRAPHS} full", "", "", ""),
    (f"--pp-size 2 {GRAPHS} disabled", "", "", ""),
    ("", f"{THRESHOLD} 1", "", ""),
    ("", f"{THRESHOLD} 1.0", "", ""),
    (MOONCAKE, MOONCAKE, f"{AUX_TCP}=0", ""),
    ("", "", f"{AUX_TCP}=1", f"{POOL}=NVLINK"),
    ("", "", f"{TAIL}=-1", f"{TAIL}=-1"),
    ("", "", f"{TAIL}=4096", f"{TAIL}=4096"),
    ("", RADIX, "", ""),
    ("", RADIX, f"{TAIL}=-1", f"{TAIL}=-1"),
    ("", "--enable-pdmux --enable-return-hidden-states", "", ""),
]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def findings(bench: Bench, given: tuple[str, str, str, str]) -> dict[str, str]:
    """Severity by code, of a pair whose tail covers the draft's window."""
    model = bench.model("qwen", QWEN)
    prefill, decode, prefill_env, decode_env = given
    ids = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2"
    rows = f"{TAIL}=31"
    found = bench.findings(
        command(model, "prefill", prefill, env=f"{rows} {CAPTURE} {ids} {prefill_env}"),
        command(
            model,
            "decode",
            f"{dspark(bench, SLIDING, 'swa')} {decode}",
            env=f"{rows} {decode_env}",
        ),
    )
    return {finding.code: finding.severity for finding in found}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_the_start_up_refuses(bench: Bench, given: tuple[str, ...]) -> None:
    code, *pair = given
    assert findings(bench, tuple(pair))[code] == "refuse"  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ACCEPTED, ids=" ".join)
def test_what_it_does_not(bench: Bench, given: tuple[str, str, str, str]) -> None:
    codes = {row.code for row in TAIL_CHECKS}
    assert not codes & findings(bench, given).keys()


def test_prefills_of_another_kind_may_have_the_flags(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    flags = " ".join(flags for _, flags, *_ in REFUSED if "backend" not in flags)
    codes = bench.codes(
        command(model, "prefill", dspark(bench), flags),
        command(model, "decode", dspark(bench), "--enable-unified-memory"),
    )
    assert not {row.code for row in TAIL_CHECKS} & set(codes)


def test_a_cold_draft_is_not_shared(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    prefill = command(model, "prefill")
    cold = command(model, "decode", dspark(bench), RADIX, env=COLD)
    assert "DOC-DECODE-RADIX-COLD" in bench.codes(prefill, cold)
    alone = command(model, "decode", dspark(bench), env=COLD)
    assert "DOC-DECODE-RADIX-COLD" not in bench.codes(prefill, alone)


def test_every_tail_row_is_tested() -> None:
    tested = {code for code, *_ in REFUSED} | {"DOC-DECODE-RADIX-COLD"}
    assert {row.code for row in TAIL_CHECKS} == tested


# -- the same as the overlay ------------------------------------------------------------


def refused_names(function: str) -> set[str]:
    """The arguments that a function of the start-up asks for."""
    tree = ast.parse((COMPONENTS / "dspark_handoff_startup.py").read_text())
    (body,) = [
        n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function
    ]
    names = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            names.add(ast.literal_eval(node.args[1]))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cfg":
            names.add(node.attr)
    return names


@pytest.mark.parametrize(
    ("role", "functions"),
    [
        ("prefill", ("_prefill_refusals", "_backend_refusal", "_role_switch_refusal")),
        ("decode", ("_decode_refusals", "_backend_refusal", "_role_switch_refusal")),
    ],
)
def test_each_refusal_of_the_start_up_has_a_row(
    bench: Bench, role: str, functions: tuple[str, ...]
) -> None:
    """A pair that differs from a good one in nothing else is refused for it."""
    values = {
        "attn_cp_size": "2",
        "dcp_size": "2",
        "return_hidden_states_mode": "full",
        "disaggregation_decode_host_receive_threshold": "0.5",
        "disaggregation_transfer_backend": "mori",
        "cuda_graph_config": "",  # --cuda-graph-backend-prefill fills it
        "pp_size": f"2 {GRAPHS} full",
    }
    names = set().union(*(refused_names(name) for name in functions))
    assert len(names) >= 7
    good = findings(bench, ("", "", "", ""))
    for name in sorted(names):
        value = values.get(name, "on")
        if not value:
            continue
        flag = f"--{name.replace('_', '-')} {value.removeprefix('on')}"
        pair = (flag, "") if role == "prefill" else ("", flag)
        found = findings(bench, (*pair, "", ""))
        new = {c for c, s in found.items() if s == "refuse" and c.startswith("DOC-")}
        assert new - good.keys(), name
        assert name in FIELDS, name


def test_variables_and_limits_are_the_overlays() -> None:
    startup = (COMPONENTS / "dspark_handoff_startup.py").read_text()
    for name in re.findall(r"SGLANG_MOONCAKE_\w+", startup):
        assert name in VARIABLES
    knobs = (COMPONENTS / "dspark_handoff_knobs.py").read_text()
    assert f"MAX_TAIL_TOKENS = {MAX_TAIL_TOKENS}\n" in knobs
    backends = ", ".join(f'"{name}"' for name in TAIL_BACKENDS)
    assert f"TAIL_BACKENDS = ({backends})\n" in startup
