#!/usr/bin/env python3
"""Run contracts with a release on its own modules: first decode step, spellings of flags.

    scripts/contract_tests.py [RELEASE ...]        default: 0.5.16

For each release: its wheel is downloaded and unpacked, the `native` component is applied
to a copy, and the tests of the contracts run there. Expected of every release is that
they pass. Expected of stock 0.5.16 is the crash that the first contract exists for: the
first decode step finds no draft input.

Tests run in a venv layered on this interpreter's packages with the release's own
transformers and xgrammar, kept in --cache. Nothing of a release is written elsewhere.
Exit code 1 if an expectation does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNIT = "test/registered/unit"
CONTRACT = (
    f"{UNIT}/speculative/dspark_components/test_disagg_first_decode.py",
    "test/dspark_pd/test_flag_spellings.py",
)
FIRST_STEP = f"{CONTRACT[0]}::TestFirstDecodeStep"
STOCK_CRASH = "'NoneType' object has no attribute 'prepare_for_decode'"
OWN_PINS = ("transformers", "xgrammar")


@dataclass(frozen=True)
class Run:
    """One pytest run: its summary line and everything it printed."""

    code: int
    output: str

    @property
    def summary(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip("= ") if lines else "no output"


def main() -> int:
    options = parse_arguments()
    options.cache.mkdir(parents=True, exist_ok=True)
    held = [check(release, options.cache) for release in options.releases]
    return 0 if all(held) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", default=["0.5.16"], metavar="RELEASE")
    parser.add_argument("--cache", type=Path, default=ROOT / ".dspark-pd-cache")
    return parser.parse_args()


def check(release: str, cache: Path) -> bool:
    """Run both trees of ``release``; print what was expected and found."""
    stock = unpack(release, cache)
    python = layered_python(stock, release, cache)
    with tempfile.TemporaryDirectory(prefix="contract-") as scratch:
        patched = Path(scratch) / "patched"
        shutil.copytree(stock, patched)
        apply_native(patched)
        full = pytest(python, patched, *CONTRACT)
    passed = full.code == 0
    report(release, "patched", "passes", full, passed)
    if release != "0.5.16":
        return passed
    with tempfile.TemporaryDirectory(prefix="contract-") as scratch:
        bare = Path(scratch) / "stock"
        shutil.copytree(stock, bare)
        add_modules_only(bare)
        first = pytest(python, bare, FIRST_STEP)
    crashed = first.code == 1 and STOCK_CRASH in first.output
    report(release, "stock", f"fails with {STOCK_CRASH!r}", first, crashed)
    return passed and crashed


def report(release: str, tree: str, wanted: str, run: Run, held: bool) -> None:
    print(
        f"{release} {tree:8} {'ok  ' if held else 'WRONG'} "
        f"expected: {wanted}; found: {run.summary}",
        flush=True,
    )
    if not held:
        print(run.output[-4000:], file=sys.stderr)


def unpack(release: str, cache: Path) -> Path:
    tree = cache / f"sglang-{release}"
    if tree.is_dir():
        return tree
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        wanted = f"sglang=={release}"
        subprocess.run([*command, "-d", scratch, wanted], check=True, timeout=600)
        (wheel,) = Path(scratch).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(Path(scratch) / "tree")
        (Path(scratch) / "tree").rename(tree)
    return tree


def layered_python(stock: Path, release: str, cache: Path) -> Path:
    """A venv that sees this interpreter's packages below the release's own pins."""
    metadata = (stock / f"sglang-{release}.dist-info" / "METADATA").read_text()
    pins = [
        match.group(1).replace(" ", "")
        for name in OWN_PINS
        if (match := re.search(rf"^Requires-Dist: ({name}==[\w.]+)", metadata, re.M))
    ]
    venv = cache / ("venv-" + "-".join(pins).replace("==", "-"))
    python = venv / "bin" / "python"
    if not (venv / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        site = next(venv.glob("lib/python*/site-packages"))
        (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # pip lists every requirement of the base that the layer lacks; say it on
        # failure only.
        install(python, pins)
        (venv / "ready").touch()
    return python


def install(python: Path, pins: list[str]) -> None:
    command = [str(python), "-m", "pip", "install", "-q", *pins]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")


def apply_native(tree: Path) -> None:
    command = [sys.executable, "-m", "dspark_pd", "apply", "-q"]
    subprocess.run(
        [*command, "--component", "native", "--target", str(tree)],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )


def add_modules_only(tree: Path) -> None:
    """Give a stock tree the modules the tests import, and no hunk."""
    for name in ("srt/speculative/dspark_components/disagg_first_decode.py",):
        shutil.copy(ROOT / "python/sglang" / name, tree / "sglang" / name)


def pytest(python: Path, tree: Path, *tests: str) -> Run:
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        timeout=600,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )
    return Run(result.returncode, result.stdout)


if __name__ == "__main__":
    sys.exit(main())
