"""Is a hunk still needed? The conditions of ``drop_when``, answered by reading files.

They are asked of the original files, never of patched ones: a symbol that we inserted
ourselves must not count as upstream's.
"""

from __future__ import annotations

from collections.abc import Callable

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dspark_pd.messages.errors import Problem
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.python_source import defines
from dspark_pd.planning import astgrep

Originals = Callable[[str], bytes | None]
"""Return the original of a path relative to ``sglang``, or None when it has none."""


def dropped(hunk: Hunk, release: Version, originals: Originals) -> bool:
    """Whether the drop condition of ``hunk`` holds on this release."""
    kind, argument = hunk.drop_when
    if kind == "release":
        return SpecifierSet(argument).contains(release, prereleases=True)
    if kind == "symbol":
        path, _, name = argument.partition("::")
        return defines(originals(path), name)
    if kind == "match":
        return _matches(hunk, argument, originals(hunk.target))
    return False


def _matches(hunk: Hunk, pattern: str, source: bytes | None) -> bool:
    # A file in another encoding matches nothing; that is said elsewhere.
    if source is None or encoding_problem(hunk.target, source):
        return False
    rule = {"id": "drop-when", "language": "python", "rule": {"pattern": pattern}}
    return bool(astgrep.scan(source, [astgrep.as_document(rule)], hunk.target))


def encoding_problem(path: str, source: bytes | None) -> Problem | None:
    """Return H308 if ``source`` cannot be read as ast-grep reads it."""
    try:
        (source or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        detail = f"byte {byte:#x} at offset {error.start}"
        return Problem("H308", {"file": path, "detail": detail})
    return None
