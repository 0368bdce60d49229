"""The patch set: hunks, new modules and the releases they serve.

``load_patch_set`` reads the overlay, which in a clone is ``python/sglang`` beside this
package and in an installed wheel ``_overlay`` inside it. The overlay is data: nothing
here imports it, and it has no ``__init__.py`` at its top, so nothing else can either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from dspark_pd.messages.errors import Problem, Refused
from dspark_pd.patchset.hunk import HUNK_SUFFIX, Hunk, load_hunk_file
from dspark_pd.patchset.lists import (
    Commit,
    Components,
    Module,
    load_components,
    load_modules,
    load_releases,
    load_series,
)


@dataclass(frozen=True)
class PatchSet:
    """Everything that can be applied, read and checked."""

    overlay: Path
    components: Components
    releases: tuple[Version, ...]
    modules: tuple[Module, ...]
    hunks: tuple[Hunk, ...]
    series: tuple[Commit, ...]

    @cached_property
    def identities(self) -> dict[str, tuple[Hunk, ...]]:
        """Variants by identity, those of the newest releases first."""
        groups: dict[str, list[Hunk]] = {}
        for hunk in self.hunks:
            groups.setdefault(hunk.identity, []).append(hunk)
        return {
            identity: tuple(sorted(hunks, key=self._last_served, reverse=True))
            for identity, hunks in groups.items()
        }

    def _last_served(self, hunk: Hunk) -> int:
        return max(
            (i for i, r in enumerate(self.releases) if hunk.serves(r)), default=-1
        )

    def knows(self, release: Version) -> bool:
        return Version(release.public) in self.releases

    @property
    def repository(self) -> Path:
        """The clone that the overlay is in; an installed overlay is in none."""
        return self.overlay.parent.parent

    def source(self, module: Module) -> bytes:
        return (self.overlay / module.path).read_bytes()


def default_overlay() -> Path:
    """Return the overlay that belongs to this copy of the tool."""
    package = Path(__file__).resolve().parent.parent
    packed = package / "_overlay"
    return packed if packed.is_dir() else package.parent / "sglang"


def load_patch_set(overlay: Path | None = None) -> PatchSet:
    """Return the set in ``overlay``; refuse with S2xx if any record is wrong."""
    overlay = overlay or default_overlay()
    components = load_components(overlay)
    releases, modules = load_releases(overlay), load_modules(overlay, components)
    hunks: list[Hunk] = []
    problems: list[Problem] = []
    for path in sorted(overlay.rglob(f"*{HUNK_SUFFIX}")):
        try:
            hunks += load_hunk_file(path, overlay, components)
        except Refused as refused:
            problems += refused.problems
    problems += _repeated_ids(hunks)
    if problems:
        raise Refused(problems)
    series = load_series(overlay, components)
    patch_set = PatchSet(overlay, components, releases, modules, tuple(hunks), series)
    problems = list(_range_problems(patch_set))
    if problems:
        raise Refused(problems)
    return patch_set


def _repeated_ids(hunks: list[Hunk]) -> Iterator[Problem]:
    first: dict[str, Hunk] = {}
    for hunk in hunks:
        other = first.setdefault(hunk.id, hunk)
        if other is not hunk:
            places = f"{other.place} and {hunk.place}"
            yield contradiction(f"id {hunk.id}", "each id once", places)


def _range_problems(patch_set: PatchSet) -> Iterator[Problem]:
    """Yield what is wrong with the ranges of each identity.

    On the known releases, variants must not overlap, and together they must cover one
    unbroken run: a hole in the middle is always a mistake, an end is a statement.
    """
    for identity, variants in patch_set.identities.items():
        counts = [
            sum(hunk.serves(release) for hunk in variants)
            for release in patch_set.releases
        ]
        shown = ", ".join(str(hunk.releases) for hunk in variants)
        what = f"the ranges of {identity}"
        if max(counts, default=0) > 1:
            yield contradiction(what, "at most one variant per release", shown)
        elif not any(counts):
            yield contradiction(what, "a release that is known", shown)
        elif "0" in "".join(map(str, counts)).strip("0"):
            yield contradiction(what, "one unbroken run of releases", shown)


def contradiction(what: str, wanted: str, value: object) -> Problem:
    return Problem("S203", {"what": what, "wanted": wanted, "value": value})
