"""Scripts: --help answers at once, and SGLang accepts the flags of the launch scripts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_pd.bed import gpu_check
from dspark_pd.bed.serve import _arguments, _specs
from dspark_pd.bed.specs import to_argv
from dspark_pd.cli import main
from dspark_pd.doctor import sglang_parser
from dspark_pd.doctor.arguments import parse
from dspark_pd.doctor.fields import FIELDS, settled

pytestmark = pytest.mark.unit

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LAUNCH = SCRIPTS / "launch"
SHELL = sorted(path for path in SCRIPTS.rglob("*.sh") if path.name != "environment.sh")
PYTHON = sorted(
    path for path in SCRIPTS.glob("*.py") if path.read_text().startswith("#!")
)
# Runs a script where torch and sglang cannot be imported.
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = sys.modules['sglang'] = None; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("script", SHELL, ids=name_of)
def test_a_shell_script_explains_itself_and_does_nothing(
    script: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["bash", str(script), "--help"],
        env={"PATH": "/usr/bin:/bin", "DSPARK_PD_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert f"scripts/{script.relative_to(SCRIPTS)}" in done.stdout
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("script", PYTHON, ids=name_of)
def test_a_python_script_explains_itself_without_torch(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(script), "--help"],
        env={
            **os.environ,
            "PYTHONPATH": str(SCRIPTS) + ":" + str(SCRIPTS.parent / "python"),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def arguments_of(script: str, program: str, tmp_path: Path) -> list[str]:
    """What a launch script gives to `program`, which a stub stands in for."""
    stub = tmp_path / program
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(LAUNCH / script), "--log-level", "error"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "HICACHE_DIR": "/tmp/hicache",
            "TRANSFER": "mooncake",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.splitlines()


SPELLINGS = [
    "--model",
    "m",
    "--tp",
    "4",
    "--speculative-algo",
    "dspark",
    "--page-size=8",
    "--enable-hicache",
    "--attn-cp-size",
    "2",
    "--speculative-dspark-block-size",
    "4",
    "--disable-radix-cache",
    "--cuda-graph-backend-prefill",
    "disabled",
    "--trust-remote-code",
]


def in_this_process(
    command: list[str], input: str, **_: object
) -> subprocess.CompletedProcess[str]:
    """Run the code of ``python -c`` here: SGLang is imported here as well, and slowly."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setattr(sys, "stdin", io.StringIO(input))
        exec(command[2], {})
    return subprocess.CompletedProcess(command, 0, told.getvalue(), "")


def test_sglang_takes_the_flags_of_the_launch_scripts_and_reads_them_as_we_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here")
    gpu = {}
    for role in ("prefill", "decode"):
        verb, *gpu[role] = arguments_of(
            f"deepseek_v4_flash_{role}.sh", "sglang", tmp_path
        )
        assert verb == "serve"
    twin = [
        (spec.role, to_argv(spec.flags(30000, 8998)))
        for spec in _specs(_arguments([]), tmp_path)
    ]
    config = tmp_path / "c.yaml"
    config.write_text("dp-size: 2\nenable-pdmux: true\n")
    ours = [*SPELLINGS, "--config", str(config)]
    # What the list for a GPU machine would start.
    listed = [
        spec.command(1, 2 if spec.role == "prefill" else None)[3:]
        for wave in gpu_check.WAVES
        for spec in gpu_check.specs(wave, "cuda")
    ]
    lines = [*gpu.values(), *(argv for _, argv in twin), *listed, ours]
    lines.append(["--tp", "four"])
    monkeypatch.setattr(sglang_parser.subprocess, "run", in_this_process)
    *accepted, refused = sglang_parser.ask_all(lines)
    for argv, found in zip(lines, accepted, strict=False):
        assert found["unknown"] == [], argv
        known = parse(argv, tmp_path)[0]
        theirs = {k: settled(k, v) for k, v in found["args"].items() if k in FIELDS}
        # SGLang's parser leaves out what is its default.
        assert theirs.items() <= known.items(), argv
    for role, found in zip(gpu, accepted, strict=False):
        assert found["args"]["disaggregation_mode"] == role
        assert found["args"]["speculative_algorithm"] == "DSPARK"
        assert (found["args"]["tp_size"], found["args"]["log_level"]) == (4, "error")
        # As TRANSFER says; it is SGLang's default.
        backend = found["args"].get("disaggregation_transfer_backend", "mooncake")
        assert backend == "mooncake"
    assert accepted[1]["args"]["cuda_graph_max_bs_decode"] == 64
    assert [role for role, _ in twin] == [
        found["args"]["disaggregation_mode"] for found in accepted[2 : 2 + len(twin)]
    ]
    assert accepted[-1]["args"]["enable_pdmux"] is True
    assert "invalid int value: 'four'" in refused["refused"]


def test_the_gpu_recipe_is_described_by_its_own_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``describe --help`` says: a program of that name in front on PATH."""
    with pytest.raises(SystemExit, match="0"):
        main(["describe", "--help"])
    told = capsys.readouterr().out.splitlines()
    [made] = [line for line in told if line.startswith("  printf ")]
    made = made.replace("/tmp/describe", str(tmp_path)).replace(
        "dspark-pd describe",
        f"{sys.executable} -m dspark_pd describe -q --without-sglang",
    )
    subprocess.run(["sh", "-c", made], check=True, timeout=30)
    (tmp_path / "sglang").chmod(0o755)
    pair = []
    for role in ("prefill", "decode"):
        done = subprocess.run(
            ["bash", str(LAUNCH / f"deepseek_v4_flash_{role}.sh")],
            env={
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "PYTHONPATH": str(SCRIPTS.parent / "python"),
                "HICACHE_DIR": "/fast/disk",
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        (tmp_path / f"{role}.json").write_text(done.stdout)
        pair += [f"--{role}", str(tmp_path / f"{role}.json")]
    assert main(["doctor", *pair, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["data"]["findings"]
    # Neither the checkpoint nor its weights are here.
    assert {f["code"] for f in findings} <= {"DOC-CONFIG", "PD-DRAFT-WEIGHTS-UNKNOWN"}


def test_the_router_accepts_its_flags(tmp_path: Path) -> None:
    launch_router = pytest.importorskip("sglang_router.launch_router")
    module, *flags = arguments_of("router.sh", "python3", tmp_path)[1:]
    args = launch_router.parse_router_args(flags)
    assert module == "sglang_router.launch_router"
    assert args.pd_disaggregation
    assert args.prefill_urls == [("http://127.0.0.1:30000", 8998)]
    assert args.decode_urls == ["http://127.0.0.1:30001"]


def test_every_launch_script_has_its_flags_parsed_here() -> None:
    gpu = {f"deepseek_v4_flash_{role}.sh" for role in ("prefill", "decode")}
    found = {path.name for path in LAUNCH.glob("*.sh")}
    assert found == gpu | {"cpu_twin.sh", "router.sh"}


@pytest.mark.parametrize("script", [*SHELL, *PYTHON], ids=name_of)
def test_a_script_can_be_started(script: Path) -> None:
    assert os.access(script, os.X_OK)


def soaked(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "soak.py"), *options],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_soak_without_sglang_says_what_to_install(tmp_path: Path) -> None:
    """The system's Python, say: refused before an engine starts, in sentences."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    done = soaked("--minutes", "0.01", DSPARK_PD_PYTHON=str(bare))
    assert done.returncode == 2
    assert "soak: SGLang is missing" in done.stderr
    assert f"next: cd {SCRIPTS.parent} && {bare} -m pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--minutes=-1", "a number above 0"),
        ("--minutes=nan", "a number above 0"),
        ("--limit=0", "a number above 0"),
        ("--leavers=2", "0 to 1"),
        ("--in-flight=0", "1 or more"),
        ("--new-tokens 9 2", "LOW HIGH"),
    ],
)
def test_a_soak_refuses_a_number_that_means_nothing(option: str, expected: str) -> None:
    done = soaked(*option.split())
    assert done.returncode == 2
    assert f"expected {expected}, found" in done.stderr


def test_the_help_of_the_soak_describes_each_option() -> None:
    text = " ".join(soaked("--help").stdout.split())
    for option, told in (
        ("--minutes N", "minutes of traffic"),
        ("--seed N", "drawn from it"),
        ("--in-flight N", "clients at a time"),
        ("--leavers SHARE", "leave early"),
        ("--prompt-tokens LOW HIGH", "tokens of a prompt"),
        ("--new-tokens LOW HIGH", "tokens of an answer"),
        ("--limit SECONDS", "hung"),
        ("tail-pp2} ...]", "one for each word"),
    ):
        assert told in text.rpartition(f"{option} ")[2][:80], option
