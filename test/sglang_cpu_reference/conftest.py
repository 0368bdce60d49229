"""Unit tests of the CPU reference platform; none starts an engine.

What needs the platform to be the process's own runs in a child process, because
SGLang settles its platform once per process and other tests share this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "python/sglang_cpu_reference/src"
sys.path.insert(0, str(SOURCE))

CHILD_SECONDS = 240


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.unit)


@pytest.fixture
def run_child():
    """Run Python source in a child process: ``run_child(source, **environment)``.

    Returns the completed process; ``SGLANG_PLATFORM`` is unset unless given.
    """

    def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "SGLANG_PLATFORM"}
        env.update(environment, OMP_NUM_THREADS="1")
        return subprocess.run(
            [sys.executable, "-c", source],
            env=env,
            text=True,
            capture_output=True,
            timeout=CHILD_SECONDS,
        )

    return run
