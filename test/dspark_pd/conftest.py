"""Fixtures: a fake SGLang, a patch set for it, and the command line in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fake_sglang
from doctor_bench import Bench
from dspark_pd.cli import main
from outcome import Outcome, Run


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing costs most of the time here, and no test pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with the latest fake SGLang in it."""
    folder = tmp_path / "site-packages"
    fake_sglang.install(folder)
    return folder


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    return fake_sglang.write_overlay(tmp_path / "repository" / "python" / "sglang")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def run(overlay: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs one command with JSON output."""

    def _run(verb: str, *arguments: object, text: bool = False) -> Outcome:
        capsys.readouterr()
        mode = [] if text else ["--json"]
        # In front: what follows ``--`` is an engine's.
        given = [verb, "--overlay", str(overlay), *mode, *map(str, arguments)]
        code = main(given)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return _run
