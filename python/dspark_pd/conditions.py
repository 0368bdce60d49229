"""Is a hunk still needed? The conditions of ``drop_when``, answered by reading files.

They are asked of the original files, never of patched ones: a symbol that we inserted
ourselves must not count as upstream's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dspark_pd import astgrep
from dspark_pd.errors import Problem
from dspark_pd.hunk import Hunk

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


def defines(source: bytes | None, dotted: str) -> bool:
    """Whether ``source`` defines ``dotted``, such as ``Class.method`` or ``NAME``."""
    if source is None:
        return False
    try:
        body: list[ast.stmt] = ast.parse(source).body
    except (SyntaxError, ValueError):
        # A damaged file defines nothing; what is wrong with it is said elsewhere.
        return False
    for name in dotted.split("."):
        found = next((node for node in body if _binds(node, name)), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
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
