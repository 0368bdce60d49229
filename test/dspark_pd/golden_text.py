"""The rendered effect of the set on one file: our lines and where they go.

Nothing of upstream is written down: a place is the enclosing class and function and the
number of lines from its ``def``, so a change upstream that moves our lines shows in the
review of a release, and one elsewhere in the file does not.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from dspark_pd.planning.insertion import Edit, normalise
from dspark_pd.planning.plan import Plan, PlannedFile

GOLDEN = Path(__file__).parent / "golden"


def golden_files(plan: Plan) -> dict[str, str]:
    """Return the text of each golden file by its path below ``golden/<release>``."""
    texts = {
        f"{path}.txt": render(file)
        for path, file in plan.files.items()
        if file.kind == "hunk"
    }
    added = sorted(path for path, file in plan.files.items() if file.kind == "add")
    texts["modules.txt"] = "".join(f"{path}\n" for path in added)
    return texts


def render(file: PlannedFile) -> str:
    assert file.original is not None
    source = normalise(file.original)[0].decode("utf-8")
    tree = ast.parse(source)
    blocks = []
    for edit in file.edits:
        lines = "".join(f"    | {line}".rstrip() + "\n" for line in _lines(edit))
        blocks.append(f"{edit.hunk_id}  {_place(tree, source, edit)}\n{lines}")
    return "\n".join(blocks)


def _lines(edit: Edit) -> list[str]:
    """Return our lines without the indentation of their place."""
    if _inside_line(edit):
        first, _, rest = edit.text.partition("\n")
        return [first.strip(), *textwrap.dedent(rest).splitlines()]
    if edit.text.startswith("\n"):
        return textwrap.dedent(edit.text.strip("\n")).splitlines()
    # The text begins behind the indentation of its place and ends with it.
    body, _, indent = edit.text.rpartition("\n")
    return textwrap.dedent(indent + body).rstrip("\n").splitlines()


def _inside_line(edit: Edit) -> bool:
    """Whether the text continues a line of upstream instead of being lines itself."""
    return not edit.text.startswith("\n") and not edit.text.rstrip(" ").endswith("\n")


def _place(tree: ast.Module, source: str, edit: Edit) -> str:
    head = source.encode("utf-8")[: edit.at].decode("utf-8")
    line = head.count("\n") + 1
    before_line = not _inside_line(edit) and not edit.text.startswith("\n")
    names, start = _enclosing(tree, line, before_line)
    if edit.text.startswith("\n"):
        line += 1
    elif _inside_line(edit):
        return f"{names} +{line - start} inside the line"
    return f"{names} +{line - start}"


def _enclosing(tree: ast.Module, line: int, before_line: bool) -> tuple[str, int]:
    """Return the dotted name of the innermost definition at ``line`` and its line.

    What goes in before the first line of a definition is not inside it.
    """
    names, start = [], 1
    body: list[ast.stmt] = tree.body
    while True:
        inner = next(
            (node for node in _definitions(body) if _holds(node, line, before_line)),
            None,
        )
        if inner is None:
            return ".".join(names) or "<module>", start
        names.append(inner.name)
        start, body = inner.lineno, inner.body


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(body: list[ast.stmt]) -> list[_Definition]:
    found: list[_Definition] = []
    for statement in body:
        if isinstance(statement, _Definition):
            found.append(statement)
        else:
            for name in ("body", "orelse", "finalbody"):
                found += _definitions(getattr(statement, name, []))
    return found


def _holds(node: _Definition, line: int, before_line: bool) -> bool:
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    last = node.end_lineno or node.lineno
    return first + before_line <= line <= last


def compare(release: str, texts: dict[str, str], update: bool) -> list[str]:
    """Return what differs from the golden files, or rewrite them."""
    folder = GOLDEN / release
    present = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*.txt")
    }
    if update:
        for path in present.keys() - texts.keys():
            present[path].unlink()
        for path, text in texts.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return []
    stale = [f"{path}: no such golden file" for path in texts.keys() - present.keys()]
    stale += [f"{path}: nothing renders it" for path in present.keys() - texts.keys()]
    for path in sorted(texts.keys() & present.keys()):
        if present[path].read_text(encoding="utf-8") != texts[path]:
            stale.append(f"{path}: differs, now\n{texts[path]}")
    return stale
