"""The demo from start to end, with servers that are real processes but fake engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bed_fakes import use_fake_servers
from dspark_pd.bed import checks
from dspark_pd.bed.demo import main
from dspark_pd.bed.ports import free_port
from dspark_pd.bed.process import _running

pytestmark = pytest.mark.unit

DRAFT_CONFIG = '{"architectures": ["Qwen3DSparkModel"], "block_size": 4}'
SLIDING_CONFIG = DRAFT_CONFIG.replace("}", ', "sliding_window": 32}')


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A demo on fake servers, which claim two verify passes for every request."""
    use_fake_servers(monkeypatch, tmp_path)
    versions = dict.fromkeys(checks._NEEDED, "0.5.23")
    monkeypatch.setattr(checks, "_probe", lambda: versions)
    monkeypatch.setattr(checks, "check_applied", lambda device: None)
    monkeypatch.setattr(checks, "available_bytes", lambda: 2**40)
    configs = {"target": "{}", "draft": DRAFT_CONFIG, "sliding": SLIDING_CONFIG}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    return [
        *("--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")),
        *("--sliding-draft", str(tmp_path / "sliding")),
        *("--log-dir", str(tmp_path / "logs"), "--requests", "2"),
        *("--json", str(tmp_path / "out.json")),
    ]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Of the demo's own: other tests of this process may have engines."""
    before = set(_running)
    yield
    assert set(_running) == before


def test_every_mode_runs_and_nothing_stays(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fakes cannot show what the demo claims, and the demo says so with exit 1."""
    assert main(arguments) == 1
    said = capsys.readouterr()
    report = json.loads((tmp_path / "out.json").read_text())
    modes = [run["mode"] for run in report["runs"]]
    assert modes == [
        "no-spec",
        "unified",
        "pd-native",
        "pd-native",
        "pd-no-context",
        "unified-sliding",
        "pd-tail",
        "pd-tail",
    ]
    tails = [run for run in report["runs"] if run["mode"] == "pd-tail"]
    assert [(run["pp"], run["tail_tokens"]) for run in tails] == [(1, 31), (2, 31)]
    assert [len(run["requests"]) for run in report["runs"]] == [2] * 8
    native = [run for run in report["runs"] if run["mode"] == "pd-native"]
    assert [run["pp"] for run in native] == [1, 2]
    assert "FAIL pd-native: NIXL moved 0 bytes" in said.out
    assert "ok   pd-native: every output equals unified" in said.out
    assert "[demo] all engines stopped" in said.err
    assert not (tmp_path / "logs").exists()


def test_mooncake_in_place_of_nixl(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(checks, "check_backend", asked.append)
    modes = ["--modes", "pd-native", "--keep-logs", "--transfer-backend", "mooncake"]
    assert main([*arguments, *modes]) == 1
    assert asked == ["mooncake"]
    assert "FAIL pd-native: Mooncake moved 0 bytes" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["transfer_backend"] == "mooncake"
    for role in ("prefill", "decode"):
        log = (tmp_path / "logs" / f"{role}.log").read_text()
        assert "--disaggregation-transfer-backend mooncake" in log


def test_one_gpu_gets_the_same_table_but_for_bytes(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the engines, with fake ones; no GPU has run it."""
    monkeypatch.setenv("DSPARK_PD_ZYGOTE", "1")
    assert main([*arguments, "--device", "cuda", "--keep-logs"]) == 1
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["device"] == "cuda"
    assert [run["mode"] for run in report["runs"]].count("pd-tail") == 1
    log = (tmp_path / "logs" / "decode.log").read_text()
    assert "--dtype bfloat16" in log
    assert "--attention-backend triton" in log


def test_a_failure_keeps_the_logs_and_says_where(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_EXIT", "RuntimeError: Not enough memory")
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "ended while it started" in said
    assert "likely cause: too little memory" in said
    assert f"logs: {tmp_path / 'logs'}" in said
    assert (tmp_path / "logs" / "unified.log").exists()
    assert not (tmp_path / "out.json").exists()


def test_one_mode_starts_only_what_it_needs(
    arguments: list[str], tmp_path: Path
) -> None:
    main([*arguments, "--modes", "pd-native", "--keep-logs"])
    logs = {path.stem for path in (tmp_path / "logs").glob("*.log")}
    assert logs == {"unified", "prefill", "decode", "router-pd-native"}


def test_the_port_asked_for_serves_every_wave(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    modes = "pd-native,pd-tail-pp1"
    assert main([*arguments, "--modes", modes, "--port", str(port), "--keep-logs"]) == 1
    assert "all engines stopped" in capsys.readouterr().err
    for log in (tmp_path / "logs").glob("router-*.log"):
        assert f"--port {port} " in log.read_text()


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for option, told in (
        ("--requests N", "each mode"),
        ("--model DIR", "target model"),
        ("--draft DIR", "full attention"),
        ("--sliding-draft DIR", "sliding windows"),
        ("--log-dir DIR", "logs"),
    ):
        assert told in text.rpartition(f"{option} ")[2][:80], option
    assert "Life cycle" not in text


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_count_of_requests_that_is_not_positive_is_refused(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"--requests={count}"])
    assert ended.value.code == 2
    assert f"expected 1 or more, found '{count}'" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_cost_the_run(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk: the table is printed, then the error about the file."""
    assert main([*arguments, "--modes", "pd-native", "--json", "/dev/full"]) == 6
    said = capsys.readouterr()
    assert "verify steps = passes of the target" in said.out
    assert "ok   pd-native: every output equals unified" in said.out
    assert "demo: --json /dev/full was not written; what is printed above" in said.err
    assert "No space left on device" in said.err


@pytest.mark.parametrize(
    ("path", "found"), [(".", "is a folder"), ("no/such.json", "mkdir -p")]
)
def test_a_report_that_has_no_place_is_refused_before_engines_start(
    path: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--json", str(tmp_path / path)])
    assert ended.value.code == 2
    assert found in capsys.readouterr().err
