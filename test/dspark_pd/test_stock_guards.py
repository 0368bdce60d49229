"""Every stock check of the form "not with speculation" has a verdict for a capturing prefill.

Such a prefill runs without ``--speculative-algorithm``, so those checks do not see it. The
design page has the list; SGLang's source says whether it is complete.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_pd.doctor.tables import load

pytestmark = pytest.mark.unit

RELEASE = "0.5.23"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs_new/docs/developer_guide/dspark_pd_design.mdx"
ROW = re.compile(
    r"^\| `(srt/)?([\w/]+\.py)` \| `(\w+)` \| (refused|allowed|no case) \| (.+) \|$"
)
# They run with an algorithm only.
ELSEWHERE = "speculative/"


def listed() -> dict[tuple[str, str], tuple[str, str]]:
    """(file, function) to (verdict, why), as the page has them."""
    rows = (ROW.match(line) for line in PAGE.read_text().splitlines())
    return {(row[2], row[3]): (row[4], row[5]) for row in rows if row}


def guards(tree: ast.AST) -> Iterator[str]:
    """Functions that refuse because of a speculative algorithm."""

    def walk(node: ast.AST, function: str, conditions: list[ast.expr]) -> Iterator[str]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, conditions = node.name, []
        asked = conditions + ([node.test] if isinstance(node, ast.Assert) else [])
        if isinstance(node, (ast.Assert, ast.Raise)) and any(map(speaks, asked)):
            yield function
        if isinstance(node, ast.If):
            for child in node.body:
                yield from walk(child, function, [*conditions, node.test])
            for child in node.orelse:
                yield from walk(child, function, conditions)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, function, conditions)

    return walk(tree, "", [])


def speaks(condition: ast.expr) -> bool:
    """Whether it asks for the algorithm; not what a platform is asked about one."""
    return (
        re.search(r"(?<!supports_)spec(ulative)?_algorithm", ast.unparse(condition))
        is not None
    )


def found() -> set[tuple[str, str]]:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))) / "srt"
    pairs = set()
    for path in root.rglob("*.py"):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        if "spec_algorithm" in text or "speculative_algorithm" in text:
            pairs |= {(name, function) for function in guards(ast.parse(text))}
    return {pair for pair in pairs if not pair[0].startswith(ELSEWHERE)}


@pytest.mark.skipif(
    importlib.metadata.version("sglang") != RELEASE, reason=f"the list is of {RELEASE}"
)
def test_every_guard_has_a_verdict() -> None:
    assert found() == set(listed())


def test_what_is_refused_names_its_rule() -> None:
    rules = {rule.code for rule in load("handoff_refusals").REFUSALS}
    refused = [why for verdict, why in listed().values() if verdict == "refused"]
    assert refused
    for why in refused:
        code = re.match(r"`([A-Z0-9-]+)`", why)
        assert code is not None and code[1] in rules
