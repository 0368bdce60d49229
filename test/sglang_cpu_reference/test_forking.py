"""Engine processes start by fork on this platform, unless the user says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")

MODEL = Path(__file__).parents[1] / "assets" / "tiny-target"
LAUNCH = f"""
import multiprocessing, os
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import ServerArgs

args = ServerArgs(model_path={str(MODEL)!r})
args.resolve_once()
for setting in (None, "0", "1"):
    if setting is not None:
        os.environ["SGLANG_CPU_REFERENCE_FORK"] = setting
    engine._set_envs_and_config(args)
    print("chosen:", setting, multiprocessing.get_start_method())
"""


def test_the_start_method_follows_the_switch(run_child):
    child = run_child(LAUNCH, SGLANG_PLATFORM="cpu_reference")
    chosen = [line for line in child.stdout.splitlines() if line.startswith("chosen")]
    assert chosen == [
        "chosen: None fork",
        "chosen: 0 spawn",
        "chosen: 1 fork",
    ], child.stderr[-2000:]
