"""Bad input of the demo: one message, a next step, exit code 2, nothing started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_pd.bed import BedError, EngineSpec, RouterSpec, checks, counters, diagnosis
from dspark_pd.bed.demo import main
from dspark_pd.bed.models import MODELS, check_checkpoint, check_draft
from dspark_pd.bed.specs import base_environment

pytestmark = pytest.mark.unit


def checkpoint(folder: Path, config: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_checkpoint_path_is_checked(tmp_path: Path) -> None:
    with pytest.raises(BedError, match="no such folder"):
        check_checkpoint(tmp_path / "none", "--model")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BedError, match=r"no config\.json"):
        check_checkpoint(empty, "--model")
    with pytest.raises(BedError, match="does not parse"):
        check_checkpoint(checkpoint(tmp_path / "broken", "{"), "--model")
    (empty / "config.json").write_text("{}")
    with pytest.raises(BedError, match="safetensors"):
        check_checkpoint(empty, "--model")


@pytest.fixture
def tiny_pair(tmp_path: Path) -> list[str]:
    """Arguments that name a pair which passes for one as long as none is started."""
    target = checkpoint(tmp_path / "target", "{}")
    config = '{"architectures": ["Qwen3DSparkModel"], "block_size": 4}'
    draft = checkpoint(tmp_path / "draft", config)
    return ["--model", str(target), "--draft", str(draft)]


def test_a_draft_must_be_a_dspark_draft(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "plain", '{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(BedError, match="name no DSpark draft"):
        check_draft(plain, "--draft")
    config = '{"architectures": ["Qwen3DSparkModel"], "block_size": 4}'
    assert check_draft(checkpoint(tmp_path / "draft", config), "--draft") == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "/no/such/model"], "no such folder"),
        (["--draft", "/no/such/draft"], "no such folder"),
        (["--modes", "pd-nonsense"], "no mode 'pd-nonsense'"),
    ],
)
def test_bad_arguments_end_at_once(
    arguments: list[str],
    text: str,
    tiny_pair: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*tiny_pair, *arguments]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert "next:" in said
    assert "Traceback" not in said


def test_a_port_in_use_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
    tiny_pair: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    versions = dict.fromkeys(checks._NEEDED, "0.5.23")
    monkeypatch.setattr(checks, "_probe", lambda: versions)
    monkeypatch.setattr(checks, "check_applied", lambda: None)
    monkeypatch.setattr(checks, "available_bytes", lambda: 2**40)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([*tiny_pair, "--port", str(port)]) == 2
    assert f"port {port} is in use" in capsys.readouterr().err


@pytest.mark.parametrize("missing", list(checks._NEEDED))
def test_each_missing_distribution_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = dict.fromkeys(checks._NEEDED, "1") | {missing: None}
    monkeypatch.setattr(checks, "_probe", lambda: versions)
    with pytest.raises(BedError, match=f"distribution {missing} in") as caught:
        checks.check_installed()
    assert "pip install" in caught.value.next_step


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys(checks._NEEDED, "0.5.22")
    monkeypatch.setattr(checks, "_probe", lambda: versions)
    with pytest.raises(BedError, match=r"does not run with SGLang 0\.5\.22") as caught:
        checks.check_installed()
    assert "requirements/engine-0.5.23.txt" in caught.value.next_step


def test_the_probe_asks_the_interpreter_of_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSPARK_PD_PYTHON", sys.executable)
    assert set(checks._probe()) == set(checks._NEEDED)


def test_an_environment_without_sglang_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_PD_PYTHON", str(tmp_path / "no-python"))
    with pytest.raises(BedError, match="not served by the patch set"):
        checks.check_applied()


def test_a_set_that_is_not_applied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], 1, "needed  relay.keep-handoff-input", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(BedError, match="not applied") as caught:
        checks.check_applied()
    assert "needed  relay" in caught.value.found
    assert caught.value.next_step == "dspark-pd apply --component all"


@pytest.mark.parametrize(
    ("said", "cause", "next_step"),
    [
        (
            "ModuleNotFoundError: No module named 'mooncake'",
            "the wheel is missing",
            "pip install",
        ),
        (
            "ImportError: libnuma.so.1: cannot open shared object file",
            "a library of the system is missing",
            "install what it needs",
        ),
        ("ImportError: GLIBC_2.38 not found", "", "install what it needs"),
    ],
)
def test_a_mooncake_that_does_not_load_is_refused(
    said: str, cause: str, next_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "base_environment", dict)
    answer = subprocess.CompletedProcess([], 1, "", f"Traceback\n{said}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    checks.check_backend("nixl")
    with pytest.raises(BedError, match="Mooncake's transfer engine does") as caught:
        checks.check_backend("mooncake")
    assert caught.value.usage
    assert caught.value.found == said
    assert caught.value.cause == cause
    assert next_step in caught.value.next_step


@pytest.fixture
def nixl_wheel(tmp_path: Path) -> Path:
    """An environment with what the NIXL wheel brings, and an interpreter in it."""
    libraries = tmp_path / "nixl_cu13.libs"
    libraries.mkdir()
    (libraries / "libibverbs-1de.so.1.14").touch()
    (tmp_path / "nixl_cu13").mkdir()
    (tmp_path / "nixl_cu13/__init__.py").touch()
    return tmp_path


def interpreter_of(site: Path, has_library: bool) -> str:
    """An interpreter whose loader finds the system's libibverbs, or does not."""
    load = "" if has_library else "raise OSError"
    (site / "ctypes.py").write_text(f"def CDLL(name):\n    {load or 'return name'}\n")
    script = site / f"python-{has_library}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_engines_get_the_library_of_the_nixl_wheel(
    nixl_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_PD_PYTHON", interpreter_of(nixl_wheel, False))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/users/own")
    links, libraries, own = base_environment()["LD_LIBRARY_PATH"].split(":")
    assert (libraries, own) == (str(nixl_wheel / "nixl_cu13.libs"), "/users/own")
    link = Path(links) / "libibverbs.so.1"
    assert link.resolve() == nixl_wheel / "nixl_cu13.libs/libibverbs-1de.so.1.14"


@pytest.mark.parametrize("has_library", [True, False])
def test_the_loader_path_is_left_alone_where_that_does_not_help(
    has_library: bool,
    nixl_wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system has a library, or the NIXL wheel has none."""
    if not has_library:
        (nixl_wheel / "nixl_cu13.libs/libibverbs-1de.so.1.14").unlink()
    monkeypatch.setenv("DSPARK_PD_PYTHON", interpreter_of(nixl_wheel, has_library))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert "LD_LIBRARY_PATH" not in base_environment()
    monkeypatch.setenv("DSPARK_PD_PYTHON", str(tmp_path / "no-python"))
    assert "LD_LIBRARY_PATH" not in base_environment()


def machine(root: Path, free_gib: int, limit: str | None = None) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemAvailable: {free_gib * 2**20} kB\n")
    if limit is not None:
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(str(3 * 2**30))
        (group / "memory.stat").write_text(f"inactive_file {2**30}\nanon 5\n")
    return root


def test_memory_is_what_the_tighter_limit_leaves(tmp_path: Path) -> None:
    for name, limit, expected in (
        ("bare", None, 16),
        ("unlimited", "max\n", 16),
        ("limited", str(8 * 2**30), 6),
    ):
        root = tmp_path / name
        root.mkdir()
        assert checks.available_bytes(machine(root, 16, limit)) == expected * 2**30


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [EngineSpec(str(i), "unified", Path("m")) for i in range(3)]
    need = checks.needed_bytes(specs)
    assert 6 * 2**30 < need < 9 * 2**30
    monkeypatch.setattr(checks, "available_bytes", lambda: need - 1)
    with pytest.raises(BedError, match="too little memory"):
        checks.check_memory(specs)
    monkeypatch.setattr(checks, "available_bytes", lambda: need)
    checks.check_memory(specs)


def test_counters_are_summed_over_ranks(tmp_path: Path) -> None:
    assert counters.bytes_posted(tmp_path) == 0
    for rank, count in enumerate((5, 7)):
        counter = json.dumps({"bytes_posted": count})
        (tmp_path / f"transfers-{rank}.json").write_text(counter)
    assert counters.bytes_posted(tmp_path) == 12


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("[Errno 98] error while attempting to bind: address already in use", "a port"),
        ("RuntimeError: Not enough memory. Please try", "too little memory"),
        ("ModuleNotFoundError: No module named 'gguf'", "package is missing: gguf"),
        ("ModuleNotFoundError: No module named 'nixl._api'", "the NIXL wheel"),
        (
            "ImportError: libibverbs.so.1: cannot open shared object file\n"
            "ImportError: Please install mooncake by following the instructions",
            "Mooncake's wheel is missing, or a library",
        ),
        ("No module named sglang_router", "the router wheel"),
        ("DSpark speculative decoding only supports CUDA, NPU", "not applied"),
    ],
)
def test_known_failures_are_explained(log: str, cause: str) -> None:
    found, next_step = diagnosis.explain(log, 1)
    assert cause in found
    assert next_step


def test_unknown_failures_are_not_explained_away() -> None:
    assert diagnosis.explain("something else", 1) == ("", "")
    assert "killed" in diagnosis.explain("something else", -9)[0]


def test_an_engine_that_kills_itself_was_not_killed_from_outside() -> None:
    """SGLang ends its whole group after an exception in a rank: exit status -9."""
    log = (
        "ImportError: cannot import name 'x' from 'y'\nkill_process_tree called: pid=1"
    )
    assert diagnosis.explain(log, -9)[0] == "it raised " + log.splitlines()[0]
    assert diagnosis.explain("kill_process_tree called", -9) == ("", "")


def test_the_tail_shows_an_early_traceback() -> None:
    rows = ["start", "Traceback (most recent call last):", "ValueError: no"]
    tail = diagnosis.telling_tail("\n".join(rows + ["noise"] * 100))
    assert "ValueError: no" in tail
    assert len(tail.splitlines()) <= 36


def test_flags_of_a_prefill_engine() -> None:
    spec = EngineSpec(
        "p",
        "prefill",
        Path("m"),
        Path("d"),
        tp=2,
        overlap=False,
        page_size=64,
        args={"dtype": None, "hicache-ratio": 2, "enable-hierarchical-cache": True},
    )
    argv = " ".join(spec.command(1234, 5678)[1:])
    assert argv.startswith("-m sglang.launch_server --model-path m")
    for flag in (
        "--host 127.0.0.1",
        "--port 1234",
        "--tp-size 2",
        "--disable-overlap-schedule",
        "--page-size 64",
        "--speculative-algorithm DSPARK",
        "--speculative-draft-model-path d",
        "--disaggregation-mode prefill",
        "--disaggregation-bootstrap-port 5678",
        "--hicache-ratio 2",
        "--enable-hierarchical-cache",
    ):
        assert flag in argv
    assert "dtype" not in argv


def test_settings_of_the_user_do_not_leak_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT", "1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    env = EngineSpec("u", "unified", MODELS.target).environment(tmp_path)
    assert "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT" not in env
    assert env["SGLANG_PLATFORM"] == "cpu_reference"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["no_proxy"] == "127.0.0.1"


def test_router_needs_no_engine_to_be_described() -> None:
    argv = RouterSpec("r").command(1, 2)
    assert "--pd-disaggregation" in argv
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
