"""Which hunks and modules a release needs.

For a known release the ranges decide. For an unknown one every variant is tried, newest
first, and the one whose count is right is taken: that tells whether the set would fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Module
from dspark_pd.patchset.patch_set import PatchSet
from dspark_pd.planning.conditions import Originals, dropped

Verdict = Literal["wanted", "not needed", "not applicable", "unserved"]


@dataclass(frozen=True)
class Choice:
    """What is to be done about one identity on one release.

    ``variants`` are the hunks to try, in order: one where the release is known.
    """

    identity: str
    verdict: Verdict
    variants: tuple[Hunk, ...]
    detail: str = ""

    @property
    def hunk(self) -> Hunk:
        return self.variants[0]


def choose(
    patch_set: PatchSet,
    release: Version,
    components: Iterable[str],
    originals: Originals,
) -> list[Choice]:
    """Return one choice per identity of ``components``."""
    wanted = set(components)
    known = patch_set.knows(release)
    return [
        _choose_variant(patch_set, variants, release, known, originals)
        for variants in patch_set.identities.values()
        if variants[0].component in wanted
    ]


def _choose_variant(
    patch_set: PatchSet,
    variants: tuple[Hunk, ...],
    release: Version,
    known: bool,
    originals: Originals,
) -> Choice:
    identity = variants[0].identity
    newest_first = _newest_first(patch_set, variants)
    serving = tuple(hunk for hunk in variants if hunk.serves(release))
    candidates = serving if known else newest_first
    judged = candidates[0] if candidates else newest_first[0]
    served = [r for r in patch_set.releases if any(h.serves(r) for h in variants)]
    if known and not candidates and release < served[0]:
        detail = f"from {served[0]}"
        return Choice(identity, "not applicable", newest_first, detail)
    if dropped(judged, release, originals):
        return Choice(identity, "not needed", newest_first, _since(patch_set, served))
    if not candidates:
        ranges = ", ".join(str(hunk.releases) for hunk in variants)
        return Choice(identity, "unserved", newest_first, ranges)
    return Choice(identity, "wanted", candidates)


def _newest_first(patch_set: PatchSet, variants: tuple[Hunk, ...]) -> tuple[Hunk, ...]:
    def last_served(hunk: Hunk) -> Version:
        return max(r for r in patch_set.releases if hunk.serves(r))

    return tuple(sorted(variants, key=last_served, reverse=True))


def _since(patch_set: PatchSet, served: list[Version]) -> str:
    later = [release for release in patch_set.releases if release > served[-1]]
    return f"not needed since {later[0]}" if later else "upstream has it"


def modules_for(
    patch_set: PatchSet, release: Version, components: Iterable[str]
) -> list[Module]:
    """Return the modules of ``components``; what they need is in them (``with_needs``).

    On a release that is not known all are tried.
    """
    known = patch_set.knows(release)
    wanted = set(components)
    return sorted(
        (
            module
            for module in patch_set.modules
            if module.component in wanted and (module.serves(release) or not known)
        ),
        key=lambda module: module.path,
    )
