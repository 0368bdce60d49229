"""The doctor and files: it reads them as a shell would, and says what it could not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import dspark_pd
from doctor_bench import DRAFT, QWEN, Bench, command, dspark
from dspark_pd import doctor_fields
from dspark_pd.doctor_agreement import load
from dspark_pd.doctor_fields import FIELDS, SOURCES, VARIABLES, field_of, meant_by
from dspark_pd.doctor_files import parse, parse_command
from dspark_pd.doctor_shell import commands
from outcome import Run

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCH = REPOSITORY / "scripts" / "launch"
CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -- what is an engine ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "python -m foo --tp 2 --disaggregation-mode prefill",
        (LAUNCH / "cpu_twin.sh").read_text(),
    ],
)
def test_a_file_that_starts_no_sglang_is_refused(
    bench: Bench, run: Run, text: str
) -> None:
    path = bench.file("other.sh", text)
    outcome = run("doctor", "--prefill", path, "--decode", path)
    assert (outcome.code, outcome.codes) == (2, ["U004"])
    assert "no sglang serve" in outcome.document["errors"][0]["found"]


def test_engines_without_a_mode_are_no_pair(bench: Bench, run: Run) -> None:
    plain = f"sglang serve --model-path {bench.model('qwen', QWEN)}"
    path = bench.file("plain.sh", plain)
    outcome = run("doctor", "--prefill", path, "--decode", path)
    (finding,) = outcome.data["findings"]
    assert (outcome.code, finding["code"]) == (1, "DOC-ROLE")
    assert finding["message"].count("no --disaggregation-mode") == 2
    decode = bench.file("decode.sh", f"{plain} --disaggregation-mode decode")
    outcome = run("doctor", "--prefill", path, "--decode", decode)
    (finding,) = outcome.data["findings"]
    assert "--decode with --disaggregation-mode decode" in finding["message"]


def test_a_mode_that_cannot_be_read_is_not_refused(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    prefill = f"sglang serve --model-path {model} --disaggregation-mode $MODE_OF_IT"
    assert "DOC-ROLE" not in bench.codes(prefill, command(model, "decode"))


def test_a_model_that_is_not_named_is_not_called_none(bench: Bench) -> None:
    files = [f"sglang serve --disaggregation-mode {r}" for r in ("prefill", "decode")]
    messages = [finding.message for finding in bench.findings(*files)]
    assert any("names no --model-path" in message for message in messages)
    assert not any("None" in message for message in messages)


# -- as a shell would -------------------------------------------------------------------

SCRIPTS = {
    "continued lines": "sglang serve \\\n  --tp 4 \\\n  --x y",
    "quotes": """sglang serve --a 'b $C "d"' --e "f 'g' \\" h" --i j\\ k""",
    "empty": """sglang serve --a "" '' --b""",
    "comments": "# sglang\nsglang serve --a b#c # --d\n",
    "arguments of the script": 'sglang serve --a nixl "$@" $*',
    "defaults": 'sglang serve --a "${NO:-b c}" --d ${NO:-e f} ${NO-g} ${NO:=h}',
    "quoted defaults": """sglang serve ${NO:-"a b" c} "${NO:-"d ${NO-x} e"}" """,
    "guarded arrays": 'A=(a "b c"); sglang serve "${A[@]+"${A[@]}"}"',
    "nested defaults": 'sglang serve --a "${NO:-${NEITHER:-x/${B:-y}}}"',
    "alternatives": 'A=1; sglang serve ${A:+--a "$A"} ${NO:+--b "$NO"}',
    "variables": 'A=4\nB="$A"\nB2="c d"; sglang serve --a $B${A} --b "$B2" $B2',
    "appended variables": "A='--a b'\nA+=' --c d'\nsglang serve $A",
    "empty variables": 'A=""; sglang serve $A --a "$A"',
    "arrays": 'A=(--a b\n  "c d" # e\n)\nA+=(--f)\nsglang serve "${A[@]}"',
    "empty arrays": 'A=()\nsglang serve "${A[@]}" --a',
    "redirections": "sglang serve --a 1 >/dev/null 2>&1 --b 2 2>/dev/null",
    "pipes": "sglang serve --a 1 2>&1 | cat >&2",
    "both streams": "sglang serve --a 1 &>/dev/null; true",
    "lists": "true && sglang serve --a 1 && true --b; true --c",
    "background": "sglang serve --a 1 & wait",
    "a subshell": "(cd / && sglang serve --a 1)",
    "a here document": "cat >/dev/null <<'E'\nsglang isn't --z\nE\nsglang serve --a",
    "exported": "export A=1 B='2 3'\nsglang serve --a $A --b \"$B\"",
    "an interpreter in front": "env C=1 sglang serve --a 1",
    "with exec": "set -eu\nexec sglang serve --a 1",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_gives(name: str, tmp_path: Path) -> None:
    out = tmp_path / "words"
    stub = tmp_path / "sglang"
    stub.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{out}\n")
    stub.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = SCRIPTS[name]
    subprocess.run(
        ["bash", "-c", script], env=environ, check=True, timeout=30, capture_output=True
    )
    texts = [[word.text for word in words] for words in commands(script, {})]
    (ours,) = [texts for texts in texts if "sglang" in texts and "serve" in texts]
    assert ours[ours.index("sglang") + 1 :] == out.read_text().splitlines()


def test_the_launch_scripts_work_together(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_DIR", "/d")
    files = [LAUNCH / f"deepseek_v4_flash_{r}.sh" for r in ("prefill", "decode")]
    outcome = run("doctor", "--prefill", files[0], "--decode", files[1])
    found = {finding["code"] for finding in outcome.data["findings"]}
    assert (outcome.code, outcome.data["would_work"]) == (0, True)
    # The model is not on this machine; all else is read.
    assert found == {"DOC-CONFIG", "PD-DRAFT-WEIGHTS-UNKNOWN"}
    described = outcome.data["prefill"]["description"]
    assert (described["backend"], described["tp"]) == ("nixl", 4)
    monkeypatch.delenv("HICACHE_DIR")
    outcome = run("doctor", "--prefill", files[0], "--decode", files[1])
    messages = [f["message"] for f in outcome.data["findings"]]
    assert outcome.code == 0
    assert any("${HICACHE_DIR}, is not known" in text for text in messages)


def test_a_systemd_unit() -> None:
    read = parse_command(
        "[Unit]\nDescription=prefill\n[Service]\n"
        f'Environment={CAPTURE}=1 "{TAIL}=31"\n'
        'Environment="A=b c"\n'
        "ExecStart=/usr/bin/env HF=1 /opt/bin/python -m sglang.launch_server \\\n"
        "  --model-path /m --tp 4\nRestart=always\n"
    )
    assert read.args == {"model_path": "/m", "tp_size": 4}
    assert read.environ is not None
    expected = {CAPTURE: "1", TAIL: "31", "A": "b c", "HF": "1"}
    assert expected.items() <= read.environ.items()


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("--tp 2 --model /m", {"tp_size": 2, "model_path": "/m"}),
        ("mkdir --parents /x\nsglang serve --pp 2", {"pp_size": 2}),
        ("docker run --gpus all -e A=1 i sglang serve --tp 2", {"tp_size": 2}),
        ("bash -c 'sglang serve --tp 2'", {"tp_size": 2}),
        ("sglang serve --speculative-algo DSPARK", {"speculative_algorithm": "DSPARK"}),
        ("sglang serve --enable-hicache", {"enable_hierarchical_cache": True}),
        ("sglang serve --model-path 405", {"model_path": "405"}),
    ],
)
def test_which_words_are_an_engines_flags(text: str, args: dict) -> None:
    assert parse_command(text, outside={}).args == args


def test_of_two_engines_in_a_file_the_one_of_the_role_is_read(bench: Bench) -> None:
    both = (
        f"{command('/m', 'prefill', '--tp 2')} &\n{command('/m', 'decode', '--tp 4')}"
    )
    engine = bench.engine("decode", both)
    assert (engine.args["tp_size"], engine.args["disaggregation_mode"]) == (4, "decode")
    assert "starts 2 engines" in engine.problems[0].message
    assert engine.problems[0].code == "DOC-ARGS"


# -- what cannot be read ----------------------------------------------------------------


def told(bench: Bench, prefill: str, decode: str) -> tuple[list[str], list[str]]:
    """The messages of DOC-ARGS, and the codes of what would not work."""
    findings = bench.findings(prefill, decode)
    unread = [f.message for f in findings if f.code == "DOC-ARGS"]
    return unread, [f.code for f in findings if f.severity == "refuse"]


def test_what_could_not_be_read_refuses_nothing(bench: Bench) -> None:
    """Each would be a refusal if it were taken for absent, and is one where it is."""
    model, draft = bench.model("qwen", QWEN), dspark(bench)
    plain = command(model, "prefill")
    decode = command(model, "decode", draft)
    assert told(bench, plain, decode) == ([], ["PD-COLD-DRAFT"])
    for unread, shown in (
        ("--config /x.yaml", "--config /x.yaml"),
        ("$FLAGS", "$FLAGS"),
        ('"${FLAGS[@]}"', "${FLAGS[@]}"),
        ("--speculative-algorithm $ALGORITHM", "--speculative-algorithm, $ALGORITHM,"),
        ("--speculative-algorithm=$(pick)", "--speculative-algorithm, $(pick),"),
        ("--speculative-algoritm DSPARK", "--speculative-algorithm may be meant"),
    ):
        messages, refusals = told(bench, command(model, "prefill", unread), decode)
        assert refusals == [], unread
        assert len(messages) == 1 and shown in messages[0], messages


def test_a_number_without_a_value_refuses_nothing(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    prefill = command(model, "prefill", "--tp $TP --page-size $(pages)")
    decode = command(model, "decode", "--tp 3 --page-size 64")
    messages, refusals = told(bench, prefill, decode)
    assert refusals == []
    assert ["--tp-size" in messages[0], "--page-size" in messages[1]] == [True, True]
    assert bench.engine("prefill", prefill).shown.endswith("TP unknown PP 1)")


def test_variables_that_could_not_be_read_refuse_nothing(bench: Bench) -> None:
    model, draft = bench.model("qwen", QWEN), dspark(bench)
    decode = command(model, "decode", draft)
    cold = "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT"
    for env, flags in (
        (f"{CAPTURE}=$X", decode),
        (f"SGLANG_DSPARK_PD_ENABLE_PREFIL_CAPTURE=1 {TAIL}=8", decode),
        ("", f"{cold}=$X {decode}"),
        ("", f"source ./env.sh\n{decode}"),
        ("", f"EnvironmentFile=/etc/x\nExecStart={decode}"),
        ("", f"if $cold; then\n  export {cold}=1\nfi\n{decode}"),
        ("", f"ENV {cold} 1\n{decode}"),
        ("", f"{decode} &\n{cold}=1 true"),
    ):
        messages, refusals = told(bench, command(model, "prefill", env=env), flags)
        assert refusals == [], (env, flags)
        assert len(messages) == 1, messages


@pytest.mark.parametrize(
    "before",
    [
        "pkill -f sglang.launch_server || true",
        'echo "starting sglang.launch_server"',
        'ENGINE="python3 -m sglang.launch_server"',
        "python -m sglang.launch_server --help",
    ],
)
def test_the_name_of_sglang_alone_starts_nothing(before: str) -> None:
    text = f"{before}\nexec /opt/engine --model-path /m --tp 2\n"
    command = parse_command(text, "prefill", outside={})
    assert (command.args, command.count) == ({"model_path": "/m", "tp_size": 2}, 1)


def test_a_default_does_not_count_after_a_sourced_file() -> None:
    text = "source ./env.sh\nsglang serve --model-path /m --tp ${TP:-4}"
    assert parse_command(text, outside={}).unread == {"tp_size": "${TP:-4}"}
    text = text.replace("serve", "serve --pp ${PP:-1}").replace("source", "PP=2; .")
    assert parse_command(text, outside={}).args["pp_size"] == 2


def test_an_assignment_under_a_condition_is_no_value() -> None:
    text = 'if true; then TP=2; fi\nsglang serve --model-path /m --tp "$TP"'
    assert parse_command(text, outside={}).unread["tp_size"] == "$TP"
    text = "if true; then TP=2 sglang serve --model-path /m; fi"
    assert parse_command(text, outside={}).environ == {"TP": "2"}


def test_an_array_that_grows_under_a_condition_is_open(bench: Bench) -> None:
    text = """
ARGS=(--model-path /m)
if [[ "$ROLE" == prefill ]]; then
  ARGS+=(--disaggregation-mode prefill)
else
  ARGS+=(--disaggregation-mode decode)
fi
ARGS+=(--tp 2)
sglang serve "${ARGS[@]}"
"""
    command = parse_command(text, outside={})
    assert command.args == {"model_path": "/m", "tp_size": 2}
    assert (command.open_args, set(command.sources)) == (
        True,
        {"ARGS under a condition"},
    )
    problems = [finding.message for finding in bench.engine("prefill", text).problems]
    assert sum("under a condition" in message for message in problems) == 1


def test_a_commented_variable_is_none(bench: Bench) -> None:
    model, draft = bench.model("qwen", QWEN), dspark(bench)
    decode = (
        f"  # SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT=1\n{command(model, 'decode', draft)}"
    )
    assert told(bench, command(model, "prefill"), decode) == ([], ["PD-COLD-DRAFT"])


def test_what_the_doctor_does_not_need_is_not_mentioned(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    flags = '--host "$HOST_ADDRESS" --port $(free-port) --log-level info'
    pair = [command(model, role, flags) for role in ("prefill", "decode")]
    assert told(bench, *pair) == ([], [])


@pytest.mark.parametrize("name", ["attn_dp_size", "ep_size", "enable_fp32_lm_head"])
def test_flags_of_sglang_are_no_misspellings(name: str) -> None:
    assert meant_by(name) is None
    assert field_of(name) == name


def test_every_name_that_is_read_has_its_kind() -> None:
    """Else a value of another kind, or one that was not read, would pass."""
    package = Path(dspark_pd.__file__).parent
    overlay = package.parent / "sglang/srt/disaggregation/common/peer_description.py"
    texts = [path.read_text() for path in package.glob("doctor*.py")]
    calls = r"(?:\.arg|\.has|_differ|args\.get)\(\s*\"(\w+)\""
    names = set(re.findall(calls, "".join([*texts, overlay.read_text()])))
    assert len(names) > 20
    assert names <= set(FIELDS)


def test_every_key_of_a_description_has_its_sources(bench: Bench) -> None:
    args = dict.fromkeys(FIELDS)
    module = load("peer_description")
    keys: set[str] = set()
    v4 = {**QWEN, "compress_ratios": [0, 4], "dspark_block_size": 5}
    for algorithm, config in (("DSPARK", QWEN), (None, v4)):
        given = {**args, "speculative_algorithm": algorithm, "page_size": 1}
        given |= {"disaggregation_transfer_backend": "nixl", "kv_cache_dtype": "auto"}
        given |= {"speculative_num_draft_tokens": 5}
        for role in ("prefill", "decode"):
            keys |= set(
                module.describe(
                    given,
                    role=role,
                    target_config=config,
                    draft_config=DRAFT,
                    environ={CAPTURE: "1", TAIL: "8"},
                )
            )
    keys |= {"draft_weights", "draft_kv_dtype"}
    assert keys - {"version", "role"} == set(SOURCES)
    sources = {name for names in SOURCES.values() for name in names}
    assert sources <= set(FIELDS) | set(VARIABLES)
    table = load("peer_agreement_table")
    for name in ("CAPTURE", "TAIL_TOKENS", "LAYER_IDS", "ALLOW_COLD_DRAFT"):
        assert getattr(table, name) == getattr(doctor_fields, name)


# -- values that are none ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "name", "shown"),
    [
        ("--tp four", "--tp-size", "'four'"),
        ("--tp --pp 2", "--tp-size", "given without a value"),
        ("--tp 4 5", "--tp-size", "[4, 5]"),
        ("--model-path", "--model-path", "given without a value"),
        ("--speculative-num-draft-tokens 5.5", "--speculative-num-draft", "'5.5'"),
    ],
)
def test_a_value_that_is_none_is_named(
    bench: Bench, prefill: str, name: str, shown: str
) -> None:
    model = bench.model("qwen", QWEN)
    findings = bench.findings(
        f"sglang serve --disaggregation-mode prefill {prefill}",
        command(model, "decode"),
    )
    assert [f.code for f in findings if f.severity == "refuse"] == ["DOC-VALUE"]
    message = findings[0].message
    assert name in message and shown in message


@pytest.mark.parametrize("value", ["on", "2", "''"])
def test_a_switch_that_is_neither_on_nor_off_is_named(bench: Bench, value: str) -> None:
    """The engine does not start with it either."""
    model = bench.model("qwen", QWEN)
    prefill = command(model, "prefill", env=f"{CAPTURE}={value}")
    findings = bench.findings(prefill, command(model, "decode"))
    assert [f.code for f in findings] == ["DOC-VALUE"]
    assert f"{CAPTURE} is" in findings[0].message
    assert "1 or 0" in findings[0].message


def test_a_variable_that_is_no_number_is_named(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    env = f"{TAIL}=abc {CAPTURE}=1 SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS=x"
    findings = bench.findings(
        command(model, "prefill", env=env), command(model, "decode", dspark(bench))
    )
    messages = [f.message for f in findings if f.code == "DOC-VALUE"]
    assert len(messages) == 2
    assert f"{TAIL} is 'abc', not a whole number" in messages[0]


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"server_args": None}, "server_args is null"),
        ({"server_args": [1]}, "server_args is [1]"),
        ({"server_args": {"tp_size": 1}, "environ": [1]}, "environ is [1]"),
        ([{"tp_size": 1}], "a list, not an object"),
        ({}, "no flag of an engine"),
    ],
)
def test_json_of_another_shape_is_refused(
    bench: Bench, run: Run, document: object, found: str
) -> None:
    bad = bench.file("bad.json", json.dumps(document))
    outcome = run("doctor", "--prefill", bad, "--decode", bad)
    assert (outcome.code, outcome.codes) == (2, ["U004"])
    assert found in outcome.document["errors"][0]["found"]


@pytest.mark.parametrize(
    ("source", "found", "hint"),
    [
        ("nowhere.sh", "no such file", "URL|FILE"),
        (".", "is a directory", "URL|FILE"),
        ("host:30000", "an address without http://", "http://host:30000"),
        ("ftp://host:1", "an address with ftp://", "http://host:1"),
        ("http://host:abc", "not an address", "http://host:port"),
        ("http://:30000", "no host", "http://host:port"),
        ("binary", "a binary file", "the file that starts"),
        ("broken.json", "not readable", "broken.json, corrected"),
        ("quote.sh", "quote ' of line 1", "quote.sh, corrected"),
    ],
)
def test_a_source_that_is_no_engine_is_said_as_such(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    found: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\x7fELF\x00\xff\xfe")
    Path("broken.json").write_text('{"tp_size": ')
    Path("quote.sh").write_text("sglang serve --model-path '/m")
    outcome = run("doctor", "--prefill", source, "--decode", source)
    assert (outcome.code, outcome.codes) == (2, ["U004"])
    (error,) = outcome.document["errors"]
    assert found in error["found"]
    assert f"--prefill {hint}" in error["next"]


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "soon"])
def test_a_timeout_that_is_none(run: Run, seconds: str) -> None:
    outcome = run("doctor", "--prefill", "a", "--decode", "b", "--timeout", seconds)
    assert (outcome.code, outcome.codes) == (2, ["U001"])
    assert "--timeout" in outcome.document["errors"][0]["found"]


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"text_config": 3, "num_attention_heads": "four"},
        {"head_dim": {}},
        {"architectures": {"a": 1}},
    ],
)
def test_a_model_config_of_another_shape_is_named(bench: Bench, config: object) -> None:
    model = bench.model("odd", config)  # type: ignore[arg-type]
    bench.file("odd/config.json", json.dumps(config))
    codes = bench.codes(command(model, "prefill"), command(model, "decode"))
    assert set(codes) <= {"DOC-CONFIG"}


SAMPLES = "sglang serve --tp --config $X ${X:- } ( ) ' \" ` 4 \\ \n ; | > < & A= A+=( # $( <<E"
WORDS = st.sampled_from(SAMPLES.split(" "))


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.one_of(WORDS, st.text(max_size=3)), max_size=25))
@example(["sglang", "serve", "--tp", "$(", "4"])
@example(["sglang --tp $(sglang --tp 4"])
@example(["sglang serve --tp ", "${X:-" * 3000])
@example(["[" * 100_000])
def test_no_text_breaks_the_reader(parts: list[str]) -> None:
    """It is read, or refused with a ValueError that becomes U004."""
    for text in ("".join(parts), " ".join(parts)):
        with contextlib.suppress(ValueError):
            parse(text, "prefill")
