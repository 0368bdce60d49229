"""The two lists of the overlay: our modules and the releases they were proved on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from packaging.version import Version

from dspark_pd.messages.errors import refuse
from dspark_pd.patchset.components import Components, current_name
from dspark_pd.patchset.ranges import ReleaseRange
from dspark_pd.patchset.yaml_documents import load_documents

MODULES_FILE: Final = "overlay.yml"
RELEASES_FILE: Final = "releases.yml"
_REQUIRED: Final = ("path", "component", "releases", "what")
_OPTIONAL: Final = ("reached_by",)
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Module:
    """A module of ours: a path relative to ``sglang`` and its record.

    ``reached_by`` names the registry that loads it, for a module that neither a hunk
    nor another module imports.
    """

    path: str
    component: str
    releases: ReleaseRange
    what: str
    reached_by: str | None = None

    def serves(self, release: Version) -> bool:
        return self.releases.contains(release, prereleases=True)


def load_modules(overlay: Path, components: Components) -> tuple[Module, ...]:
    """Return the modules of ``overlay``; refuse with S201 or S202."""
    wanted = f"path, component ({', '.join(components)}), a release range, what"

    def read(item: dict[str, Any]) -> Module:
        module = _module(item)
        if module.component not in components:
            raise ValueError(item)
        return module

    return tuple(_load(overlay / MODULES_FILE, read, wanted))


def load_releases(overlay: Path) -> tuple[Version, ...]:
    """Return the known releases, oldest first; refuse with S201 or S202."""
    found = _load(overlay / RELEASES_FILE, Version, "a quoted release")
    if not found:
        _refuse(overlay / RELEASES_FILE, "at least one release", "none")
    return tuple(sorted(found))


def _load(path: Path, read: Callable[[Any], _Item], wanted: str) -> list[_Item]:
    if not path.is_file():
        _refuse(path, f"a list at {path}", "no file")
    documents = load_documents(path, path.name)
    items = documents[0].data if documents else []
    if not isinstance(items, list):
        _refuse(path, "a list", type(items).__name__)
    found = []
    for item in items:
        try:
            found.append(read(item))
        except (TypeError, ValueError, KeyError, AttributeError):
            _refuse(path, wanted, item)
    return found


def _module(item: dict[str, Any]) -> Module:
    unknown = item.keys() - {*_REQUIRED, *_OPTIONAL}
    missing = set(_REQUIRED) - item.keys()
    if unknown or missing:
        raise ValueError(item)
    return Module(
        path=item["path"],
        component=current_name(item["component"]),
        releases=ReleaseRange(item["releases"]),
        what=item["what"],
        reached_by=item.get("reached_by"),
    )


def _refuse(path: Path, wanted: str, value: object) -> NoReturn:
    fields = {"id": "an entry", "field": "entry", "wanted": wanted, "value": value}
    refuse("S202", file=path.name, line=1, **fields)
