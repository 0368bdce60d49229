"""The doctor: what it reads, what it finds, and that it decides as the engines do."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from doctor_bench import DRAFT, QWEN, Bench, command, dspark
from dspark_pd.doctor.checks import CHECKS
from dspark_pd.doctor.fields import BOOTSTRAP_TIMEOUT, KEEP_ALIVE
from dspark_pd.doctor.sources import read_engine
from dspark_pd.doctor.tables import load
from dspark_pd.verbs.doctor import diagnose
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


# -- reading ----------------------------------------------------------------------------


def test_described_arguments_with_environment(bench: Bench) -> None:
    document = {
        "schema": 1,
        "server_args": {"tp_size": "2", "speculative_algorithm": None},
        "environ": {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"},
        "version": "0.5.23",
    }
    for shown in (document, {"command": "describe", "data": document}):
        path = bench.file("args.json", json.dumps(shown))
        engine = read_engine("prefill", path, 1.0)
        assert engine.description["mode"] == "tail"
        assert (engine.description["tp"], engine.release) == (2, "0.5.23")


def test_a_saved_server_info_says_what_the_engine_said(bench: Bench) -> None:
    told = {"version": 2, "mode": "native", "page_size": 64}
    info = {"page_size": 1, "version": "0.5.23", "tp_size": 1}
    states = [{"peer_description": told}]
    path = bench.file("info.json", json.dumps({**info, "internal_states": states}))
    engine = read_engine("decode", path, 1.0)
    assert engine.description == told
    assert (engine.environ, engine.release) == (None, "0.5.23")


def test_stdin_serves_one_of_the_two(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model("qwen", QWEN)
    prefill = bench.file("p", command(model, "prefill"))
    monkeypatch.setattr("sys.stdin", io.StringIO(command(model, "decode")))
    assert run("doctor", "--prefill", prefill, "--decode", "-").code == 0
    assert run("doctor", "--prefill", "-", "--decode", "-").codes == ["U001"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "no flags here", '--x "unbalanced', "{broken", "[]", "{}"),
        *('{"detail": "Not Found"}', '{"server_args": {"hello": 1}}'),
    ],
)
def test_a_file_that_says_nothing_is_a_usage_error(
    bench: Bench, run: Run, text: str
) -> None:
    bad = bench.file("bad", text)
    outcome = run("doctor", "--prefill", bad, "--decode", bad, text=True)
    assert outcome.code == 2
    assert outcome.err.count("error[U004]") == 2


@pytest.mark.parametrize(
    ("source", "give"),
    [
        ("host:30000", "http://host:30000"),
        ("tcp://host:30000", "http://host:30000"),
        ("http://", "http://host:port"),
        ("http://host:0", "http://host:port"),
        ("no/such/file", "FILE"),
    ],
)
def test_a_mistyped_source_is_answered_with_one_that_works(
    run: Run, source: str, give: str
) -> None:
    outcome = run("doctor", "--prefill", source, "--decode", source)
    assert outcome.codes == ["U004", "U004"]
    following = outcome.document["errors"][0]["next"]
    assert following.startswith(f"dspark-pd doctor --prefill {give};")


def test_a_value_that_sglang_refuses_is_an_error_and_nothing_is_compared(
    bench: Bench, run: Run
) -> None:
    model = bench.model("qwen", QWEN)
    prefill = bench.file("p", command(model, "prefill", "--tp four"))
    decode = bench.file("d", command(model, "decode", dspark(bench), "--tp 4"))
    outcome = run("doctor", "--prefill", prefill, "--decode", decode)
    [finding] = outcome.data["findings"]
    assert (outcome.code, finding["code"]) == (1, "DOC-VALUE")
    assert "--tp-size is 'four', not a whole number" in finding["message"]


@pytest.mark.parametrize(
    ("flags", "env", "meant"),
    [
        ("--page-sise 4", "", "--page-size"),
        ("--tp_size 4", "", "--tp-size"),
        ("", "SGLANG_DSPARK_PD_ENABLE_PREFIL_CAPTURE=1", "PREFILL_CAPTURE"),
    ],
)
def test_a_misspelt_name_is_named(
    bench: Bench, flags: str, env: str, meant: str
) -> None:
    model = bench.model("qwen", QWEN)
    found = bench.findings(
        command(model, "prefill", flags, "--mem-fraction-static 0.5", env=env),
        command(model, "decode"),
    )
    [finding] = found
    assert (finding.code, finding.severity) == ("DOC-ARGS", "warning")
    assert f"{meant} may be meant" in finding.message


def test_what_is_known_of_one_engine_only_is_named(bench: Bench) -> None:
    model, other = bench.model("qwen", QWEN), "org/qwen"
    [finding] = bench.findings(
        command(model, "prefill", "--page-size 64", "--kv-cache-dtype auto"),
        command(model, "decode"),
    )
    assert (finding.code, finding.severity) == ("DOC-NOT-COMPARED", "warning")
    assert "page size (known of prefill only); KV dtype (" in finding.message
    findings = bench.findings(command(model, "prefill"), command(other, "decode"))
    [finding] = [f for f in findings if f.code == "DOC-NOT-COMPARED"]
    assert "model (known of prefill only)" in finding.message
    assert f"model paths that differ ({model} and {other})" in finding.message


def test_drafts_that_cannot_be_read_are_named_by_path(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    flags = "--speculative-algorithm DSPARK --speculative-draft-model-path org"
    same = command(model, "decode", f"{flags}/a")
    codes = bench.codes(command(model, "prefill", f"{flags}/a"), same)
    assert codes == ["PD-DRAFT-WEIGHTS-UNKNOWN"]
    findings = bench.findings(command(model, "prefill", f"{flags}/b"), same)
    [finding] = [f for f in findings if f.code == "DOC-NOT-COMPARED"]
    assert finding.message == "not compared: draft paths that differ (org/b and org/a)"


# -- spellings that mean the same -------------------------------------------------------


def test_an_algorithm_in_small_letters_is_the_same(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    small = dspark(bench).replace("DSPARK", "dspark")
    codes = bench.codes(
        command(model, "prefill", small), command(model, "decode", dspark(bench))
    )
    assert codes == ["PD-DRAFT-WEIGHTS-UNKNOWN"]


def test_a_draft_in_the_targets_folder_is_the_one_given_by_its_path(
    bench: Bench,
) -> None:
    model = bench.model("qwen", QWEN)
    inside = bench.model("qwen/dspark", DRAFT)
    found = bench.engine(
        "prefill", command(model, "prefill", "--speculative-algorithm DSPARK")
    )
    path = f"--speculative-algorithm DSPARK --speculative-draft-model-path {inside}"
    given = bench.engine("decode", command(model, "decode", path))
    draft = found.description["draft"]
    assert draft and draft == given.description["draft"]
    codes = [finding.code for finding in diagnose(found, given)]
    assert codes == ["PD-DRAFT-WEIGHTS-UNKNOWN"]


def test_a_block_size_is_one_less_than_the_draft_tokens(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)

    def codes(prefill: str, decode: str) -> list[str]:
        return bench.codes(
            command(model, "prefill", dspark(bench), prefill),
            command(model, "decode", dspark(bench), decode),
        )

    block, tokens = "--speculative-dspark-block-size", "--speculative-num-draft-tokens"
    assert "PD-BLOCK-SIZE" not in codes(f"{block} 4", f"{tokens} 5")
    assert "PD-BLOCK-SIZE" in codes(f"{block} 4", f"{tokens} 6")
    assert codes(f"{block} 4 {tokens} 4", "") == ["DOC-BLOCK-SIZE"]


def test_attention_groups_are_counted_in_either_spelling(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    new = command(model, "prefill", "--tp 4 --attn-dp-size 2")
    old = command(model, "decode", "--tp 4 --dp-size 2 --enable-dp-attention")
    assert bench.codes(new, old) == []


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


def test_the_engines_rules_decide(bench: Bench) -> None:
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
OWN_CHECKS = {
    "DOC-ROLE": ("--disaggregation-mode decode", "", "", ""),
    "DOC-CHECKSUM": ("--disaggregation-enable-kv-checksum", "", "", ""),
    "DOC-DTYPE": ("--dtype float32", "", "--dtype bfloat16", ""),
    "DOC-DECODE-STAGES": ("{draft}", "", "{draft} --pp-size 2", ""),
    "DOC-DP-LM-HEAD": ("{draft}", "", "{draft} --tp 2 --attn-dp-size 2", ""),
    "DOC-DECODE-HISPARSE": ("{draft}", "", "{draft} --enable-hisparse", ""),
    "DOC-RUST-SERVER": ("{draft}", "SGLANG_RUST_SERVER=1", "{draft}", ""),
    "DOC-TAIL-RADIX": ("", CAPTURE, "{draft}", ""),
    "DOC-HICACHE-FOLDER": ("--hicache-storage-backend file", "", "", ""),
    "DOC-HICACHE-LAYOUT": (
        "--hicache-mem-layout page_first_direct --hicache-io-backend kernel",
        "",
        "",
        "",
    ),
    "DOC-HICACHE-COLD": ("--enable-hierarchical-cache", "", "{draft}", ""),
}


@pytest.mark.parametrize("code", OWN_CHECKS)
def test_each_check_of_the_doctor_fires_on_its_case(bench: Bench, code: str) -> None:
    model = bench.model("qwen", QWEN)
    draft = dspark(bench, SLIDING, "swa")
    prefill, prefill_env, decode, decode_env = (
        text.replace("{draft}", draft) for text in OWN_CHECKS[code]
    )
    codes = bench.codes(
        command(model, "prefill", prefill, env=prefill_env),
        command(model, "decode", decode, env=decode_env),
    )
    assert code in codes
    plain = command(model, "prefill"), command(model, "decode")
    assert code not in bench.codes(*plain)


def test_a_tail_on_a_release_without_the_handoff_is_an_error(bench: Bench) -> None:
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


def test_the_default_time_limit_of_prefill_is_remarked_on(bench: Bench) -> None:
    """Not where the environment is unknown, as of a running engine."""
    found = {}
    for environ in ({}, {BOOTSTRAP_TIMEOUT: "30"}, None):
        document = {"server_args": {"tp_size": 1}, "version": "0.5.23"}
        if environ is not None:
            document["environ"] = environ
        path = bench.file("engine.json", json.dumps(document))
        pair = [read_engine(role, path, 1.0) for role in ("prefill", "decode")]
        codes = [finding.code for finding in diagnose(*pair)]
        found[str(environ)] = "DOC-TIME-LIMIT" in codes
    assert list(found.values()) == [True, False, False], found


@pytest.mark.parametrize(
    "environ, remarked",
    [
        ({}, True),
        ({KEEP_ALIVE: " "}, True),
        ({KEEP_ALIVE: "30"}, True),
        ({KEEP_ALIVE: "-"}, False),
        ({KEEP_ALIVE: "60"}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("short", ["prefill", "decode"])
def test_an_engine_that_closes_connections_before_the_router_is_remarked_on(
    bench: Bench, short: str, environ: dict[str, str] | None, remarked: bool
) -> None:
    pair = []
    for role in ("prefill", "decode"):
        document = {"server_args": {"tp_size": 1}, "version": "0.5.23"}
        variables = environ if role == short else {KEEP_ALIVE: "60"}
        if variables is not None:
            document["environ"] = variables
        path = bench.file(f"{role}.json", json.dumps(document))
        pair.append(read_engine(role, path, 1.0))
    codes = [finding.code for finding in diagnose(*pair)]
    assert ("DOC-KEEP-ALIVE" in codes) == remarked


def test_every_check_is_tested() -> None:
    elsewhere = {"DOC-RELEASE", "DOC-STAGES", "DOC-TAIL-RELEASE", "DOC-TIME-LIMIT"}
    elsewhere |= {"DOC-KEEP-ALIVE"}
    assert {check.code for check in CHECKS} == set(OWN_CHECKS) | elsewhere


def test_two_releases(bench: Bench) -> None:
    files = [
        bench.file(f"{release}.json", json.dumps({"tp_size": 1, "version": release}))
        for release in ("0.5.22", "0.5.23")
    ]
    pair = read_engine("prefill", files[0], 1.0), read_engine("decode", files[1], 1.0)
    assert "DOC-RELEASE" in [finding.code for finding in diagnose(*pair)]


# -- the command ------------------------------------------------------------------------


def test_a_bad_pair_exits_with_1_and_says_what_to_do(bench: Bench, run: Run) -> None:
    model = bench.model("qwen", QWEN)
    prefill = bench.file("p", command(model, "prefill"))
    decode = bench.file("d", command(model, "decode", dspark(bench)))
    outcome = run("doctor", "--prefill", prefill, "--decode", decode, text=True)
    assert outcome.code == 1
    for text in ("error  [PD-COLD-DRAFT]", "consequence", "fix"):
        assert text in outcome.out
    assert "This pair would not work: 1 error." in outcome.out
    assert max(map(len, outcome.out.splitlines()[2:])) <= 88
    outcome = run("doctor", "--prefill", prefill, "--decode", decode)
    assert outcome.code == 1
    assert outcome.data["would_work"] is False
    [finding] = outcome.data["findings"]
    assert finding["code"] == "PD-COLD-DRAFT"
    assert set(finding) == {"code", "severity", "message", "consequence", "fix"}
    assert outcome.data["decode"]["description"]["algorithm"] == "DSPARK"


def test_a_good_pair_exits_with_0_and_shows_what_was_compared(
    bench: Bench, run: Run
) -> None:
    model = bench.model("qwen", QWEN)
    files = [bench.file(r, command(model, r)) for r in ("prefill", "decode")]
    outcome = run(
        "doctor", "--prefill", files[0], "--decode", files[1], "-v", text=True
    )
    assert outcome.code == 0
    assert "No problems found." in outcome.out
    lines = outcome.out.splitlines()
    head = next(line for line in lines if line.startswith("compared value"))
    rows = lines[lines.index(head) + 1 :]
    (switch,) = [row for row in rows if row.startswith("allow_partial_context ")]
    assert switch.split() == ["allow_partial_context", "False", "False"]
    for row in rows:
        for column in (head.index("prefill"), head.index("decode")):
            assert row[column - 1] == " " and row[column] != " ", row


def test_the_table_is_the_overlays_own_file() -> None:
    rules = load("rules")
    expected = REPOSITORY / "python/sglang/srt/disaggregation/agreement"
    assert Path(rules.__file__).parent == expected
