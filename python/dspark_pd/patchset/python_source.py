"""What Python source defines and imports, read without running it."""

from __future__ import annotations

import ast

from dspark_pd.patchset.lists import Module


def defines(source: bytes | None, dotted: str) -> bool:
    """Whether ``source`` defines ``dotted``, such as ``Class.method`` or ``NAME``."""
    # Most of what is asked for is not there, and a look for the names tells so.
    if source is None or any(n.encode() not in source for n in dotted.split(".")):
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


def module_name(path: str) -> str:
    """Return the dotted name of a path relative to ``sglang``."""
    stem = path.removesuffix(".py").removesuffix("/__init__")
    return "sglang." + stem.replace("/", ".")


def imported(source: bytes, by_name: dict[str, Module]) -> list[Module]:
    """Return the overlay modules that ``source`` imports by their full names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            names.add(node.module)
    return [module for name, module in by_name.items() if name in names]
