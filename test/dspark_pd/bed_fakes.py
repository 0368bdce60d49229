"""Shared by the bed tests: an interpreter that runs the fake server instead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dspark_pd.bed import specs

FAKES = Path(__file__).parent / "fakes"


def use_fake_servers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let engines and routers be the fake server, real processes all the same."""
    script = folder / "fake-python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKES}/fake_server.py "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("DSPARK_PD_PYTHON", str(script))
    # It would be asked for its libraries, and starts a server instead.
    monkeypatch.setattr(specs, "library_folders", lambda python: ())
