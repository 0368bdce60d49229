"""From an engine's command to what ``describe`` prints and the doctor reads."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_pd.doctor.arguments import NotArguments, argv_of, parse, read_line
from dspark_pd.doctor.fields import ALIASES, FIELDS, VARIABLES, meant_by
from outcome import Run

pytestmark = pytest.mark.unit
FLAGS = ["--model-path", "/m", "--tp", "4"]


def parsed(*argv: str, folder: Path = Path()) -> dict:
    return parse(argv, folder)[0]


# -- the words of a command -------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher",
    [
        "python -m sglang.launch_server",
        "/venv/bin/python3.11 -u -X dev -m sglang.launch_server",
        "-m sglang.launch_server",
        "exec env A=1 B=x=y python3 -m sglang.launch_server",
        "A=1 nohup python -m dynamo.sglang",
        "sglang serve",
        "/venv/bin/sglang serve",
        "",
    ],
)
def test_a_launcher_is_taken_off(launcher: str) -> None:
    words = argv_of([*launcher.split(), *FLAGS])
    assert words.argv == FLAGS
    assert words.environ == {
        name: value
        for name, value in (("A", "1"), ("B", "x=y"))
        if f"{name}={value}" in launcher
    }


def test_sglang_serve_takes_the_model_in_front() -> None:
    assert argv_of(["sglang", "serve", "org/m", "--tp", "4"]).argv == [
        *("--model-path", "org/m", "--tp", "4")
    ]


@pytest.mark.parametrize(
    "words", ["", "docker run engine", "numactl -N 0 python -m sglang.launch_server"]
)
def test_another_program_in_front_is_refused(words: str) -> None:
    with pytest.raises(NotArguments):
        argv_of([*words.split(), *(FLAGS if words.startswith("docker") else [])])


# -- one flat line ----------------------------------------------------------------------


def test_a_flat_line_may_go_on_behind_a_backslash_and_have_comments() -> None:
    text = """
    # how we start it

    SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=32 sglang serve --model-path '/with space' \\
        --page-size=64 \\
        --disable-radix-cache  # not shared
    # that is all
    """
    words = read_line(text)
    assert words.environ == {"SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": "32"}
    assert parsed(*words.argv) == {
        "model_path": "/with space",
        "page_size": 64,
        "disable_radix_cache": True,
    }


@pytest.mark.parametrize(
    "line",
    [
        "sglang serve --model-path $MODEL",
        "sglang serve --model-path ${MODEL:-/m}",
        'sglang serve --model-path "$MODEL"',
        "sglang serve --tp `nproc`",
        "sglang serve --model-path ~/m",
        "export A=1\nsglang serve --model-path /m",
        "A=1\nsglang serve --model-path /m",
        "cd /srv && sglang serve --model-path /m",
        "sglang serve --model-path /m & sglang serve --model-path /n",
        "sglang serve --model-path /m > log",
        "sglang serve --model-path /m | tee log",
        "sglang serve --model-path /m \\\n# eight\n--tp 8",
        "sglang serve --model-path /m # eight \\\n--tp 8",
        "sglang serve --json-model-override-args '{\n}'",
    ],
)
def test_what_only_a_shell_reads_is_refused_with_the_way_out(line: str) -> None:
    with pytest.raises(NotArguments, match="run dspark-pd describe"):
        read_line(line)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab =-#\\\n'\"$`&|;<>(){}~\t", max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        words = read_line(text)
        parse(words.argv, Path("/nowhere"))
    except NotArguments:
        return
    # What is read has one command, and the shell's own parser sees the same words.
    joined = re.sub(r"(?<!\\)((?:\\\\)*)\\(\n|\Z)", r"\1", text)
    (line,) = [x for x in joined.split("\n") if shlex.split(x, True)]
    assert shlex.split(line, comments=True)[-len(words.argv) :] == words.argv


# -- SGLang's spelling rules ------------------------------------------------------------


def test_names_may_be_shortened_and_have_other_spellings() -> None:
    assert parsed("--speculative-algo", "DSPARK", "--tensor-parallel-size=2") == {
        "speculative_algorithm": "DSPARK",
        "tp_size": 2,
    }
    assert parsed("--dp", "2", "--model", "m", "--enable-hicache") == {
        "dp_size": 2,
        "model_path": "m",
        "enable_hierarchical_cache": True,
    }
    assert parsed("--tp", "2", "--tp", "4") == {"tp_size": 4}


@pytest.mark.parametrize(
    "argv", [["--speculative", "x"], ["--tp"], ["--disable-radix-cache=1"]]
)
def test_what_sglangs_parser_refuses_is_refused(argv: list[str]) -> None:
    with pytest.raises(NotArguments):
        parse(argv, Path())


def test_other_flags_are_named_and_not_read() -> None:
    argv = ["--mem-fraction-static", "0.5", *FLAGS, "--lora-paths", "a", "b", "--x=1"]
    args, unknown = parse(argv, Path())
    assert args == {"model_path": "/m", "tp_size": 4}
    assert unknown == ["--mem-fraction-static", "--lora-paths", "--x"]


def test_flags_of_a_config_file_come_first(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "tp-size: 8\npage-size: 64\nenable-hicache: true\nenable-pdmux: false\n"
        "json-model-override-args: {a: 1}\nlora-paths: [x, y]\ntp_size: 16\n"
    )
    args, unknown = parse(["--tp", "4", "--config", "c.yaml"], tmp_path)
    assert args == {
        "tp_size": 4,
        "page_size": 64,
        "enable_hierarchical_cache": True,
        "json_model_override_args": '{"a": 1}',
    }
    assert unknown == ["--lora-paths", "--tp_size"]


@pytest.mark.parametrize("text", [None, "- a", "a: [", "\0"])
def test_a_config_file_that_cannot_be_read_is_named(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(NotArguments, match=r"--config c\.yaml: "):
        parse(["--config", "c.yaml"], tmp_path)


def test_no_known_name_looks_like_a_misspelling() -> None:
    for name in (*FIELDS, *ALIASES):
        unknown = parse([f"--{name.replace('_', '-')}", "1"], Path())[1]
        assert unknown in ([], ["1"]), "a switch takes no value"
    assert [name for name in VARIABLES if meant_by(name)] == []
    assert meant_by("--trust-remote-code") is None
    assert meant_by("--dwdp-size") is None


# -- the command ------------------------------------------------------------------------


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_pd.verbs.describe._has_sglang", lambda: False)


@pytest.mark.usefixtures("without_sglang")
def test_what_is_described_is_what_the_doctor_reads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE", "1")
    monkeypatch.setenv("SGLANG_API_KEY", "x")
    monkeypatch.setenv("SGLANG_DSPARK_PD_X", "1")
    command = ["--model-path", str(tmp_path), "--speculative-algorithm", "dspark"]
    words = ["env", "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=8", "sglang", "serve"]
    outcome = run("describe", "--", *words, *command, "--x", "1", text=True)
    described = json.loads(outcome.out)
    assert outcome.code == 0
    assert described.pop("version", "no release") != "no release"
    assert described == {
        "schema": 1,
        "server_args": {
            "model_path": str(tmp_path),
            "speculative_algorithm": "DSPARK",
        },
        "environ": {
            "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1",
            "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": "8",
            "SGLANG_DSPARK_PD_X": "1",
        },
        "unknown": ["--x"],
    }
    assert "not read: --x" in outcome.err
    quiet = run("describe", "-q", "--", *words, *command, "--x", "1", text=True)
    assert (quiet.out, quiet.err) == (outcome.out, "")
    file = tmp_path / "described.json"
    file.write_text(outcome.out)
    findings = run("doctor", "--prefill", file, "--decode", file).data["findings"]
    assert "DOC-VALUE" not in [finding["code"] for finding in findings]


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize("words", [[], ["--"], ["--", "docker", "run"], ["--tp", "4"]])
def test_words_that_start_no_engine_are_a_usage_error(
    run: Run, words: list[str]
) -> None:
    assert run("describe", *words).code == 2


def test_a_local_model_is_described_by_its_full_path(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--", "--model-path", "m", "--speculative-draft-model", "org/draft"]
    outcome = run("describe", "--without-sglang", *words)
    assert outcome.data["server_args"] == {
        "model_path": str(tmp_path / "m"),
        "speculative_draft_model_path": "org/draft",
    }


# -- SGLang's own parser ----------------------------------------------------------------

PARSER = """
import argparse
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        print("noise of an import")
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--tp-size", type=int, default=1)
        parser.add_argument("--only-here", action="store_true")
"""


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in with a parser, importable by a process of this interpreter."""
    package = tmp_path / "lib" / "sglang" / "srt"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "server_args.py").write_text(PARSER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.setattr("dspark_pd.verbs.describe._has_sglang", lambda: True)
    return package


@pytest.mark.usefixtures("sglang")
def test_sglangs_own_parser_decides_where_it_is_installed(run: Run) -> None:
    words = ["--", *FLAGS, "--only-here", "--mem", "1"]
    outcome = run("describe", *words)
    assert outcome.data["server_args"] == {
        "model_path": "/m",
        "tp_size": 4,
        "only_here": True,
    }
    assert outcome.data["unknown"] == ["--mem"]
    lost = run("describe", "--", *FLAGS, "lost")
    assert lost.data["unknown"] == ["lost"]
    refused = run("describe", "--", "--tp", "four")
    assert refused.codes == ["U008"]
    assert "SGLang refuses it" in refused.document["errors"][0]["found"]


def test_without_its_parser_the_known_flags_are_read_with_a_note(
    run: Run, sglang: Path
) -> None:
    (sglang / "server_args.py").write_text("raise ImportError('no torch')")
    outcome = run("describe", "--", *FLAGS, "--only-here")
    assert outcome.data["server_args"] == {"model_path": "/m", "tp_size": 4}
    assert outcome.data["unknown"] == ["--only-here"]
    assert any("no torch" in note for note in outcome.document["notes"])


@pytest.mark.parametrize(
    ("argv", "code", "cause", "hint"),
    [
        (
            "numactl -N 0 python -m sglang.launch_server --tp 2",
            *(
                "U006",
                "another program, numactl,",
                "numactl ... dspark-pd describe -- ",
            ),
        ),
        (
            "./start.sh 2",
            *("U006", "a script", "PATH=/tmp/describe:$PATH ./start.sh 2,"),
        ),
        ("bash start.sh", *("U006", "a script", "describe:$PATH bash start.sh,")),
        ("python -m sglang.launch_server", *("U006", "flags are missing", "its flags")),
        ("sglang serve", *("U006", "flags are missing", "its flags")),
        (
            "A=1 env docker run x",
            *("U006", "docker is no launcher", "inside a container"),
        ),
        ("--config no.yaml", *("U008", "file of --config is missing", "the path")),
        ("--tp", *("U008", "without its value", "--help lists")),
        ("--spec DSPARK", *("U008", "fits several", "in full")),
    ],
)
def test_the_way_out_fits_the_cause(
    run: Run, argv: str, code: str, cause: str, hint: str
) -> None:
    outcome = run("describe", "--without-sglang", "--", *argv.split())
    assert outcome.codes == [code]
    (error,) = outcome.document["errors"]
    assert cause in error["cause"] and hint in error["next"]
    assert "launcher, not with" not in error["found"]


@pytest.mark.parametrize(
    ("argv", "unread"),
    [
        ("--tp 2 lost", ["lost"]),
        ("--mem 1 --tp 2 lost more", ["--mem", "lost", "more"]),
        ("--lora a b --tp 2", ["--lora"]),
    ],
)
def test_words_that_belong_to_no_flag_are_named(
    run: Run, argv: str, unread: list[str]
) -> None:
    outcome = run("describe", "--without-sglang", "--", *argv.split())
    assert outcome.data["server_args"] == {"tp_size": 2}
    assert outcome.data["unknown"] == unread
    assert f"not read: {', '.join(unread)}" in outcome.document["notes"]
