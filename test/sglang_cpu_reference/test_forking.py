"""Engine processes start by fork on this platform, unless the user says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")

MODEL = Path(__file__).parents[1] / "assets" / "tiny-target"
LAUNCH = f"""
import multiprocessing
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import ServerArgs

args = ServerArgs(model_path={str(MODEL)!r})
args.resolve_once()
engine._set_envs_and_config(args)
print("method:", multiprocessing.get_start_method())
"""


@pytest.mark.parametrize(
    "setting, method",
    [({}, "fork"), ({"SGLANG_CPU_REFERENCE_FORK": "0"}, "spawn")],
    ids=["default", "switched-off"],
)
def test_the_start_method_follows_the_switch(run_child, setting, method):
    child = run_child(LAUNCH, SGLANG_PLATFORM="cpu_reference", **setting)
    assert f"method: {method}" in child.stdout, child.stderr[-2000:]
