"""Which hunks and modules a release needs.

For a known release the ranges decide. For an unknown one every variant is tried, newest
first, and the one whose count is right is taken: that tells whether the set would fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from dspark_pd.messages.errors import Problem
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Module
from dspark_pd.patchset.patch_set import PatchSet, contradiction
from dspark_pd.patchset.python_source import imported, module_name
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
    patch_set: PatchSet,
    release: Version,
    components: Iterable[str],
    hunks: Iterable[Hunk],
) -> tuple[list[Module], list[Problem]]:
    """Return the modules of ``components`` and all that they and ``hunks`` import.

    A module may belong to another component than the one that calls it; the import
    decides, so that no component can be applied without its own code.
    """
    known = patch_set.knows(release)
    by_name = {module_name(module.path): module for module in patch_set.modules}
    wanted = set(components)
    queue = [
        module
        for module in patch_set.modules
        if module.component in wanted and (module.serves(release) or not known)
    ]
    queue += _called(hunks, by_name)
    chosen: dict[str, Module] = {}
    problems = []
    while queue:
        module = queue.pop()
        if module.path in chosen:
            continue
        if known and not module.serves(release):
            problems.append(
                contradiction(module.path, f"a range with {release}", module.releases)
            )
        chosen[module.path] = module
        queue += imported(patch_set.source(module), by_name)
    return sorted(chosen.values(), key=lambda module: module.path), problems


def _called(hunks: Iterable[Hunk], by_name: dict[str, Module]) -> list[Module]:
    names = [str(hunk.metadata.get("calls", "")).rpartition(".")[0] for hunk in hunks]
    found = [by_name[name] for name in names if name in by_name]
    for hunk in hunks:
        found += [m for name, m in by_name.items() if f"{name} " in hunk.data["fix"]]
    return found
