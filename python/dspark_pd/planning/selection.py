"""Which hunks and modules a release needs.

For a known release the ranges decide. For an unknown one every variant is tried, newest
first, and the one whose count is right is taken: that tells whether the set would fit.

A hunk whose ``drop_when`` holds is not needed. That is asked of the original files, never
of patched ones: a symbol that we inserted ourselves must not count as upstream's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Module
from dspark_pd.patchset.patch_set import PatchSet
from dspark_pd.patchset.python_source import defines
from dspark_pd.planning.astgrep import Match

Verdict = Literal["wanted", "not needed", "not applicable", "unserved"]
Originals = Callable[[str], bytes | None]
"""Return the original of a path relative to ``sglang``, or None when it has none."""
Found = Mapping[str, list[Match]]
"""Matches by path of upstream's file, those of drop conditions included."""


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
        identity: tuple(h for h in variants if h.serves(release) or not known)
        for identity, variants in patch_set.identities.items()
        if variants[0].component in wanted
    }


def judged(patch_set: PatchSet, identity: str, serving: tuple[Hunk, ...]) -> Hunk:
    """Return the variant whose drop condition counts."""
    return (serving or patch_set.identities[identity])[0]


def choose(
    patch_set: PatchSet,
    release: Version,
    identity: str,
    serving: tuple[Hunk, ...],
    originals: Originals,
    found: Found,
) -> Choice:
    """Return the choice for ``identity``, of which ``serving`` may serve (``candidates``)."""
    variants = patch_set.identities[identity]
    served = [r for r in patch_set.releases if any(h.serves(r) for h in variants)]
    if patch_set.knows(release) and not serving and release < served[0]:
        detail = f"from {served[0]}"
        return Choice(identity, "not applicable", variants, detail)
    if dropped(judged(patch_set, identity, serving), release, originals, found):
        return Choice(identity, "not needed", variants, _since(patch_set, served))
    if not serving:
        ranges = ", ".join(str(hunk.releases) for hunk in variants)
        return Choice(identity, "unserved", variants, ranges)
    return Choice(identity, "wanted", serving)


def _since(patch_set: PatchSet, served: list[Version]) -> str:
    later = [release for release in patch_set.releases if release > served[-1]]
    return f"not needed since {later[0]}" if later else "upstream has it"


def drop_rule(hunk: Hunk) -> str | None:
    """Return the rule of a drop condition that is a pattern, as JSON."""
    kind, pattern = hunk.drop_when
    if kind != "match":
        return None
    head = {"id": _rule_id(hunk), "language": "python", "severity": "hint"}
    return json.dumps({**head, "rule": {"pattern": pattern}})


def dropped(hunk: Hunk, release: Version, originals: Originals, found: Found) -> bool:
    """Whether the drop condition of ``hunk`` holds on this release."""
    kind, argument = hunk.drop_when
    if kind == "release":
        return SpecifierSet(argument).contains(release, prereleases=True)
    if kind == "symbol":
        path, _, name = argument.partition("::")
        return defines(originals(path), name)
    if kind == "match":
        matches = found.get(hunk.target, [])
        return any(match.rule_id == _rule_id(hunk) for match in matches)
    return False


def _rule_id(hunk: Hunk) -> str:
    return f"drop {hunk.id}"


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
