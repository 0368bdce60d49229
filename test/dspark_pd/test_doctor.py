"""The doctor: what it reads, what it finds, and that it decides as the engines do."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from doctor_bench import DRAFT, QWEN, Bench, command, dspark
from dspark_pd.doctor import diagnose
from dspark_pd.doctor_agreement import load
from dspark_pd.doctor_checks import CHECKS, STAGED_CAPTURE
from dspark_pd.doctor_files import parse_command
from dspark_pd.doctor_inputs import read_engine
from dspark_pd.doctor_tail_checks import TAIL_CHECKS
from outcome import Run

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]
SLIDING = {**DRAFT, "layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
V4 = {
    **QWEN,
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_ratios": [0, 4, 128],
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [0, 1],
}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -- reading ----------------------------------------------------------------------------


def test_a_command_as_typed() -> None:
    text = """
    # how we start it
    export SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=32
    HF_HUB_OFFLINE=1 python -m sglang.launch_server --model-path /m --tp 4 \\
        --page-size=64 --disable-radix-cache
      --speculative-draft-model-path '/with space' --list a b
    """
    command = parse_command(text)
    assert command.args == {
        "model_path": "/m",
        "tp_size": 4,
        "page_size": 64,
        "disable_radix_cache": True,
        "speculative_draft_model_path": "/with space",
        "list": ["a", "b"],
    }
    assert command.environ == {
        "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": "32",
        "HF_HUB_OFFLINE": "1",
    }


def test_json_arguments_with_environment(bench: Bench) -> None:
    document = {
        "server_args": {"tp_size": 2, "speculative_algorithm": None},
        "environ": {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"},
        "version": "0.5.23",
    }
    path = bench.file("args.json", json.dumps(document))
    engine = read_engine("prefill", path, 1.0)
    assert engine.description["mode"] == "tail"
    assert (engine.description["tp"], engine.release) == (2, "0.5.23")


@pytest.mark.parametrize("text", ["", "no flags here", '--x "unbalanced', "{broken"])
def test_a_file_that_says_nothing_is_a_usage_error(
    bench: Bench, run: Run, text: str
) -> None:
    bad = bench.file("bad", text)
    outcome = run("doctor", "--prefill", bad, "--decode", bad, text=True)
    assert outcome.code == 2
    assert "error[U004]" in outcome.err


# -- the two deployments ----------------------------------------------------------------

T1 = (
    "--trust-remote-code --tp 4 --moe-runner-backend flashinfer_mxfp4 "
    "--swa-full-tokens-ratio 0.1 --speculative-algorithm DSPARK"
)
T1_CACHE = (
    "--enable-hierarchical-cache --hicache-ratio 2 --hicache-size 0 "
    "--hicache-mem-layout page_first_direct --hicache-io-backend direct "
    "--hicache-write-policy write_through --hicache-storage-backend file"
)


def test_native_transfer_with_a_bundled_draft_and_hicache(bench: Bench) -> None:
    model = bench.model("v4", V4)
    folder = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=/d"
    codes = bench.codes(
        command(model, "prefill", T1, T1_CACHE, env=folder),
        command(model, "decode", T1, "--cuda-graph-max-bs-decode 64"),
    )
    # Made-up models have no weights to compare.
    assert codes == ["PD-DRAFT-WEIGHTS-UNKNOWN"]


def test_draftless_prefill_with_stages(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    capture = (
        "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1 "
        "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2 "
        "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=31"
    )
    tail = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=31"
    codes = bench.codes(
        command(model, "prefill", "--pp-size 2", env=capture),
        command(model, "decode", dspark(bench, SLIDING), env=tail),
    )
    assert codes == ["DOC-TAIL-RADIX"]


# -- pairs that would not work ----------------------------------------------------------


def test_the_engines_rows_decide(bench: Bench) -> None:
    model, other = bench.model("qwen", QWEN), {**DRAFT, "num_hidden_layers": 3}
    for prefill, decode, code in (
        ("", dspark(bench), "PD-COLD-DRAFT"),
        (dspark(bench), "", "PD-DRAFT-ONLY-ON-PREFILL"),
        (dspark(bench), dspark(bench, other, "other"), "PD-DRAFT-GEOMETRY"),
        ("--page-size 64", "--page-size 1", "PD-PAGE-SIZE"),
        ("--kv-cache-dtype auto", "--kv-cache-dtype fp8_e4m3", "PD-KV-DTYPE"),
        ("--tp 2", "--tp 3", "PD-TP"),
    ):
        codes = bench.codes(
            command(model, "prefill", prefill), command(model, "decode", decode)
        )
        assert codes[0] == code, (code, codes)


def test_a_tail_shorter_than_the_window(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    tail = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=8"
    capture = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1 "
    ids = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS=0,1,2 "
    prefill = command(model, "prefill", env=capture + ids + tail)
    sliding = command(model, "decode", dspark(bench, SLIDING, "swa"), env=tail)
    full = command(model, "decode", dspark(bench), env=tail)
    allowed = command(
        model,
        "decode",
        dspark(bench),
        env=f"{tail} SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT=1",
    )
    assert "PD-TAIL-WINDOW" in bench.codes(prefill, sliding)
    assert "PD-TAIL-WINDOW" in bench.codes(prefill, full)
    assert "PD-TAIL-WINDOW-ALLOWED" in bench.codes(prefill, allowed)


def test_no_consent_makes_an_automatic_tail_cover_a_full_attention_draft(
    bench: Bench,
) -> None:
    model = bench.model("qwen", QWEN)
    draft = bench.model("draft", DRAFT)
    env = (
        "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=-1 "
        "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT=1"
    )
    capture = f"{env} SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1"
    path = f"--speculative-draft-model-path {draft}"
    prefill = command(model, "prefill", path, env=capture)
    decode = command(model, "decode", dspark(bench), env=env)
    assert "PD-TAIL-WINDOW" in bench.codes(prefill, decode)


def test_a_tail_of_deepseek_v4_covers_its_window(bench: Bench) -> None:
    model = bench.model("v4", V4)
    tail = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
    capture = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1"
    for rows, refused in ((-1, False), (128, False), (127, True)):
        prefill = command(model, "prefill", env=f"{capture} {tail}={rows}")
        decode = command(
            model,
            "decode",
            "--speculative-algorithm DSPARK --speculative-num-draft-tokens 6",
            env=f"{tail}={rows}",
        )
        assert ("PD-TAIL-WINDOW" in bench.codes(prefill, decode)) is refused


def test_rings_of_deepseek_v4(bench: Bench) -> None:
    model = bench.model("v4", V4)
    tail = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=128"
    capture = f"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1 {tail}"
    spec = "--speculative-algorithm DSPARK --speculative-num-draft-tokens 6"
    decode = command(model, "decode", spec, env=tail)
    bundled = command(model, "prefill", env=capture)
    assert "PD-RING" not in bench.codes(bundled, decode), "its block size tells"
    assert "PD-RING" in bench.codes(command(model, "prefill"), decode)
    apart = {k: v for k, v in V4.items() if not k.startswith("dspark")}
    model = bench.model("v4-apart", apart)
    assert "PD-RING" in bench.codes(command(model, "prefill", env=capture), decode)
    told = f"{capture} SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS=6"
    assert "PD-RING" not in bench.codes(command(model, "prefill", env=told), decode)


def test_the_default_allocation_policy_need_not_be_spelt_out(bench: Bench) -> None:
    model, flag = bench.model("qwen", QWEN), "--disaggregation-decode-allocation-policy"
    prefill = command(model, "prefill")
    early, late = (
        command(model, "decode", f"{flag} {value}")
        for value in ("early", "prefill_complete")
    )
    assert "PD-ALLOCATION" not in bench.codes(prefill, early)
    assert "PD-ALLOCATION" in bench.codes(prefill, late)


CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1"
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=31"
# code -> (prefill flags, prefill env, decode flags, decode env); {draft} is a DSPARK
OWN_ROWS = {
    "DOC-ROLE": ("--disaggregation-mode decode", "", "", ""),
    "DOC-CHECKSUM": ("--disaggregation-enable-kv-checksum", "", "", ""),
    "DOC-CHECKSUM-TAIL": (
        "--disaggregation-enable-kv-checksum",
        CAPTURE,
        "{draft}",
        TAIL,
    ),
    "DOC-DTYPE": ("--dtype float32", "", "--dtype bfloat16", ""),
    "DOC-DECODE-STAGES": ("{draft}", "", "{draft} --pp-size 2", ""),
    "DOC-CAPTURE-PLACE": ("{draft}", CAPTURE, "{draft}", ""),
    "DOC-TAIL-IDLE": ("", TAIL, "", ""),
    "DOC-LAYER-IDS": ("", f"{CAPTURE} {TAIL}", "{draft}", TAIL),
    "DOC-DP-LM-HEAD": ("{draft}", "", "{draft} --enable-dp-attention", ""),
    "DOC-CP-CAPTURE": ("--attn-cp-size 2 --tp 2", CAPTURE, "{draft} --tp 2", TAIL),
    "DOC-DECODE-HICACHE": ("", CAPTURE, "{draft} --enable-hierarchical-cache", TAIL),
    "DOC-DECODE-HISPARSE": ("{draft}", "", "{draft} --enable-hisparse", ""),
    "DOC-TAIL-RADIX": ("", CAPTURE, "{draft}", TAIL),
    "DOC-HICACHE-FOLDER": ("--hicache-storage-backend file", "", "", ""),
    "DOC-HICACHE-LAYOUT": (
        "--hicache-mem-layout page_first_direct --hicache-io-backend kernel",
        "",
        "",
        "",
    ),
    "DOC-HICACHE-COLD": ("--enable-hierarchical-cache", "", "{draft}", ""),
}


@pytest.mark.parametrize("code", OWN_ROWS)
def test_each_row_of_the_doctors_own(bench: Bench, code: str) -> None:
    model = bench.model("qwen", QWEN)
    draft = dspark(bench, SLIDING, "swa")
    prefill, prefill_env, decode, decode_env = (
        text.replace("{draft}", draft) for text in OWN_ROWS[code]
    )
    codes = bench.codes(
        command(model, "prefill", prefill, env=prefill_env),
        command(model, "decode", decode, env=decode_env),
    )
    assert code in codes
    plain = command(model, "prefill"), command(model, "decode")
    assert code not in bench.codes(*plain)


def test_stages_of_a_model_that_hands_no_rows_on(bench: Bench) -> None:
    model = bench.model("other", {**QWEN, "architectures": ["OtherForCausalLM"]})
    prefill = command(model, "prefill", dspark(bench), "--pp-size 2")
    codes = bench.codes(prefill, command(model, "decode", dspark(bench)))
    assert "DOC-STAGED-CAPTURE" in codes


def test_the_models_with_stages_are_the_overlays() -> None:
    """Those it knows by name, and those that bring a stage's rows along themselves."""
    source = REPOSITORY / "python/sglang/srt/speculative/dspark_components"
    names: set[str] = set()
    for node in ast.walk(ast.parse((source / "pp_aux_capture.py").read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == (
            "SUPPORTED_MODELS"
        ):
            names |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.Compare) and ast.unparse(node.left) == "name":
            names |= {c.value for c in node.comparators if isinstance(c, ast.Constant)}
    upstreams = {"KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"}
    assert names | upstreams == set(STAGED_CAPTURE)
    assert len(names) == 4


def test_a_tail_on_a_release_that_hands_none_over(bench: Bench) -> None:
    tail = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
    found = {}
    for release in ("0.5.19", "0.5.22", "0.5.23", "0.5.23.post1", "main"):
        documents = [
            {"server_args": {"tp_size": 1}, "version": release, "environ": environ}
            for environ in (tail, {})
        ]
        pair = [
            read_engine(role, bench.file(f"{role}.json", json.dumps(document)), 1.0)
            for role, document in zip(("prefill", "decode"), documents, strict=True)
        ]
        codes = [finding.code for finding in diagnose(*pair)]
        found[release] = "DOC-TAIL-RELEASE" in codes
    assert found == {
        "0.5.19": True,
        "0.5.22": True,
        "0.5.23": False,
        "0.5.23.post1": False,
        "main": False,
    }


def test_every_own_row_is_tested() -> None:
    elsewhere = {"DOC-RELEASE", "DOC-STAGED-CAPTURE", "DOC-TAIL-RELEASE"}
    elsewhere |= {row.code for row in TAIL_CHECKS}  # test_doctor_tail.py
    assert {row.code for row in CHECKS} == set(OWN_ROWS) | elsewhere


def test_two_releases(bench: Bench) -> None:
    files = [
        bench.file(f"{release}.json", json.dumps({"tp_size": 1, "version": release}))
        for release in ("0.5.22", "0.5.23")
    ]
    pair = read_engine("prefill", files[0], 1.0), read_engine("decode", files[1], 1.0)
    assert "DOC-RELEASE" in [finding.code for finding in diagnose(*pair)]


# -- the command ------------------------------------------------------------------------


def test_a_good_pair_exits_with_0(bench: Bench, run: Run) -> None:
    model = bench.model("qwen", QWEN)
    files = [
        bench.file(role, command(model, role, "--page-size 64"))
        for role in ("prefill", "decode")
    ]
    outcome = run("doctor", "--prefill", files[0], "--decode", files[1], text=True)
    assert outcome.code == 0
    assert "Nothing known speaks against this pair." in outcome.out


def test_a_bad_pair_exits_with_1_and_says_what_to_do(bench: Bench, run: Run) -> None:
    model = bench.model("qwen", QWEN)
    prefill = bench.file("p", command(model, "prefill"))
    decode = bench.file("d", command(model, "decode", dspark(bench)))
    outcome = run("doctor", "--prefill", prefill, "--decode", decode, text=True)
    assert outcome.code == 1
    for text in ("will not work  [PD-COLD-DRAFT]", "consequence", "fix"):
        assert text in outcome.out
    assert "This pair would not work: 1 reason(s)" in outcome.out
    assert max(map(len, outcome.out.splitlines()[2:])) <= 88


def test_compared_values_stand_in_columns(bench: Bench, run: Run) -> None:
    model = bench.model("qwen", QWEN)
    files = [bench.file(r, command(model, r)) for r in ("prefill", "decode")]
    outcome = run(
        "doctor", "--prefill", files[0], "--decode", files[1], "-v", text=True
    )
    lines = outcome.out.splitlines()
    head = next(line for line in lines if line.startswith("compared value"))
    rows = lines[lines.index(head) + 1 :]
    (switch,) = [row for row in rows if row.startswith("allow_partial_context ")]
    assert switch.split() == ["allow_partial_context", "False", "False"]
    for row in rows:
        for column in (head.index("prefill"), head.index("decode")):
            assert row[column - 1] == " " and row[column] != " ", row


def test_json_has_the_same_findings(bench: Bench, run: Run) -> None:
    model = bench.model("qwen", QWEN)
    prefill = bench.file("p", command(model, "prefill"))
    decode = bench.file("d", command(model, "decode", dspark(bench)))
    outcome = run("doctor", "--prefill", prefill, "--decode", decode, "--json")
    assert outcome.code == 1
    assert outcome.data["would_work"] is False
    [finding] = outcome.data["findings"]
    assert finding["code"] == "PD-COLD-DRAFT"
    assert set(finding) == {"code", "severity", "message", "consequence", "fix"}
    assert outcome.data["decode"]["description"]["algorithm"] == "DSPARK"


def test_neither_torch_nor_sglang_is_imported(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    files = [bench.file(r, command(model, r)) for r in ("prefill", "decode")]
    code = (
        "import sys; from dspark_pd.cli import main; "
        f"main(['doctor', '--prefill', {files[0]!r}, '--decode', {files[1]!r}, '-q']); "
        "sys.exit(sorted({'torch', 'sglang'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "python")},
    )
    assert done.returncode == 0, done.stderr


def test_the_table_is_the_overlays_own_file() -> None:
    rules = load("peer_agreement_rules")
    expected = REPOSITORY / "python/sglang/srt/disaggregation/common"
    assert Path(rules.__file__).parent == expected
