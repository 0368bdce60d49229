#!/usr/bin/env python3
"""Run each exported commit's own tests on a checkout of that commit alone.

    scripts/series_tests.py CHECKOUT BRANCH [--from N]

CHECKOUT holds BRANCH, which `dspark-pd export` made, and the release below it; it is
read through a work tree of its own. The interpreter needs what SGLang needs. Tests that a
later commit changes again run at both. Exit code 1 if one fails, or if a commit has none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    options = parse_arguments()
    commits = git(
        options.checkout,
        *("rev-list", "--reverse", f"HEAD..{options.branch}"),
    ).split()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="series-") as scratch:
        tree = Path(scratch) / "tree"
        git(options.checkout, "worktree", "add", "-q", "--detach", str(tree))
        try:
            for number, commit in enumerate(commits, 1):
                if number >= options.first:
                    failed += not holds(tree, number, commit)
        finally:
            git(options.checkout, "worktree", "remove", "--force", str(tree))
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("branch")
    parser.add_argument("--from", type=int, default=1, dest="first", metavar="N")
    return parser.parse_args()


def holds(tree: Path, number: int, commit: str) -> bool:
    """Check out one commit, run the tests that it changes, and print the result."""
    git(tree, "checkout", "-q", commit)
    changed = git(tree, "diff", "--name-only", f"{commit}~1", commit).split()
    tests = [path for path in changed if path.rpartition("/")[2].startswith("test_")]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "python")},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    passed = bool(tests) and done.returncode == 0
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    code = lines(tree, commit, "python/sglang/srt")
    others = lines(tree, commit, "test", "python/sglang/test")
    title = git(tree, "log", "-1", "--format=%s").strip()
    print(
        f"{'ok    ' if passed else 'FAILED'} {number:2} {code:4} lines, {others:4} of "
        f"tests  {title}\n          {last} ({time.monotonic() - began:.0f} s)",
        flush=True,
    )
    if not passed:
        print(done.stdout[-6000:] + done.stderr[-2000:], file=sys.stderr)
    return passed


def lines(tree: Path, commit: str, *folders: str) -> int:
    counts = git(tree, "diff", "--numstat", f"{commit}~1", commit, "--", *folders)
    return sum(int(line.split()[0]) for line in counts.splitlines())


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
