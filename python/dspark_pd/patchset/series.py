"""Which commit of the exported series brings a module or a hunk.

``series.yml`` names the commits in order. A module names its commit in ``overlay.yml``, one
of its own component or of one that needs it. A hunk goes with the last of the modules of
its component that it calls, unless its ``metadata.commit`` names another. Both may leave
that out where their component has one commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from dspark_pd.messages.errors import Problem, Refused
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import SERIES_FILE, Commit, Module, with_needs
from dspark_pd.patchset.patch_set import PatchSet, contradiction
from dspark_pd.patchset.python_source import module_name


def commit_of(patch_set: PatchSet, item: Module | Hunk) -> Commit | None:
    """Return the commit of a module or hunk, None where nothing says it."""
    series = patch_set.series
    if isinstance(item, Module):
        name = item.commit
    else:
        name = item.metadata.get("commit")
        called = [commit_of(patch_set, m) for m in called_modules(patch_set, item)]
        found = [c for c in called if c is not None and c.component == item.component]
        if name is None and found:
            return max(found, key=series.index)
    if name is not None:
        return next((commit for commit in series if commit.name == name), None)
    own = [commit for commit in series if commit.component == item.component]
    return own[0] if len(own) == 1 else None


def called_modules(patch_set: PatchSet, hunk: Hunk) -> list[Module]:
    """Return the modules of ours that the lines of a hunk import."""
    text = hunk.data["fix"]
    return [
        module
        for module in patch_set.modules
        if f"from {module_name(module.path)} import" in text
    ]


def up_to(patch_set: PatchSet, commits: Collection[str]) -> PatchSet:
    """Return the part of the set that these commits bring; refuse with S203."""
    problems = list(problems_of(patch_set))
    if problems:
        raise Refused(problems)

    def is_in(item: Module | Hunk) -> bool:
        commit = commit_of(patch_set, item)
        return commit is not None and commit.name in commits

    return replace(
        patch_set,
        modules=tuple(filter(is_in, patch_set.modules)),
        hunks=tuple(filter(is_in, patch_set.hunks)),
    )


def problems_of(patch_set: PatchSet) -> Iterator[Problem]:
    """Yield S203 for each module and hunk without a commit, or with a wrong one."""
    series = patch_set.series
    items: list[Module | Hunk] = [*patch_set.modules, *patch_set.hunks]
    for item in items:
        is_module = isinstance(item, Module)
        name = item.path if isinstance(item, Module) else item.id
        field = "commit in overlay.yml" if is_module else "metadata.commit"
        commit = commit_of(patch_set, item)
        if commit is None:
            names = [c.name for c in series if c.component == item.component]
            wanted = f"{field}: one of {', '.join(names) or 'none'} ({SERIES_FILE})"
            yield contradiction(f"the commit of {name}", wanted, "none that is known")
        elif not (
            commit.component == item.component
            or (
                is_module
                and item.component
                in with_needs(patch_set.components, [commit.component])
            )
        ):
            wanted = f"one of component {item.component} ({field})"
            yield contradiction(f"the commit of {name}", wanted, commit.name)
        elif isinstance(item, Hunk):
            for module in called_modules(patch_set, item):
                other = commit_of(patch_set, module)
                if other and series.index(other) > series.index(commit):
                    wanted = f"{other.name} or a later one, which brings {module.path}"
                    yield contradiction(f"the commit of {name}", wanted, commit.name)
