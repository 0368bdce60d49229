"""Find the SGLang to work on, and its release, without importing it.

A target is the folder ``sglang`` itself. It may be named by that folder, by a folder
that holds it (an unpacked wheel, a site-packages), by a checkout (``python/sglang``), by
a virtual environment or by an interpreter; an editable install is followed to its
checkout. Without a name it is the one that this interpreter would import.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlparse

from packaging.version import Version

from dspark_pd.messages.errors import about, refuse
from dspark_pd.patchset.patch_set import default_overlay
from dspark_pd.target.release import read_release
from dspark_pd.target.state import StateFolder

UNINSTALLED: Final = "uninstalled"
_PROGRAMS: Final = ("bin", "Scripts")


@dataclass(frozen=True)
class Target:
    """The folder ``sglang`` with its release.

    ``release`` is None when it cannot be read; ``source`` says where it was read, and
    ``assumed_over`` what could be read of a target whose release the user assumed.
    """

    root: Path
    release: Version | None
    source: str
    assumed_over: str | None = None

    @property
    def shown(self) -> str:
        return f"{self.root}  {self.release or 'unknown release'} ({self.source})"

    def as_dict(self) -> dict[str, object]:
        release = str(self.release) if self.release else None
        return {"path": str(self.root), "release": release, "source": self.source}


def find_target(
    named: str | None, assumed: str | None = None, leftovers: bool = False
) -> Target:
    """Return the target named by the user, or the one of this interpreter.

    ``assumed`` is a release that the user vouches for. Refuses with T101 and, unless
    ``leftovers`` are asked for, with T107 what an uninstalled SGLang left of the set.
    """
    places = list(_named_places(Path(named)) if named else _own_places())
    for place in places:
        if _is_sglang(place.root):
            return _with_release(place.root.resolve(), assumed, place.installed_as)
    for left in (place.root.resolve() for place in places):
        applied, target = StateFolder(left).load(), Target(left, None, UNINSTALLED)
        if applied.entries and leftovers:
            return target
        if applied.entries:
            with about(target):
                refuse("T107", target=left, version=applied.release)
    searched = named or ", ".join(dict.fromkeys(str(p.root.parent) for p in places))
    found, cause = _nothing_at(Path(named).expanduser() if named else None)
    refuse("T101", searched=searched or "sys.path", found=found, cause=cause)


def _nothing_at(path: Path | None) -> tuple[str, str]:
    """Return what is there in place of SGLang, and the likely cause."""
    if path is not None and not path.exists():
        return "no such path", "a mistyped path"
    if path is not None and path.is_file() and path.parent.name not in _PROGRAMS:
        return "a file", "a path to a file where a folder or an interpreter is wanted"
    return "none", "SGLang is installed in another environment than this command"


def _with_release(
    root: Path, assumed: str | None, installed_as: Path | None = None
) -> Target:
    release, source = read_release(root, installed_as)
    if assumed is not None:
        return Target(root, Version(assumed), "assumed", str(release))
    applied = StateFolder(root).load()
    if applied.release and applied.assumed_over == str(release):
        # What the user vouched for at apply holds for the same target.
        return Target(root, Version(applied.release), "assumed at apply", str(release))
    return Target(root, release, source)


def _is_sglang(place: Path) -> bool:
    """The overlay of this tool looks alike but has no ``__init__.py``."""
    return (
        (place / "__init__.py").is_file()
        and (place / "srt").is_dir()
        and place.resolve() != default_overlay()
    )


class _Place(NamedTuple):
    """A folder that may be ``sglang``; the metadata that an editable install led from."""

    root: Path
    installed_as: Path | None = None


def _own_places() -> Iterator[_Place]:
    for entry in sys.path:
        folder = Path(entry or ".")
        yield _Place(folder / "sglang")
        yield from _editable_places(folder)


def _named_places(path: Path) -> Iterator[_Place]:
    path = path.expanduser()
    if path.is_file():
        # Only an interpreter, <venv>/bin/python, says where to look. It is not resolved:
        # it is a link out of the venv.
        if path.parent.name not in _PROGRAMS:
            return
        path = path.absolute().parent.parent
    for root in (path, path / "sglang", path / "python" / "sglang"):
        yield _Place(root)
    yield from _editable_places(path)
    for pattern in ("lib*/python3*/site-packages", "Lib/site-packages"):
        for folder in sorted(path.glob(pattern)):
            yield _Place(folder / "sglang")
            yield from _editable_places(folder)


def _editable_places(folder: Path) -> Iterator[_Place]:
    """Follow ``direct_url.json`` (PEP 610) of an editable install to its checkout."""
    for record in sorted(folder.glob("sglang-*.dist-info/direct_url.json")):
        try:
            direct = json.loads(record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        url = urlparse(direct.get("url", ""))
        if url.scheme == "file" and direct.get("dir_info", {}).get("editable"):
            project = Path(unquote(url.path))
            yield _Place(project / "sglang", record.parent)
            yield _Place(project / "python" / "sglang", record.parent)
