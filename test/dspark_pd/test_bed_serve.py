"""The twin of the GPU recipe: what it cannot start with is said before an engine starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dspark_pd.bed import serve
from dspark_pd.bed.ports import free_port

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: object, **kwargs: object) -> None:
        raise AssertionError("an engine was about to start")

    monkeypatch.setattr(serve, "interrupt_on_signals", lambda: None)
    monkeypatch.setattr(serve, "Bed", start)


@pytest.mark.parametrize("tp", ["0", "-1", "3", "8"])
def test_ranks_that_cannot_share_the_heads_are_refused(
    tp: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main([f"--tp={tp}"]) == 2
    said = capsys.readouterr().err
    assert f"--tp (TP) {tp} does not fit the model" in said
    assert "found: 4 attention heads and 2 KV heads" in said


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_that_share_the_heads_evenly_pass(tp: int) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    serve._check_tp(tp, heads)
    serve._check_tp(tp, {})


@pytest.mark.parametrize("name", ["port", "prefill-port", "decode-port"])
def test_a_port_that_is_none_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main([f"--{name}=80000"]) == 2
    variable = name.replace("-", "_").upper()
    text = f"--{name} ({variable}): port 80000 is not a TCP port"
    assert text in capsys.readouterr().err


def test_a_port_for_two_servers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    assert serve.main(["--port", port, "--prefill-port", port]) == 2
    said = capsys.readouterr().err
    assert f"--prefill-port (PREFILL_PORT): port {port} is given twice" in said
    assert f"found: --port (PORT) is {port} too" in said


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert serve.main(["--bootstrap-port", str(port)]) == 2
    assert f"port {port} is in use" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["/proc/x", "file/below", "file"])
def test_a_folder_that_takes_no_files_is_refused(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / place
    assert serve.main(["--hicache-dir", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"--hicache-dir (HICACHE_DIR) {folder} takes no files" in said


def test_what_fits_reaches_the_engines(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kv"
    with pytest.raises(AssertionError, match="about to start"):
        serve.main(["--hicache-dir", str(folder), "--port", str(free_port())])
    assert folder.is_dir() and not any(folder.iterdir())
