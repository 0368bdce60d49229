"""Is a hunk still needed? The conditions of ``drop_when``, answered by reading files.

They are asked of the original files, never of patched ones: a symbol that we inserted
ourselves must not count as upstream's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dspark_pd.messages.errors import Problem
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.python_source import defines
from dspark_pd.planning.astgrep import Match

Originals = Callable[[str], bytes | None]
"""Return the original of a path relative to ``sglang``, or None when it has none."""


Found = Mapping[str, list[Match]]
"""Matches by path of upstream's file, those of drop conditions included."""


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


def encoding_problem(path: str, source: bytes | None) -> Problem | None:
    """Return H308 if ``source`` cannot be read as ast-grep reads it."""
    try:
        (source or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        detail = f"byte {byte:#x} at offset {error.start}"
        return Problem("H308", {"file": path, "detail": detail})
    return None
