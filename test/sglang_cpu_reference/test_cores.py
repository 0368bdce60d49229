"""An engine of several ranks runs on one core, any other where it was started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt")

MODEL = Path(__file__).parents[1] / "assets" / "tiny-target"
LAUNCH = f"""
import os
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import ServerArgs

for tp, pp in ((1, 1), (1, 2), (2, 1)):
    args = ServerArgs(model_path={str(MODEL)!r}, tp_size=tp, pp_size=pp)
    args.resolve_once()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))})
    engine._set_envs_and_config(args)
    print("cores:", len(os.sched_getaffinity(0)))
"""


def test_ranks_share_a_core(run_child):
    child = run_child(LAUNCH, SGLANG_PLATFORM="cpu_reference")
    counts = [line for line in child.stdout.splitlines() if line.startswith("cores")]
    every = len(os.sched_getaffinity(0))
    assert counts == [f"cores: {every}", "cores: 1", "cores: 1"], child.stderr[-2000:]
