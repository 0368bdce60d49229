from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

INERT = """
import os, sys
import sglang_cpu_reference
assert sglang_cpu_reference.activate() is None
assert not any(name.startswith(("sglang.", "torch", "nixl")) for name in sys.modules)
assert "CUDA_VISIBLE_DEVICES" not in os.environ
"""


@pytest.mark.parametrize("named", [None, "", "another_platform"])
def test_inert_unless_named(run_child, monkeypatch, named):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = {} if named is None else {"SGLANG_PLATFORM": named}
    child = run_child(_WITH_SOURCE + INERT, **environment)
    assert child.returncode == 0, child.stderr[-2000:]


def test_binding_gives_every_rank_a_core():
    from sglang_cpu_reference.environment import thread_binding

    assert thread_binding(1, cores=2) == "0"
    assert thread_binding(4, cores=2) == "0|1|0|1"


def test_activation_keeps_what_the_user_has_set(run_child):
    source = (
        "import os\nfrom sglang_cpu_reference import environment\n"
        "environment.apply()\n"
        "print(os.environ['SGLANG_NATIVE_MOVE_KV_CACHE'],"
        " repr(os.environ['CUDA_VISIBLE_DEVICES']))\n"
    )
    child = run_child(
        _WITH_SOURCE + source, SGLANG_NATIVE_MOVE_KV_CACHE="0", CUDA_VISIBLE_DEVICES="3"
    )
    assert child.stdout.split() == ["0", "''"], child.stderr


def _source_line() -> str:
    source = Path(__file__).parents[2] / "python/sglang_cpu_reference/src"
    return f"import sys; sys.path.insert(0, {str(source)!r})\n"


_WITH_SOURCE = _source_line()
