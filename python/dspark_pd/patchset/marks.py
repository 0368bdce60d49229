"""Marks in sources that say which lines an export leaves out.

Applied, a file is what it is. Exported, it stands in one release of SGLang and in one
commit of the series, and lines that make no sense there are left out. A comment above
them says so::

    # export: only <0.5.20
    except ImportError:
    # export: from tail-handoff
    ("tail", describe_tail),

``only RANGE`` keeps what follows for checkouts of these releases, ``from COMMIT`` from that
commit of the series on. The mark is about the statement, argument or entry that begins on
the next line, over all of its lines; where none begins there, and in a text over several
lines, about that line alone. The mark itself is never exported.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator
from typing import Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

_MARK: Final = re.compile(r"# export: (only|from) (\S.*)")
_SPACE: Final = " \t"


def resolve(source: bytes, release: Version, commits: Collection[str]) -> bytes:
    """Return Python ``source`` as it reads on ``release`` with these ``commits`` made.

    Raises:
        ValueError: a mark that is none, or whose lines cannot be left out.
    """
    marks = list(marks_of(source))
    if not marks:
        return source
    text = source.decode("utf-8")
    lines = text.splitlines(keepends=True)
    gone = {number for number, _, _ in marks}
    tree = ast.parse(text)
    spans, ends = _spans(tree, text.splitlines()), _ends_of_texts(tree)
    for number, kind, what in marks:
        if not holds(kind, what, release, commits):
            about = next(n for n in range(number, len(lines) + 2) if n not in gone)
            if about in ends:
                raise ValueError(f"line {about} ends a text; mark one before it")
            first, last = spans.get(about, (about, about))
            gone |= set(range(first, last + 1))
    kept = "".join(line for n, line in enumerate(lines, 1) if n not in gone)
    try:
        ast.parse(kept)
    except SyntaxError as error:
        raise ValueError(f"without its marked lines: {error}") from error
    return kept.encode("utf-8")


def marks_of(source: bytes) -> Iterator[tuple[int, str, str]]:
    """Yield (line, ``only`` or ``from``, what follows) for each mark in Python source."""
    if b"# export:" not in source:
        return
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT and "# export:" in token.string:
            found = _MARK.fullmatch(token.string)
            if found is None or token.line.strip() != token.string:
                raise ValueError(f"line {token.start[0]}: {token.line.strip()}")
            yield token.start[0], found[1], found[2]


def holds(kind: str, what: str, release: Version, commits: Collection[str]) -> bool:
    """Whether lines with this mark are exported."""
    if kind == "from":
        return what in commits
    try:
        return SpecifierSet(what).contains(release, prereleases=True)
    except InvalidSpecifier as error:
        raise ValueError(f"export: only {what}: no range of releases") from error


def _spans(tree: ast.AST, lines: list[str]) -> dict[int, tuple[int, int]]:
    """Return, by its first line, the lines of the largest part that begins there."""
    spans: dict[int, tuple[int, int]] = {}
    for first, column, last in _parts(tree):
        indent = len(lines[first - 1]) - len(lines[first - 1].lstrip(_SPACE))
        if column == indent:
            spans[first] = (first, max(last, spans.get(first, (0, 0))[1]))
    return spans


def _parts(tree: ast.AST) -> Iterator[tuple[int, int, int]]:
    """Yield (first line, column, last line) of what may be left out."""
    for node in _walk(tree):
        if isinstance(node, (ast.stmt, ast.expr, ast.keyword, ast.arg)):
            last = node.end_lineno or node.lineno
            if not _is_text(node):
                yield node.lineno, node.col_offset, last
            for decorator in getattr(node, "decorator_list", []):
                yield decorator.lineno, decorator.col_offset - 1, last
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None:
                    yield key.lineno, key.col_offset, value.end_lineno or value.lineno


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those inside f-strings: some Pythons misplace them."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _ends_of_texts(tree: ast.AST) -> set[int]:
    """Return the last lines of texts over several lines: a comma follows there."""
    return {
        node.end_lineno or 0
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
        and _is_text(node)
        and node.end_lineno != node.lineno
    }


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
