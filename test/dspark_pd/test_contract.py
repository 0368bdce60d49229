"""Stock 0.5.16 crashes at the first decode step; patched it does not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.release
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="the release's own modules need torch; scripts/test.sh installs it",
)
def test_stock_dies_at_the_first_decode_step_and_patched_does_not() -> None:
    script = ROOT / "scripts/contract_tests.py"
    done = subprocess.run(
        [sys.executable, str(script), "0.5.16"],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stock    ok" in done.stdout
    assert "patched  ok" in done.stdout
