"""The one upstream line the platform cannot reach, with and without its hunk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("sglang.srt")

from packaging.specifiers import SpecifierSet  # noqa: E402

HUNKS = (
    Path(__file__).parents[2]
    / "python/sglang/srt/arg_groups/speculative_hook.py.hunks.yml"
)

# Runs the gate alone: what follows it needs a draft checkpoint.
CHECK = """
from types import SimpleNamespace
import sglang.srt.arg_groups.speculative_hook as hook
source = open(SOURCE).read()
exec(compile(source, "speculative_hook", "exec"), hook.__dict__)
class PastTheGate(Exception): pass
class Config(SimpleNamespace):
    @property
    def attn_dp_size(self): raise PastTheGate
hook.resolving_view = lambda args: Config(device="cpu")
try:
    hook._handle_dspark(None)
except PastTheGate:
    print("passed")
except ValueError as error:
    print("refused", error)
"""


def _gate(run_child, source: Path, **environment: str) -> str:
    child = run_child(f"SOURCE = {str(source)!r}\n" + CHECK, **environment)
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.split()[0]


def _gate_rule() -> dict:
    """The variant of the gate's hunk for the installed release."""
    release = importlib.metadata.version("sglang")
    rules = yaml.safe_load_all(HUNKS.read_text())
    (rule,) = (
        rule
        for rule in rules
        if rule["id"].startswith("dspark.ask-platform-for-device-support")
        and release in SpecifierSet(rule["metadata"]["releases"])
    )
    return rule


@pytest.fixture
def stock(tmp_path):
    import sglang.srt

    (srt,) = map(Path, sglang.srt.__path__)
    copy = tmp_path / "speculative_hook.py"
    shutil.copy(srt / "arg_groups/speculative_hook.py", copy)
    return copy


@pytest.fixture
def patched(stock):
    if 'current_platform.supports_speculative_algorithm("DSPARK")' in stock.read_text():
        return stock
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    ast_grep = shutil.which("ast-grep", path=places) or pytest.fail(
        "ast-grep-cli is not installed"
    )
    rule = stock.with_name("gate.yml")
    rule.write_text(yaml.safe_dump(_gate_rule()))
    subprocess.run([ast_grep, "scan", "-r", rule, stock, "-U"], check=True)
    return stock


def test_an_sglang_with_the_set_lets_the_platform_pass(run_child, stock):
    """As it is installed: this is what lacks without the hunk."""
    if (
        importlib.util.find_spec(
            "sglang.srt.speculative.dspark_components.disagg_first_decode"
        )
        is None
    ):
        pytest.skip("the installed SGLang does not have the set")
    assert _gate(run_child, stock, SGLANG_PLATFORM="cpu_reference") == "passed"


def test_named_platform_passes_the_device_gate(run_child, patched):
    assert _gate(run_child, patched, SGLANG_PLATFORM="cpu_reference") == "passed"


def test_other_devices_are_still_refused(run_child, patched):
    assert _gate(run_child, patched, SGLANG_USE_CPU_ENGINE="0") == "refused"


def test_without_the_hunk_the_platform_is_refused(run_child, stock):
    if 'supports_speculative_algorithm("DSPARK")' in stock.read_text():
        pytest.skip("the installed SGLang is patched already")
    assert _gate(run_child, stock, SGLANG_PLATFORM="cpu_reference") == "refused"
