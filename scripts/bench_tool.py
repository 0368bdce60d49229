#!/usr/bin/env python3
"""Measure the tool against doing the same by hand.

    scripts/bench_tool.py [--release 0.5.23] [--runs 10] [--json FILE]

Every command runs as its own process. The baseline of a start is an interpreter that does
nothing; the baseline of apply and revert is a process that copies the same files to a
temporary name, flushes them to the disk and renames them. Work is CPU time of the process
and its children, which a busy machine inflates less than wall time. The medians of all
runs are shown; the budgets are wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test" / "dspark_pd")]

import release_wheels  # noqa: E402
from dspark_pd.patchset.patch_set import load_patch_set  # noqa: E402

START_BUDGET_S = 0.3
APPLY_BUDGET_S = 1.0
COPY = """
import os, sys
for path in sys.stdin.read().split():
    data = open(path, "rb").read()
    with open(path + ".copy", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".copy", path)
"""


@dataclass(frozen=True)
class Timing:
    """Medians in seconds."""

    wall: float
    work: float

    def ratio(self, baseline: Timing) -> str:
        wall = self.wall / baseline.wall
        return f"{wall:5.1f}x wall, {self.work / baseline.work:5.1f}x work"


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        release_wheels.unpack(options.release, site)
        timings = measure(site, options.runs)
    report(options, timings)
    if options.json:
        document = {name: vars(timing) for name, timing in timings.items()}
        text = json.dumps({"release": options.release, "seconds": document}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    late = timings["list"].wall >= START_BUDGET_S
    return 1 if late or timings["apply"].wall >= APPLY_BUDGET_S else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    newest = str(load_patch_set().releases[-1])
    parser.add_argument("--release", default=newest)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(site: Path, runs: int) -> dict[str, Timing]:
    # A copy of the set, so that an edit while this runs does not change what is measured.
    overlay = site / "overlay"
    shutil.copytree(ROOT / "python" / "sglang", overlay)
    common = ["--overlay", str(overlay), "-q"]
    target = ["--target", str(site), *common]
    tool = [sys.executable, "-m", "dspark_pd"]
    apply = [*tool, "apply", *target, "--component", "all"]
    revert = [*tool, "revert", *target]
    run(apply)
    touched = touched_files(site)
    copied = "\n".join(map(str, touched)).encode()
    run(revert)
    samples: dict[str, list[Timing]] = {}
    steps = {
        "nothing": ([sys.executable, "-c", "pass"], b""),
        "--help": ([*tool, "--help"], b""),
        "list": ([*tool, "list", *common], b""),
        "copy": ([sys.executable, "-c", COPY], copied),
        "apply": (apply, b""),
        "apply again": (apply, b""),
        "status": ([*tool, "status", *target, "--component", "all"], b""),
        "revert": (revert, b""),
    }
    for _ in range(runs):
        for name, (command, given) in steps.items():
            samples.setdefault(name, []).append(run(command, given))
    print(f"{len(touched)} files are touched")
    return {
        name: Timing(
            statistics.median(timing.wall for timing in found),
            statistics.median(timing.work for timing in found),
        )
        for name, found in samples.items()
    }


def touched_files(site: Path) -> list[Path]:
    """Return the files of SGLang that the applied set changes."""
    record = json.loads((site / "sglang/.dspark_pd/record.json").read_text())
    return [
        site / "sglang" / path
        for path, entry in record["entries"].items()
        if entry["before"] is not None
    ]


def run(command: list[str], given: bytes = b"") -> Timing:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    before, started = os.times(), time.monotonic()
    subprocess.run(
        command,
        input=given,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    wall, after = time.monotonic() - started, os.times()
    work = after.children_user - before.children_user
    return Timing(wall, work + after.children_system - before.children_system)


def report(options: argparse.Namespace, timings: dict[str, Timing]) -> None:
    print(f"SGLang {options.release}, median of {options.runs} runs")
    for name, timing in timings.items():
        baseline = "nothing" if name in ("--help", "list") else "copy"
        ratio = "" if name in ("nothing", "copy") else timing.ratio(timings[baseline])
        against = f"{ratio} of {baseline!r}" if ratio else ""
        print(f"{name:<12} {timing.wall:6.3f} s  {timing.work:6.3f} s  {against}")
    print(f"budgets: list {START_BUDGET_S} s, apply {APPLY_BUDGET_S} s")


if __name__ == "__main__":
    sys.exit(main())
