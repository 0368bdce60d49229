"""The components of the set: what each is for, and which others it needs.

``components.yml`` names them in the order in which they build on each other: a component
needs only such as stand before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from dspark_pd.messages.errors import refuse
from dspark_pd.patchset.yaml_documents import load_documents

COMPONENTS_FILE: Final = "components.yml"
ON_REQUEST: Final = ("cpu",)
"""Components that a command means only where they are named."""
_FORMER_NAMES: Final = {"handshake": "agreement"}
_FIELDS: Final = ("title", "motivation", "needs")


@dataclass(frozen=True)
class Component:
    """``title`` and ``motivation`` are those of its commit in an export."""

    name: str
    title: str
    motivation: str
    needs: tuple[str, ...] = ()


Components = Mapping[str, Component]


def current_name(name: str) -> str:
    """Return a component's name as it is now; records of old versions have others."""
    return _FORMER_NAMES.get(name, name)


def load_components(overlay: Path) -> dict[str, Component]:
    """Return the components by name, in order; refuse with S201 or S202."""
    path = overlay / COMPONENTS_FILE
    if not path.is_file():
        _refuse("the file", "a mapping", "no file")
    documents = load_documents(path, path.name)
    items = documents[0].data if documents else None
    if not isinstance(items, dict):
        _refuse("the file", "a mapping", type(items).__name__)
    found: dict[str, Component] = {}
    for key, item in items.items():
        component = _component(current_name(str(key)), item)
        for need in component.needs:
            if need not in found:
                _refuse(f"needs of {key}", "components that stand before it", need)
        found[component.name] = component
    return found


def _component(name: str, item: Any) -> Component:
    if not isinstance(item, dict) or item.keys() - {*_FIELDS}:
        _refuse(name, f"a mapping with {', '.join(_FIELDS)}", item)
    title, motivation = item.get("title"), item.get("motivation")
    needs = item.get("needs", [])
    texts = isinstance(title, str) and isinstance(motivation, str)
    if not texts or not isinstance(needs, list):
        _refuse(name, "texts title and motivation, a list needs", item)
    known = tuple(current_name(str(need)) for need in needs)
    return Component(name, str(title), str(motivation), known)


def in_order(components: Components, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``names`` that are components, in the set's order."""
    wanted = {current_name(name) for name in names}
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
    off = {current_name(name) for name in gone}
    return tuple(
        name
        for name in in_order(components, names)
        if not off & set(with_needs(components, [name]))
    )


def _refuse(name: str, wanted: str, value: object) -> NoReturn:
    fields = {"id": name, "field": "entry", "wanted": wanted, "value": value}
    refuse("S202", file=COMPONENTS_FILE, line=1, **fields)
