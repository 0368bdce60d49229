#!/usr/bin/env python3
"""Keep functions and files small: fail where one is over its budget.

scripts/size_limits.py [-v]     -v also prints the largest of each part
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Budget:
    """Limits in lines; None means that nothing is asked."""

    folder: str
    file: int
    function: int
    median: int | None = None


BUDGETS = (
    Budget("python/dspark_pd", file=600, function=80, median=12),
    Budget("python/sglang", file=820, function=120),
    Budget("python/sglang_cpu_reference", file=500, function=120),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-v", "--verbose", action="store_true")
    verbose = parser.parse_args().verbose
    excesses = [line for budget in BUDGETS for line in judge(budget, verbose)]
    for line in excesses:
        print(line, file=sys.stderr)
    return 1 if excesses else 0


def judge(budget: Budget, verbose: bool) -> list[str]:
    files = sorted((ROOT / budget.folder).rglob("*.py"))
    excesses, sizes = [], []
    for path in files:
        text = path.read_text(encoding="utf-8")
        shown = path.relative_to(ROOT)
        # Marks for the export are about lines and none themselves.
        lines = text.count("\n") - text.count("# export: ")
        if lines > budget.file:
            excesses.append(f"{shown}: {lines} lines, at most {budget.file}")
        for name, first, size in functions(text):
            sizes.append((size, f"{shown}:{first} {name}"))
            if size > budget.function:
                excesses.append(f"{shown}:{first} {name}: {size} lines")
    if not sizes:
        return excesses
    median = statistics.median(size for size, _ in sizes)
    if budget.median is not None and median > budget.median:
        excesses.append(f"{budget.folder}: median function of {median} lines")
    largest = max(sizes)
    count = len(sizes)
    print(f"{budget.folder}: {len(files)} files, {count} functions, median {median:g}")
    if verbose:
        print(f"  largest: {largest[0]} lines, {largest[1]}")
    return excesses


def functions(text: str) -> list[tuple[str, int, int]]:
    """Return name, first line and number of lines of every function."""
    return [
        (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


if __name__ == "__main__":
    sys.exit(main())
