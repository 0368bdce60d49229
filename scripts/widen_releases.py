#!/usr/bin/env python3
"""Edit the releases of the set when upstream makes one.

    scripts/widen_releases.py 0.5.24        know 0.5.24, and widen every range that ends
                                            right after the newest known release
    scripts/widen_releases.py --droppable   list hunks that no known release needs
    scripts/widen_releases.py --reviews     list the upstream reviews that could drop hunks

A hunk that does not fit the new release gets its range back by hand, and a variant.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from dspark_pd.patchset.hunk import HUNK_SUFFIX  # noqa: E402
from dspark_pd.patchset.patch_set import default_overlay, load_patch_set  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", nargs="?", type=Version)
    parser.add_argument("--droppable", action="store_true")
    parser.add_argument("--reviews", action="store_true")
    options = parser.parse_args()
    if options.reviews:
        return print_reviews()
    if options.droppable:
        return print_droppable()
    if options.release is None:
        parser.error("name a release, such as 0.5.24")
    return widen(options.release)


def widen(release: Version) -> int:
    patch_set = load_patch_set()
    newest = patch_set.releases[-1]
    if release <= newest:
        print(f"{release} is not newer than {newest}", file=sys.stderr)
        return 1
    known = default_overlay() / "releases.yml"
    known.write_text(known.read_text(encoding="utf-8") + f'- "{release}"\n')
    old, new = f"<{after(newest)}", f"<{after(release)}"
    count = 0
    overlay = default_overlay()
    for path in [overlay / "overlay.yml", *sorted(overlay.rglob(f"*{HUNK_SUFFIX}"))]:
        text = path.read_text(encoding="utf-8")
        changed, found = re.subn(
            rf'(releases: ["\']?[^"\'\n,}}]*,){re.escape(old)}(?=["\'\s,}}])',
            rf"\g<1>{new}",
            text,
        )
        if found:
            path.write_text(changed, encoding="utf-8")
            count += found
    print(f"{release} is known; {count} ranges end at {new} now")
    return 0


def after(release: Version) -> str:
    """Return the release that ends a range with ``release`` in it."""
    return f"{release.major}.{release.minor}.{release.micro + 1}"


def print_droppable() -> int:
    """List hunks whose variants all end before the newest release that needs none."""
    patch_set = load_patch_set()
    newest = patch_set.releases[-1]
    for identity, variants in patch_set.identities.items():
        served = [r for r in patch_set.releases if any(v.serves(r) for v in variants)]
        if served[-1] < newest:
            print(f"{identity}: last needed on {served[-1]}, drop it with that release")
    return 0


def print_reviews() -> int:
    """List what a person has to read, once each: drop conditions no program decides."""
    hunks: dict[str, list[str]] = {}
    for identity, variants in load_patch_set().identities.items():
        kind, argument = variants[0].drop_when
        if kind == "review":
            hunks.setdefault(argument, []).append(identity)
    for url, identities in hunks.items():
        print(f"review {url}\n    could drop: {', '.join(identities)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
