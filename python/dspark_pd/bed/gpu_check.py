"""What only a GPU can decide, as a numbered list with a pass line each.

Life cycle: check the environment; wave by wave start engines with the tiny models, let
``dspark-pd measure`` ask them, look for words in a log; print ``ok`` or ``FAIL``; write one
JSON file to paste into a report. No GPU has run it yet. ``--device cpu`` rehearses it on
the CPU reference platform, where graphs, pinned memory and the default retraction backup
do not exist and their flags are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark_pd.bed import checks, modes
from dspark_pd.bed.bed import Bed, Engine
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.models import MODELS
from dspark_pd.bed.process import interrupt_on_signals
from dspark_pd.bed.report import write_report
from dspark_pd.bed.specs import Device, EngineSpec, Flag, RouterSpec
from dspark_pd.messages.output import a_new_file

SCHEMA = 1
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
START_TIMEOUT_S = 150.0
MEASURE_TIMEOUT_S = 120.0
_RATIO = "ratio>=0.9"
_MODELS = modes.Pair(MODELS.target, MODELS.draft_full, MODELS.draft_swa)


@dataclass(frozen=True)
class Check:
    """One line of the list.

    ``pair``: prefill and decode, by the names of the wave; ``reference`` the server beside
    it. ``options`` go to ``measure``, and each ``--assert`` must hold. ``log`` is a pattern
    that the log of the engine named first must have.
    """

    title: str
    pair: tuple[str, str]
    reference: str
    options: tuple[str, ...] = ("--requests", "24", "--assert", _RATIO)
    log: tuple[str, str] | None = None


@dataclass(frozen=True)
class Wave:
    """Engines that run at the same time; ``changes`` are flags of them, None removes one."""

    engines: Mapping[str, str]
    checks: tuple[Check, ...]
    changes: Mapping[str, Mapping[str, Flag]] = field(default_factory=dict)


_FEW_TOKENS = 640
WAVES: tuple[Wave, ...] = (
    Wave(
        {"unified": "unified", "prefill": "prefill", "decode": "decode"},
        (
            Check(
                "engines start and serve, DSPARK on both",
                ("prefill", "decode"),
                "unified",
                ("--requests", "1", "--assert", "failed==0"),
            ),
            Check(
                "native with decode graphs and overlap",
                ("prefill", "decode"),
                "unified",
            ),
            Check(
                "native, 200 requests at concurrency 16",
                ("prefill", "decode"),
                "unified",
                (
                    *("--requests", "200", "--concurrency", "16"),
                    *("--assert", "failed==0", "--assert", _RATIO),
                ),
            ),
        ),
    ),
    Wave(
        {
            "unified-sliding": "unified-sliding",
            "tail-eager": "tail-prefill",
            "tail-graphs": "tail-prefill",
            "tail-decode": "tail-decode",
        },
        (
            Check(
                "tail, prefill without graphs",
                ("tail-eager", "tail-decode"),
                "unified-sliding",
            ),
            Check(
                "tail, prefill with graphs",
                ("tail-graphs", "tail-decode"),
                "unified-sliding",
            ),
            Check(
                "tail, rows in pinned memory, default --max-running-requests",
                ("tail-eager", "tail-decode"),
                "unified-sliding",
                log=("tail-eager", r"requests of .*MiB of host memory"),
            ),
        ),
        {
            "tail-eager": {
                "disable-prefill-cuda-graph": True,
                "max-running-requests": None,
            },
            "tail-graphs": {"cuda-graph-backend-prefill": "breakable"},
        },
    ),
    Wave(
        {"unified": "unified", "prefill": "prefill", "small-decode": "decode"},
        (
            Check(
                "native, retraction with the default backup",
                ("prefill", "small-decode"),
                "unified",
                (
                    *("--requests", "16", "--concurrency", "16"),
                    *("--new-tokens", "160"),
                    *("--assert", "failed==0", "--assert", _RATIO),
                ),
                log=("small-decode", r"#retracted_reqs: [1-9]"),
            ),
        ),
        {
            "small-decode": {
                "max-total-tokens": _FEW_TOKENS,
                "num-reserved-decode-tokens": 8,
                "disaggregation-decode-retraction-backup": None,
            }
        },
    ),
)
_CUDA_ONLY = (
    "disable-prefill-cuda-graph",
    "cuda-graph-backend-prefill",
    "max-running-requests",
    "disaggregation-decode-retraction-backup",
)


@dataclass(frozen=True)
class Outcome:
    """What one check found; ``found`` is the reason of a failure, else the figures."""

    number: int
    title: str
    passed: bool
    found: str
    seconds: float


def specs(wave: Wave, device: Device) -> list[EngineSpec]:
    """The engines of a wave with their changes; a CPU takes no flags of a GPU."""
    chosen = []
    for name, kind in wave.engines.items():
        spec = modes.ENGINES[kind](_MODELS)
        changes = {
            flag: value
            for flag, value in wave.changes.get(name, {}).items()
            if device == "cuda" or flag not in _CUDA_ONLY
        }
        args = {**spec.args, **changes}
        chosen.append(replace(spec, name=name, device=device, args=args))
    return chosen


def measure(url: str, reference: str, options: Sequence[str]) -> dict[str, Any]:
    """``dspark-pd measure`` as JSON; raises BedError where it cannot measure."""
    command = ["measure", "--url", url, "--reference", reference, "--json", "-q"]
    command += ["--prompt-length", "96", "--new-tokens", "64", "--seed", "1", *options]
    done = subprocess.run(
        [sys.executable, "-m", "dspark_pd", *command],
        capture_output=True,
        text=True,
        timeout=MEASURE_TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise BedError("measure refused", found=(done.stdout + done.stderr)[-800:])
    found: dict[str, Any] = json.loads(done.stdout)["data"]
    return found


def judge(check: Check, found: Mapping[str, Any], logs: Callable[[str], str]) -> str:
    """Why a check fails; "" when it does not."""
    broken = [row for row in found["asserts"] if not row["holds"]]
    if broken:
        return "; ".join(f"{row['assert']} is not so: {row['found']}" for row in broken)
    if check.log and not re.search(check.log[1], logs(check.log[0])):
        return f"the log of {check.log[0]} has no {check.log[1]!r}"
    return ""


def _run_wave(
    bed: Bed, wave: Wave, device: Device, first: int, say: Callable[[Outcome], None]
) -> None:
    began = time.monotonic()

    def tell(number: int, check: Check, why: str, figures: str = "") -> None:
        seconds = round(time.monotonic() - began, 1)
        say(Outcome(number, check.title, not why, why or figures, seconds))

    try:
        started = bed.start(specs(wave, device))
    except BedError as error:
        for number, check in enumerate(wave.checks, first):
            tell(number, check, f"engines did not start: {error}")
        return
    engines = dict(zip(wave.engines, started, strict=True))
    for number, check in enumerate(wave.checks, first):
        began = time.monotonic()
        try:
            found = _ask(bed, check, engines)
        except (BedError, subprocess.TimeoutExpired) as error:
            tell(number, check, str(error))
            continue
        why = judge(check, found, lambda name: engines[name].log_text())
        figures = f"ratio {found.get('ratio')}, accept length {found['accept_length']}"
        figures += f", same text {found.get('same_text')}"
        tell(number, check, why, figures)
    bed.stop()


def _ask(bed: Bed, check: Check, engines: Mapping[str, Engine]) -> dict[str, Any]:
    prefill, decode = (engines[name] for name in check.pair)
    router = bed.start_router(
        RouterSpec("router", [prefill.endpoint], [decode.endpoint])
    )
    try:
        return measure(router.url, engines[check.reference].url, check.options)
    finally:
        bed.stop(router)


def run(device: Device, path: Path) -> int:
    """All checks in order; the exit code."""
    installed = checks.check_installed(device)
    checks.check_applied(device)
    outcomes: list[Outcome] = []

    def say(outcome: Outcome) -> None:
        outcomes.append(outcome)
        word = "ok  " if outcome.passed else "FAIL"
        print(f"{word} {outcome.number}  {outcome.title}: {outcome.found}", flush=True)

    try:
        with Bed("gpu-check", keep_logs=True, start_timeout_s=START_TIMEOUT_S) as bed:
            first = 1
            for wave in WAVES:
                _run_wave(bed, wave, device, first, say)
                first += len(wave.checks)
    finally:
        # What is known is kept, also when it is interrupted.
        write_report(path, report(device, installed, outcomes))
        print(f"report: {path}", file=sys.stderr)
    return EXIT_OK if all(outcome.passed for outcome in outcomes) else EXIT_FAILED


def report(
    device: Device, installed: checks.Installed, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """What goes into the file."""
    planned = sum(len(wave.checks) for wave in WAVES)
    return {
        "schema": SCHEMA,
        "device": device,
        "gpu": _gpu() if device == "cuda" else None,
        "versions": installed.versions,
        "planned": planned,
        "passed": sum(outcome.passed for outcome in outcomes),
        "checks": [asdict(outcome) for outcome in outcomes],
    }


def _gpu() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
    command.append("--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m dspark_pd.bed.gpu_check`."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=description)
    text = "cpu rehearses the list on the CPU reference platform (default: cuda)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help=text)
    text = "where the report goes (default: gpu_check.json)"
    parser.add_argument(
        "--json", type=a_new_file, default=Path("gpu_check.json"), help=text
    )
    options = parser.parse_args(argv)
    interrupt_on_signals()
    try:
        return run(options.device, options.json)
    except BedError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return EXIT_USAGE if error.usage else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
