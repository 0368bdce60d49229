#!/usr/bin/env python3
"""Measure the tool against doing the same by hand.

    scripts/bench_tool.py [--release 0.5.23] [--runs 10] [--json FILE] [--baseline CLONE]

Every command runs as its own process. The baseline of a start is an interpreter that does
nothing; the baseline of apply and revert is a process that copies the same files to a
temporary name, flushes them to the disk and renames them. Work is CPU time of the process
and its children, which a busy machine inflates less than wall time. The medians of all
runs are shown. The budget of a start is wall time, that of apply and status CPU time.
With a clone of another version its commands run in turn with these.
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
WORK_BUDGET_S = 1.0
PLANNING = ("apply", "status")
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


Step = tuple[list[str], Path, bytes]
"""A command, the clone whose tool it runs, and what it reads."""


@dataclass(frozen=True)
class Timing:
    """Medians in seconds."""

    wall: float
    work: float

    def ratio(self, baseline: Timing) -> str:
        wall = self.wall / baseline.wall
        return f"{wall:5.2f}x wall, {self.work / baseline.work:5.2f}x CPU"


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        release_wheels.unpack(options.release, site)
        timings = measure(site, options)
    report(options, timings)
    if options.json:
        document = {name: vars(timing) for name, timing in timings.items()}
        text = json.dumps({"release": options.release, "seconds": document}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    late = timings["list"].wall >= START_BUDGET_S
    return 1 if late or any(timings[n].work >= WORK_BUDGET_S for n in PLANNING) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    newest = str(load_patch_set().releases[-1])
    parser.add_argument("--release", default=newest)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    text = "a clone of another version, measured in turn with this one"
    parser.add_argument("--baseline", type=Path, metavar="CLONE", help=text)
    return parser.parse_args()


def measure(site: Path, options: argparse.Namespace) -> dict[str, Timing]:
    steps = steps_of(ROOT, site, site / "overlay")
    run(*steps["apply"])
    touched = touched_files(site)
    run(*steps["revert"])
    copied = "\n".join(map(str, touched)).encode()
    steps = {
        "nothing": ([sys.executable, "-c", "pass"], ROOT, b""),
        "copy": ([sys.executable, "-c", COPY], ROOT, copied),
        **steps,
    }
    if options.baseline:
        other = steps_of(options.baseline.resolve(), site, site / "overlay-baseline")
        steps |= {f"{name}, before": step for name, step in other.items()}
    samples: dict[str, list[Timing]] = {}
    for _ in range(options.runs):
        for name, step in steps.items():
            samples.setdefault(name, []).append(run(*step))
    print(f"{len(touched)} files are touched")
    return {
        name: Timing(
            statistics.median(timing.wall for timing in found),
            statistics.median(timing.work for timing in found),
        )
        for name, found in samples.items()
    }


def steps_of(clone: Path, site: Path, overlay: Path) -> dict[str, Step]:
    """Return the commands of one version, from an unpatched target to one again."""
    # A copy of the set, so that an edit while this runs does not change what is measured.
    shutil.copytree(clone / "python" / "sglang", overlay)
    common = ["--overlay", str(overlay), "-q"]
    target = ["--target", str(site), *common]
    everything = [*target, "--component", "all"]
    verbs = {
        "--help": ["--help"],
        "list": ["list", *common],
        "apply": ["apply", *everything],
        "apply again": ["apply", *everything],
        "status": ["status", *everything],
        "revert": ["revert", *target],
    }
    tool = [sys.executable, "-m", "dspark_pd"]
    return {name: ([*tool, *words], clone, b"") for name, words in verbs.items()}


def touched_files(site: Path) -> list[Path]:
    """Return the files of SGLang that the applied set changes."""
    record = json.loads((site / "sglang/.dspark_pd/record.json").read_text())
    return [
        site / "sglang" / path
        for path, entry in record["entries"].items()
        if entry["before"] is not None
    ]


def run(command: list[str], clone: Path, given: bytes) -> Timing:
    environment = {**os.environ, "PYTHONPATH": str(clone / "python")}
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
    print(
        f"SGLang {options.release}, median of {options.runs} runs: wall time, CPU time"
    )
    for name, timing in timings.items():
        plain = name.removesuffix(", before")
        baseline = "nothing" if plain in ("--help", "list") else "copy"
        against = [] if name in ("nothing", "copy") else [(baseline, timings[baseline])]
        if f"{name}, before" in timings:
            against.append((f"{name}, before", timings[f"{name}, before"]))
        ratios = "; ".join(f"{timing.ratio(other)} of {n!r}" for n, other in against)
        print(f"{name:<20} {timing.wall:6.3f} s  {timing.work:6.3f} s  {ratios}")
    print(
        f"budgets: list {START_BUDGET_S} s, {' and '.join(PLANNING)} "
        f"{WORK_BUDGET_S} s of CPU time"
    )


if __name__ == "__main__":
    sys.exit(main())
