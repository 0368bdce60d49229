#!/usr/bin/env python3
"""What the handoff costs: ratios of engines measured side by side in one run.

    scripts/bench_pd.py [--rounds N] [--stock DIR] [--json FILE]
    scripts/bench_pd.py --steps FOLDER

- prefill throughput with capture / without: two prefill engines, the same prompts, one
  new token each, in turn; the ratio of the medians. Decode writes draft KV on the same
  cores meanwhile, so a second ratio counts the CPU time of prefill's processes alone
  (aim: 0.98 or more)
- bytes moved / formula: what NIXL posted against KV, metadata and existing hidden states
  (aim: 1.02 or less)
- decode step time with the set / stock: needs DIR, a folder that holds an SGLang with
  the CPU platform's hunk only; one native pair of each, in turn
- accept length by verify step after the handoff: `dspark-pd measure` on a native pair, a
  tail and a pair without context, each beside its unified server; FOLDER gets the numbers
  and the plot of the docs (dspark_pd_steps.json, dspark_pd_steps.svg)

What any deployment can be asked is `measure`; here is what needs the bed: bytes, CPU time,
two builds side by side. Ratios only: absolute times of the CPU reference platform say nothing about a GPU, and
a busy machine makes them worthless. Run it on an idle one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from dspark_pd.bed import (  # noqa: E402
    MODELS,
    Bed,
    Client,
    Engine,
    EngineSpec,
    RouterSpec,
    modes,
)
from dspark_pd.bed.models import check_checkpoint  # noqa: E402
from dspark_pd.bed.prompts import Prompt, make_prompts  # noqa: E402
from dspark_pd.measure.plot import draw  # noqa: E402

CAPTURE = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
DRAFT_CONFIG = {"speculative-draft-model-path": str(MODELS.draft_swa)}
# Fixed metadata of one request, and the header in front of its hidden states.
METADATA_BYTES, HEADER_BYTES = 1600, 64
PASSES = 8
PREFILL_PROMPTS = make_prompts(12, seed=5, key_len=(10, 23), prompt_tokens=(480, 512))
DECODE_PROMPTS = make_prompts(
    8, seed=6, key_len=(10, 23), prompt_tokens=(60, 90), max_new_tokens=96
)


def moved_formula(prompts: list[Prompt]) -> int:
    """Bytes that must travel for these prompts to one decode rank."""
    target = check_checkpoint(MODELS.target, "target")
    draft = check_checkpoint(MODELS.draft_swa, "draft")
    heads = target["num_key_value_heads"] * target["head_dim"]
    per_token = target["num_hidden_layers"] * 2 * heads * 4
    layers = len(draft["target_layer_ids"])
    per_row = layers * target["hidden_size"] * 4
    window = draft["sliding_window"] - 1
    return sum(
        len(p.ids) * per_token
        + min(len(p.ids), window) * per_row
        + HEADER_BYTES
        + METADATA_BYTES
        for p in prompts
    )


def alternate(
    rounds: int, first: Callable[[], float], second: Callable[[], float]
) -> tuple[float, float]:
    """Medians of two measurements taken in turn, each once before to warm up."""
    first(), second()
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for which in order:
            taken[which].append((first, second)[which]())
    return statistics.median(taken[0]), statistics.median(taken[1])


def prefill_seconds(prefill: Engine, decode: Engine) -> Callable[[], float]:
    """Time of one pass of long prompts, nothing cached, one new token each."""
    client = Client.direct(prefill, decode)

    def run() -> float:
        prefill.flush_cache()
        began = time.monotonic()
        client.generate([p.ids for p in PREFILL_PROMPTS], 1, parallel=4)
        return time.monotonic() - began

    return run


def prefill_work(prefill: Engine, decode: Engine) -> Callable[[], float]:
    """CPU time of the prefill engine in enough passes for the clock's resolution."""
    run = prefill_seconds(prefill, decode)

    def work() -> float:
        before = cpu_seconds(prefill)
        for _ in range(PASSES):
            run()
        return cpu_seconds(prefill) - before

    return work


def cpu_seconds(engine: Engine) -> float:
    """Spent by all processes of an engine so far."""
    import psutil  # not needed for --help

    spent = 0.0
    for pid in engine.pids():
        with contextlib.suppress(psutil.Error):  # ended in the meantime
            times = psutil.Process(pid).cpu_times()
            spent += times.user + times.system
    return spent


def bench_prefill(bed: Bed, rounds: int) -> dict[str, float]:
    """Capture against none, and bytes of the capturing prefill against the formula."""
    capture, plain, decode = bed.start(
        [
            EngineSpec(
                "capture", "prefill", MODELS.target, args=DRAFT_CONFIG, env=CAPTURE
            ),
            EngineSpec("plain", "prefill", MODELS.target),
            EngineSpec(
                "decode",
                "decode",
                MODELS.target,
                MODELS.draft_swa,
                env={"SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT": "1"},
            ),
        ]
    )
    with_rows, without = alternate(
        rounds, prefill_seconds(capture, decode), prefill_seconds(plain, decode)
    )
    work, plain_work = alternate(
        rounds, prefill_work(capture, decode), prefill_work(plain, decode)
    )
    before = capture.bytes_posted()
    Client.direct(capture, decode).generate([p.ids for p in PREFILL_PROMPTS], 1)
    moved = capture.bytes_posted() - before
    bed.stop(capture, plain, decode)
    return {
        "prefill_throughput_ratio": without / with_rows,
        "prefill_work_ratio": plain_work / work,
        "bytes_moved_ratio": moved / moved_formula(PREFILL_PROMPTS),
    }


def step_seconds(prefill: Engine, decode: Engine) -> Callable[[], float]:
    """Time per verify pass of a batch that decode serves."""
    client = Client.direct(prefill, decode)

    def run() -> float:
        began = time.monotonic()
        replies = client.generate(
            [p.ids for p in DECODE_PROMPTS], [p.max_new_tokens for p in DECODE_PROMPTS]
        )
        return (time.monotonic() - began) / max(r.verify_steps for r in replies)

    return run


def bench_decode(bed: Bed, rounds: int, stock: Path) -> dict[str, float]:
    """A native pair with the set and one without it."""
    path = os.pathsep.join(filter(None, [str(stock), os.environ.get("PYTHONPATH")]))
    model, draft = MODELS.target, MODELS.draft_swa
    without_set = {"PYTHONPATH": path}
    # Each decode has a prefill of its own kind: a mixed pair is refused.
    engines = bed.start(
        [
            EngineSpec("set-p", "prefill", model, draft),
            EngineSpec("set-d", "decode", model, draft),
            EngineSpec("stock-p", "prefill", model, draft, env=without_set),
            EngineSpec("stock-d", "decode", model, draft, env=without_set),
        ]
    )
    with_set, without = alternate(
        rounds, step_seconds(*engines[:2]), step_seconds(*engines[2:])
    )
    bed.stop(*engines)
    return {"decode_step_ratio": with_set / without}


def bench_steps(bed: Bed, folder: Path) -> None:
    """Accept length by step of three kinds of pair, each beside its unified server."""
    models = modes.Pair(MODELS.target, MODELS.draft_full, MODELS.draft_swa)
    waves = (
        ("unified", "decode", {"native": "prefill", "no context": "cold-prefill"}),
        ("unified-sliding", "tail-decode", {"tail": "tail-prefill-pp2"}),
    )
    measured: dict[str, dict[str, Any]] = {}
    for unified, decode, prefills in waves:
        names = [unified, decode, *prefills.values()]
        engines = bed.start([modes.ENGINES[name](models) for name in names])
        reference, decoder, *others = engines
        for name, prefill in zip(prefills, others, strict=True):
            spec = RouterSpec(
                f"r-{prefill.name}", [prefill.endpoint], [decoder.endpoint]
            )
            router = bed.start_router(spec)
            measured[name] = measure(router.url, reference.url)
            print(f"{name:11} ratio {measured[name]['ratio']}", flush=True)
        bed.stop()
    lines = {
        name: {n: step["accept_length"] for n, step in found["by_step"].items()}
        for name, found in measured.items()
    }
    data = json.dumps({"schema": 1, "runs": measured}, indent=1) + "\n"
    (folder / "dspark_pd_steps.json").write_text(data)
    digest = hashlib.sha256(data.encode()).hexdigest()
    title = "Accept length by verify step after the handoff"
    source = f"dspark_pd_steps.json sha256:{digest}"
    (folder / "dspark_pd_steps.svg").write_text(draw(lines, title, source))


def measure(url: str, reference: str) -> dict[str, Any]:
    """What `dspark-pd measure` says, without what differs from run to run."""
    # Keys fit in the sliding draft's window; the answers hold several of them.
    command = ["measure", "--url", url, "--reference", reference, "--json", "-q"]
    command += ["--requests", "12", "--seed", "7", "--prompt-length", "96"]
    command += ["--new-tokens", "96", "--concurrency", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "dspark_pd", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)["data"]
    kept = ("completed", "failed", "accept_length", "reference_accept_length", "ratio")
    kept += ("same_text", "loss_ends_at", "by_step", "by_prompt", "findings")
    return {name: found[name] for name in kept}


def main() -> int:
    """Measure, print one line per ratio, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    with Bed("bench-pd") as bed:
        if options.steps:
            bench_steps(bed, options.steps)
            return 0
        ratios = bench_prefill(bed, options.rounds)
        if options.stock:
            ratios |= bench_decode(bed, options.rounds, options.stock)
    for name, ratio in ratios.items():
        print(f"{name:28} {ratio:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, **ratios}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
