"""The lists of the overlay: components, our modules, the releases they were proved on,
and the commits of an export.

``components.yml`` names components in the order in which they build on each other: one
needs only such as stand before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dspark_pd.messages.errors import refuse
from dspark_pd.patchset.yaml_documents import load_documents

COMPONENTS_FILE: Final = "components.yml"
MODULES_FILE: Final = "overlay.yml"
RELEASES_FILE: Final = "releases.yml"
SERIES_FILE: Final = "series.yml"
ON_REQUEST: Final = ("cpu",)
"""Components that a command means only where they are named."""
_FORMER_NAMES: Final = {"handshake": "agreement"}
"""Former names of components, which records of older versions have."""
_MALFORMED: Final = (TypeError, ValueError, KeyError, AttributeError)
_Item = TypeVar("_Item")


class ReleaseRange(SpecifierSet):
    """A PEP 440 range that prints its lower bound first: `>=0.5.16,<0.5.24`."""

    def __str__(self) -> str:
        bounds = sorted((not spec.operator.startswith(">"), str(spec)) for spec in self)
        return ",".join(text for _, text in bounds)

    def serves(self, release: Version) -> bool:
        return self.contains(release, prereleases=True)


@dataclass(frozen=True)
class Component:
    """``title`` is its heading in the register of hunks."""

    name: str
    title: str
    needs: tuple[str, ...] = ()


Components = Mapping[str, Component]


@dataclass(frozen=True)
class Module:
    """A module of ours: a path relative to ``sglang`` and its record.

    ``reached_by`` names the registry that loads it, for a module that neither a hunk
    nor another module imports; ``commit`` the one that brings it in an export.
    """

    path: str
    component: str
    releases: ReleaseRange
    what: str
    reached_by: str | None = None
    commit: str | None = None

    def serves(self, release: Version) -> bool:
        return self.releases.serves(release)


@dataclass(frozen=True)
class Commit:
    """One commit of an export; ``step`` is the pull request that it belongs to."""

    name: str
    step: int
    component: str
    title: str
    motivation: str


def load_components(overlay: Path) -> dict[str, Component]:
    """Return the components by name, in order; refuse with S201 or S202."""
    path = overlay / COMPONENTS_FILE
    found: dict[str, Component] = {}
    for name, item in _document(path, dict).items():
        try:
            needs = tuple(item.get("needs", ()))
            component = Component(name=str(name), **{**item, "needs": needs})
            if not isinstance(component.title, str) or set(needs) - set(found):
                raise ValueError(item)
        except _MALFORMED:
            wanted = "a text title, needs that stand before it"
            _refuse(path, str(name), wanted, item)
        found[component.name] = component
    return found


def load_modules(overlay: Path, components: Components) -> tuple[Module, ...]:
    """Return the modules of ``overlay``; refuse with S201 or S202."""
    wanted = f"path, component ({', '.join(components)}), a release range, what"

    def read(item: dict[str, Any]) -> Module:
        module = Module(**{**item, "releases": ReleaseRange(item["releases"])})
        if module.component not in components:
            raise ValueError(item)
        return module

    return tuple(_load(overlay / MODULES_FILE, read, wanted))


def load_releases(overlay: Path) -> tuple[Version, ...]:
    """Return the known releases, oldest first; refuse with S201 or S202."""
    path = overlay / RELEASES_FILE
    found = _load(path, Version, "a quoted release")
    if not found:
        _refuse(path, "an entry", "at least one release", "none")
    return tuple(sorted(found))


def load_series(overlay: Path, components: Components) -> tuple[Commit, ...]:
    """Return the commits of an export, in order; refuse with S201 or S202."""
    path = overlay / SERIES_FILE
    names: set[str] = set()

    def read(item: dict[str, Any]) -> Commit:
        commit = Commit(**item)
        known = commit.component in components and commit.name not in names
        if not known or not commit.title.strip() or not commit.motivation.strip():
            raise ValueError(item)
        names.add(commit.name)
        return commit

    wanted = "a name of its own, step, component, and texts title and motivation"
    return tuple(_load(path, read, wanted))


def _load(path: Path, read: Callable[[Any], _Item], wanted: str) -> list[_Item]:
    found = []
    for item in _document(path, list):
        try:
            found.append(read(item))
        except _MALFORMED:
            _refuse(path, "an entry", wanted, item)
    return found


def _document(path: Path, kind: type[Any]) -> Any:
    """Return the one document of a file, which is a list or a mapping."""
    if not path.is_file():
        _refuse(path, "the file", f"a {kind.__name__} at {path}", "no file")
    documents = load_documents(path, path.name)
    items = documents[0].data if documents else kind()
    if not isinstance(items, kind):
        _refuse(path, "the file", f"a {kind.__name__}", type(items).__name__)
    return items


def _refuse(path: Path, name: str, wanted: str, value: object) -> NoReturn:
    fields = {"id": name, "field": "entry", "wanted": wanted, "value": value}
    refuse("S202", file=path.name, line=1, **fields)


def in_order(components: Components, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``names`` that are components, in the set's order."""
    wanted = {_FORMER_NAMES.get(name, name) for name in names}
    return tuple(name for name in components if name in wanted)


def by_default(components: Components) -> tuple[str, ...]:
    """Return what a command means when no component is named."""
    return tuple(name for name in components if name not in ON_REQUEST)


def with_needs(components: Components, names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` and all that they need, in the set's order."""
    wanted = set(in_order(components, names))
    # Needs stand in front, so one walk from the back finds the needs of needs.
    for name in reversed(list(components)):
        if name in wanted:
            wanted |= set(components[name].needs)
    return in_order(components, wanted)


def without(
    components: Components, names: Iterable[str], gone: Iterable[str]
) -> tuple[str, ...]:
    """Return what of ``names`` can stay when ``gone`` go: those that need none of them."""
    off = set(gone)
    return tuple(
        name
        for name in in_order(components, names)
        if not off & set(with_needs(components, [name]))
    )
