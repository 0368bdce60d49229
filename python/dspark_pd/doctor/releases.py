"""Which releases a component of the set serves, for the doctor.

A component serves a release where the overlay has a module of its own for it.
"""

from __future__ import annotations

from functools import cache

from packaging.version import InvalidVersion, Version

from dspark_pd.patchset.lists import load_components, load_modules, load_releases
from dspark_pd.patchset.patch_set import default_overlay


def released(text: str | None) -> Version | None:
    """Return a release as a version; None where it is no version."""
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


@cache
def _served(component: str) -> tuple[Version, ...]:
    overlay = default_overlay()
    modules = [
        m
        for m in load_modules(overlay, load_components(overlay))
        if m.component == component
    ]
    releases = load_releases(overlay)
    return tuple(r for r in releases if any(m.serves(r) for m in modules))


def serves(component: str, release: Version) -> bool:
    """Whether ``component`` has code for ``release``; newer ones than all are unknown
    and taken for served."""
    served = _served(component)
    return Version(release.public) in served or release > served[-1]


def served_by(component: str) -> str:
    """Return the releases of ``component`` in words."""
    served = _served(component)
    first, last = served[0], served[-1]
    return str(first) if first == last else f"{first} to {last}"
