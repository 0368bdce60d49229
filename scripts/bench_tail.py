#!/usr/bin/env python3
"""Measure accept length by tail length and prompt length.

    scripts/bench_tail.py [--tails 8,31,64] [--drafts sliding,full] [--json FILE]

A tail covers an all-sliding draft completely and a full-attention draft in part; the
full-attention one here needs what came several hundred tokens before. This starts one prefill and one decode engine for each tail length and draft, sends prompts
of several lengths and prints accept length next to that of unified serving. Output is
lossless throughout; the script stops if a token differs. scripts/plot_tail.py draws
what `--json` writes.

Needs the patched SGLang of this interpreter, the CPU reference platform and the tiny
models. About one minute for each pair of engines on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from dspark_pd.bed import MODELS, Bed, Client, EngineSpec, Reply  # noqa: E402
from dspark_pd.bed.models import check_checkpoint  # noqa: E402
from dspark_pd.bed.prompts import (  # noqa: E402
    RECALL_SHOWN_TOKENS,
    Prompt,
    make_prompts,
    make_recall_prompts,
)

REQUESTS = 16
RECALL_KEY = 44


@dataclass(frozen=True)
class Subject:
    """A target, a draft, the tails to try, and prompts by their length."""

    target: Path
    draft: Path
    tails: tuple[int, ...]
    prompts: dict[str, list[Prompt]]


def repeated(low: int, high: int) -> list[Prompt]:
    """Keys short enough for the sliding draft's window."""
    return make_prompts(REQUESTS, seed=low, key_len=(8, 18), prompt_tokens=(low, high))


def recalled(low: int, high: int) -> list[Prompt]:
    """A key at the beginning, and its first tokens again at the end."""
    around = RECALL_KEY + len("||") + RECALL_SHOWN_TOKENS
    return make_recall_prompts(
        REQUESTS,
        seed=low,
        key_len=(RECALL_KEY, RECALL_KEY),
        distance=(low - around, high - around),
    )


def by_length(
    make: Callable[[int, int], list[Prompt]], *lengths: tuple[int, int]
) -> dict[str, list[Prompt]]:
    return {f"{low}-{high}": make(low, high) for low, high in lengths}


SUBJECTS = {
    "sliding": Subject(
        MODELS.target,
        MODELS.draft_swa,
        (1, 4, 8, 16, 31, 64),
        by_length(repeated, (24, 32), (56, 64), (120, 128), (248, 256)),
    ),
    "full": Subject(
        MODELS.recall_target,
        MODELS.recall_draft,
        (8, 31, 64, 128, 256, 512),
        by_length(recalled, (120, 128), (248, 256), (440, 480)),
    ),
}


@dataclass(frozen=True)
class Point:
    """One measurement; `tail` None is unified serving."""

    draft: str
    tail: int | None
    prompt_tokens: str
    accept_length: float
    verify_steps: int


def ask(client: Client, prompts: list[Prompt]) -> list[Reply]:
    """Greedy answers, one key period each."""
    return client.generate(
        [p.ids for p in prompts], [p.max_new_tokens for p in prompts]
    )


def summary(draft: str, tail: int | None, name: str, replies: list[Reply]) -> Point:
    """Accept length over all requests of one prompt length."""
    steps = sum(reply.verify_steps for reply in replies)
    tokens = sum(reply.completion_tokens for reply in replies)
    return Point(draft, tail, name, round(tokens / steps, 3), steps)


def pair_specs(draft: str, tail: int) -> list[EngineSpec]:
    """Prefill and decode with a tail of `tail` tokens, partial context allowed."""
    target, checkpoint = SUBJECTS[draft].target, SUBJECTS[draft].draft
    layers = check_checkpoint(checkpoint, "draft")["target_layer_ids"]
    both = {
        "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS": str(tail),
        "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT": "1",
    }
    capture = {
        **both,
        "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1",
        "SGLANG_DSPARK_PD_TARGET_LAYER_IDS": ",".join(map(str, layers)),
    }
    return [
        EngineSpec(f"{draft}-{tail}-p", "prefill", target, env=capture),
        EngineSpec(f"{draft}-{tail}-d", "decode", target, checkpoint, env=both),
    ]


def measure(bed: Bed, draft: str, tails: Sequence[int]) -> list[Point]:
    """All points of one draft; stops with an error when an output differs."""
    subject = SUBJECTS[draft]
    sets = subject.prompts
    (unified,) = bed.start(
        [EngineSpec(f"unified-{draft}", "unified", subject.target, subject.draft)]
    )
    answers = {name: ask(Client.unified(unified), p) for name, p in sets.items()}
    bed.stop(unified)
    points = [summary(draft, None, name, r) for name, r in answers.items()]
    for tail in tails:
        engines = bed.start(pair_specs(draft, tail))
        for name, prompts in sets.items():
            replies = ask(Client.direct(*engines), prompts)
            if [r.output_ids for r in replies] != [r.output_ids for r in answers[name]]:
                raise SystemExit(f"output differs: draft {draft}, tail {tail}, {name}")
            points.append(summary(draft, tail, name, replies))
        bed.stop(*engines)
    return points


def table(points: list[Point]) -> str:
    """One row per draft and tail, one column per prompt length."""
    names = list(dict.fromkeys(point.prompt_tokens for point in points))
    head = ["draft", "tail"] + [f"prompt {name}" for name in names]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    rows: dict[tuple, dict[str, float]] = {}
    for point in points:
        rows.setdefault((point.draft, point.tail), {})[point.prompt_tokens] = (
            point.accept_length
        )
    for (draft, tail), values in rows.items():
        label = "unified" if tail is None else str(tail)
        measured = [f"{values[n]:.2f}" if n in values else "" for n in names]
        cells = [draft, label, *measured]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    """Measure, print the table, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tails", help="default: those of each draft")
    parser.add_argument("--drafts", default="sliding,full")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tails = [int(item) for item in (options.tails or "").split(",") if item]
    points: list[Point] = []
    with Bed("bench-tail") as bed:
        for draft in options.drafts.split(","):
            points += measure(bed, draft, tails or SUBJECTS[draft].tails)
    print(table(points))
    if options.json:
        rows = [point.__dict__ for point in points]
        options.json.write_text(json.dumps({"schema": 1, "points": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
