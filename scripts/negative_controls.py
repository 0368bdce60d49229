#!/usr/bin/env python3
"""Show for every hunk that its test fails without it.

Each hunk names a test in `proved_by`. This runs that test on a tree that has the whole
set applied but for the one hunk. The test must run and fail: a pass means that it proves
nothing, an error while it is collected leaves that open.

    scripts/negative_controls.py [ID ...] [--sglang DIR] [--jobs 2]

DIR is the folder that holds an unpatched `sglang/` and its dist-info (an unpacked wheel);
the default downloads the release that this interpreter has installed. Tests run with this
interpreter, so it needs torch and SGLang's requirements. End-to-end tests are listed, not
run. Exit code 1 if a test passes without its hunk, or does not run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from dspark_pd.patchset.hunk import Hunk  # noqa: E402
from dspark_pd.patchset.patch_set import PatchSet, load_patch_set  # noqa: E402
from dspark_pd.planning.plan import Plan, make_plan  # noqa: E402
from dspark_pd.target.target import Target, find_target  # noqa: E402

TEST_TIMEOUT_S = 240
# Most of a test's time is imports that do not depend on the tree.
PRELOADED = ["torch", "torchvision", "transformers", "triton", "openai", "datasets"]
PRELOADED += [
    "fastapi",
    "aiohttp",
    "IPython",
    "xgrammar",
    "compressed_tensors",
    "pytest",
]
CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """What one control showed; ``holds`` if it is as it must be."""

    hunk: Hunk
    verdict: str
    seconds: float
    output: str = ""

    @property
    def holds(self) -> bool:
        return self.verdict in ("fails without it", "e2e: not run here")


def main() -> int:
    options = parse_arguments()
    CONTEXT.set_forkserver_preload(PRELOADED)
    patch_set = load_patch_set()
    with tempfile.TemporaryDirectory(prefix="negative-controls-") as scratch:
        stock = options.sglang or download_stock(Path(scratch))
        trees = [
            copy_tree(stock, Path(scratch) / f"tree{i}") for i in range(options.jobs)
        ]
        target = find_target(str(trees[0]), None)
        hunks = wanted_hunks(patch_set, target, options.ids)
        print(f"{len(hunks)} controls on SGLang {target.release}", flush=True)
        apply_all(trees)
        outcomes = list(run_all(patch_set, hunks, stock, trees))
    failed = [outcome for outcome in outcomes if not outcome.holds]
    for outcome in failed:
        print(f"\n--- {outcome.hunk.id}: {outcome.verdict}\n{outcome.output[-3000:]}")
    print(f"{len(outcomes) - len(failed)} controls hold, {len(failed)} do not")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="hunks; default all")
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="unpatched tree")
    parser.add_argument("--jobs", type=int, default=2, help="tests at once (2)")
    return parser.parse_args()


def download_stock(scratch: Path) -> Path:
    """Unpack the wheel of the installed release; the installed copy may be patched."""
    pinned = f"sglang=={metadata.version('sglang')}"
    wheels = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    subprocess.run([*command, "-d", str(wheels), pinned], check=True, timeout=600)
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(scratch / "stock")
    return scratch / "stock"


def copy_tree(stock: Path, tree: Path) -> Path:
    shutil.copytree(stock, tree, symlinks=True)
    return tree


def wanted_hunks(patch_set: PatchSet, target: Target, ids: list[str]) -> list[Hunk]:
    release = target.release
    assert release is not None
    hunks = [hunk for hunk in patch_set.hunks if hunk.serves(release)]
    unknown = set(ids) - {hunk.id for hunk in hunks} - {hunk.identity for hunk in hunks}
    if unknown:
        sys.exit(f"no hunk of this release is called {', '.join(sorted(unknown))}")
    return [h for h in hunks if not ids or h.id in ids or h.identity in ids]


def apply_all(trees: list[Path]) -> None:
    command = [sys.executable, "-m", "dspark_pd", "apply", "-q", "--component", "all"]
    for tree in trees:
        subprocess.run(
            [*command, "--target", str(tree)],
            check=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        )


def run_all(
    patch_set: PatchSet, hunks: list[Hunk], stock: Path, trees: list[Path]
) -> Iterator[Outcome]:
    free: queue.Queue[Path] = queue.Queue()
    for tree in trees:
        free.put(tree)

    def one(hunk: Hunk) -> Outcome:
        tree = free.get()
        try:
            return control(patch_set, hunk, stock, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for number, outcome in enumerate(pool.map(one, hunks), 1):
            print(
                f"[{number}/{len(hunks)}] {outcome.hunk.id:44} {outcome.verdict:18} "
                f"{outcome.seconds:5.1f} s",
                flush=True,
            )
            yield outcome


def control(patch_set: PatchSet, hunk: Hunk, stock: Path, tree: Path) -> Outcome:
    proof = hunk.metadata["proved_by"]
    if "registered/disaggregation" in proof:
        return Outcome(hunk, "e2e: not run here", 0.0)
    start = time.monotonic()
    with without(patch_set, hunk, stock, tree):
        code, output = run_test(proof, tree)
    return Outcome(hunk, verdict_of(code, output), time.monotonic() - start, output)


@contextmanager
def without(patch_set: PatchSet, hunk: Hunk, stock: Path, tree: Path) -> Iterator[None]:
    """Give ``tree`` the file of ``hunk`` as the rest of the set makes it."""
    path = tree / "sglang" / hunk.target
    full = path.read_bytes()
    rest = replace(patch_set, hunks=tuple(h for h in patch_set.hunks if h is not hunk))
    planned = plan_of(rest, stock).files.get(hunk.target)
    original = (stock / "sglang" / hunk.target).read_bytes()
    write_source(path, planned.desired if planned else original)
    try:
        yield
    finally:
        write_source(path, full)


def plan_of(patch_set: PatchSet, stock: Path) -> Plan:
    target = find_target(str(stock), None)
    assert target.release is not None

    def original(path: str) -> bytes | None:
        file = stock / "sglang" / path
        return file.read_bytes() if file.is_file() else None

    return make_plan(patch_set, target.release, patch_set.components, original)


def write_source(path: Path, data: bytes) -> None:
    """Write a module and drop its bytecode, which is matched by second and size."""
    path.write_bytes(data)
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def run_test(proof: str, tree: Path) -> tuple[int, str]:
    """Run one test on ``tree`` in a fresh fork; return pytest's exit code and output."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        process = CONTEXT.Process(target=in_fork, args=(proof, str(tree), log.name))
        process.start()
        process.join(TEST_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
        code = process.exitcode
        return -1 if code is None else code, Path(log.name).read_text()


def in_fork(proof: str, tree: str, log: str) -> None:
    """Child: everything but SGLang is imported already, so import that from ``tree``."""
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    sys.path[:0] = [tree, str(ROOT / "python")]
    sys.dont_write_bytecode = True
    import pytest

    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", proof]))


def verdict_of(code: int, output: str) -> str:
    if code == 0:
        return "passes without it"
    if code == 1 and re.search(r"\b[1-9]\d* failed", output):
        return "fails without it"
    return "broken"


if __name__ == "__main__":
    sys.exit(main())
