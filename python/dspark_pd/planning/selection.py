"""Which hunks and modules a release needs.

For a known release the ranges decide. For an unknown one every variant is tried, newest
first, and the one whose count is right is taken: that tells whether the set would fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Module
from dspark_pd.patchset.patch_set import PatchSet
from dspark_pd.planning.conditions import Found, Originals, dropped

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


def candidates(
    patch_set: PatchSet, release: Version, components: Iterable[str]
) -> dict[str, tuple[Hunk, ...]]:
    """Return by identity the variants that may serve, in the order to try them."""
    wanted = set(components)
    known = patch_set.knows(release)
    return {
        identity: tuple(hunk for hunk in variants if hunk.serves(release))
        if known
        else _newest_first(patch_set, variants)
        for identity, variants in patch_set.identities.items()
        if variants[0].component in wanted
    }


def judged(patch_set: PatchSet, identity: str, serving: tuple[Hunk, ...]) -> Hunk:
    """Return the variant whose drop condition counts."""
    return (serving or _newest_first(patch_set, patch_set.identities[identity]))[0]


def choose(
    patch_set: PatchSet,
    release: Version,
    serving: Mapping[str, tuple[Hunk, ...]],
    originals: Originals,
    found: Found,
) -> list[Choice]:
    """Return one choice per identity of ``serving`` (see ``candidates``)."""
    return [
        _choose_variant(patch_set, release, identity, hunks, originals, found)
        for identity, hunks in serving.items()
    ]


def _choose_variant(
    patch_set: PatchSet,
    release: Version,
    identity: str,
    serving: tuple[Hunk, ...],
    originals: Originals,
    found: Found,
) -> Choice:
    variants = patch_set.identities[identity]
    newest_first = _newest_first(patch_set, variants)
    served = [r for r in patch_set.releases if any(h.serves(r) for h in variants)]
    if patch_set.knows(release) and not serving and release < served[0]:
        detail = f"from {served[0]}"
        return Choice(identity, "not applicable", newest_first, detail)
    if dropped(judged(patch_set, identity, serving), release, originals, found):
        return Choice(identity, "not needed", newest_first, _since(patch_set, served))
    if not serving:
        ranges = ", ".join(str(hunk.releases) for hunk in variants)
        return Choice(identity, "unserved", newest_first, ranges)
    return Choice(identity, "wanted", serving)


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
