#!/usr/bin/env python3
"""Draw what bench_tail.py measured: accept length over tail length, a panel per draft.

    scripts/plot_tail.py MEASURED.json PLOT.svg

One line per prompt length. The dashed line of the same colour is unified serving, where
the draft has all of its context. Needs requirements/plots.txt. The same numbers give the
same file, byte for byte; its description holds their SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

Points = list[dict[str, Any]]
MARKERS = "osD^vP"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("plot", type=Path)
    options = parser.parse_args()
    try:
        data = options.measured.read_bytes()
        points = json.loads(data)["points"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(
            f"{options.measured} is not what bench_tail.py --json writes: {error!r}"
        )
    draw(points, options.plot, f"{options.measured.name} {source_of(data)}")
    return 0


def source_of(data: bytes) -> str:
    """What the plot's description says of the file it was drawn from."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def draw(points: Points, path: Path, source: str) -> None:
    """One panel for each draft, as SVG that names its source."""
    plt = _pyplot()
    drafts = list(dict.fromkeys(point["draft"] for point in points))
    figure, panels = plt.subplots(
        1, len(drafts), figsize=(4.8 * len(drafts), 3.8), sharey=True, squeeze=False
    )
    lengths = list(dict.fromkeys(point["prompt_tokens"] for point in points))
    shown = {}
    for panel, draft in zip(panels[0], drafts, strict=True):
        _panel(panel, draft, [p for p in points if p["draft"] == draft], lengths)
        handles, labels = panel.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    panels[0][0].set_ylabel("accept length (tokens per verify step)")
    labels, handles = list(shown), list(shown.values())
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=len(labels),
        frameon=False,
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    metadata = {"Date": None, "Creator": None, "Description": source}
    figure.savefig(path, metadata=metadata)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit(
            "error: matplotlib is not installed\n"
            f"  next: {sys.executable} -m pip install --no-deps -r requirements/plots.txt"
        ) from None
    mpl.use("svg")
    # Without a fixed salt the ids in the file are random.
    mpl.rcParams.update({"svg.hashsalt": "dspark-pd", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    return plt


def _panel(panel: Any, draft: str, points: Points, lengths: list[str]) -> None:
    tails = sorted({p["tail"] for p in points if p["tail"] is not None})
    for number, name in enumerate(lengths):
        mine = {
            p["tail"]: p["accept_length"] for p in points if p["prompt_tokens"] == name
        }
        if not mine:
            continue
        color, marker = f"C{number}", MARKERS[number % len(MARKERS)]
        panel.axhline(mine[None], color=color, linestyle="--", linewidth=0.9)
        panel.plot(
            tails,
            [mine[tail] for tail in tails],
            color=color,
            marker=marker,
            markersize=4,
            label=f"prompt of {name} tokens",
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(tails, map(str, tails))
    panel.minorticks_off()
    panel.set_xlabel("tail tokens")
    panel.set_title(f"{draft} draft (dashed: unified serving)", fontsize=10)
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main())
