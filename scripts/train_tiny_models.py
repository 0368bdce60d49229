#!/usr/bin/env python3
"""Train the tiny models of test/assets, or check the ones that are there.

A target (Qwen3, 4 layers) and two DSpark drafts of 2 layers, one with full and one
with sliding-window attention, all byte-level, for one task: go on copying a random
key seen in the prompt. Nothing but the prompt tells the next token, so accept length
shows at once whether a draft has its prompt context. A second pair goes on from the
first two: its task is a key several hundred tokens back, so the end of the context is
not enough.

    scripts/train_tiny_models.py --out DIR     train what DIR does not hold yet
    scripts/train_tiny_models.py --check       hashes, then accept length, offline

Life cycle: targets first, rounded to bfloat16; then the drafts against them, rounded
too; then every figure is measured on the rounded weights in float32 and
written to MANIFEST.json with the recipe and the hash of each file. Same seed, torch
version and thread count on one machine give the same bytes.

Needs torch, safetensors and tokenizers. Exit codes: 0 good, 1 a hash or a figure is
off, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "test" / "assets"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="train into DIR")
    what.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=ASSETS,
        metavar="DIR",
        help="check the models of DIR (default: test/assets)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    arguments = parser.parse_args()
    # Here, so that --help needs no torch.
    from tiny_models import build

    build.prepare(arguments.threads)
    if arguments.check:
        return build.check(arguments.check)
    arguments.out.mkdir(parents=True, exist_ok=True)
    return build.build(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
