"""Shared by the bed tests: an interpreter that runs the fake server instead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"


def use_fake_servers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let engines and routers be the fake server, real processes all the same."""
    script = folder / "fake-python"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n'  # a question
        f'exec {sys.executable} {FAKES}/fake_server.py "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("DSPARK_PD_PYTHON", str(script))
