"""Fixtures: a fake SGLang, a patch set for it, and the command line in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fake_sglang
from dspark_pd.cli import main


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write the golden files of test_releases.py anew"
    parser.addoption("--update-goldens", action="store_true", help=text)


@dataclass(frozen=True)
class Outcome:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.document["data"]
        return data

    @property
    def codes(self) -> list[str]:
        return [error["code"] for error in self.document["errors"]]


Run = Callable[..., Outcome]


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
def run(overlay: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs one command with JSON output."""

    def _run(verb: str, *arguments: object, text: bool = False) -> Outcome:
        capsys.readouterr()
        mode = [] if text else ["--json"]
        given = [verb, *map(str, arguments), "--overlay", str(overlay), *mode]
        code = main(given)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return _run
