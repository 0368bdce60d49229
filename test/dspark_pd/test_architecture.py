"""The wings of the tool and the order in which they may use each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "dspark_pd"
# From the ground up; wings of one floor do not know of each other.
FLOORS = (
    {"messages"},
    {"patchset"},
    {"target"},
    {"planning"},
    {"export", "doctor", "measure"},
    {"verbs"},
    {"cli"},
    {"__main__"},
)
# The bed starts engines; of the tool it has exit codes and the reader of streams, and only
# the CLI has it.
BED = {"bed": {"messages", "measure"}}


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """Yield the modules of the tool that a module imports, at its top or anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def wing(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def uses() -> dict[str, set[str]]:
    known = modules()
    return {
        name: {
            used for used in imports(path, set(known)) if used.startswith("dspark_pd.")
        }
        for name, path in known.items()
        if not name.endswith("__init__")
    }


def test_every_wing_has_its_floor() -> None:
    found = {wing(name) for name in modules()} - {"__init__"}
    assert found == set().union(*FLOORS) | set(BED)


def test_imports_run_down() -> None:
    below: dict[str, set[str]] = dict(BED)
    lower: set[str] = set()
    for floor in FLOORS:
        below |= {name: set(lower) for name in floor}
        lower |= floor
    wrong = [
        f"{module} imports {used}"
        for module, found in uses().items()
        for used in found
        if wing(used) not in below[wing(module)] | {wing(module)}
    ]
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    # Raises CycleError with the circle.
    tuple(TopologicalSorter(uses()).static_order())
