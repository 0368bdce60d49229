"""The user page as it reads inside SGLang, and its entry in the navigation."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from dspark_pd.export.checkout import Checkout
from dspark_pd.messages.errors import refuse
from dspark_pd.patchset.patch_set import PatchSet

PAGE: Final = "docs/advanced_features/dspark_pd.mdx"
"""The page below the folder of the documentation, here as there."""
OURS: Final = "docs_new"
FOLDERS: Final = ("docs", "docs_new")
"""SGLang's folder of the documentation: docs_new until 2026-08-03, docs since."""
NAVIGATION: Final = "docs.json"
_NEIGHBOUR: Final = b"docs/advanced_features/pd_disaggregation"
_VERIFIED: Final = "## What was verified where"
# A marker alone on its line opens a part, one behind other text is about that line.
_OPEN: Final = re.compile(r"\{/\* (?:repository only|export: from ([\w-]+)) \*/\}")
_CLOSE: Final = re.compile(r"\{/\* end of (?:repository only|export) \*/\}")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?:)[^)#\s]*\.mdx)(#[^)\s]*)?\)")


def docs_folder(checkout: Checkout) -> str:
    """Return the checkout's folder of the documentation; refuse one without with T104."""
    for folder in FOLDERS:
        if checkout.read(f"{folder}/{NAVIGATION}") is not None:
            return folder
    refuse(
        "T104",
        what="export",
        needed="a checkout of SGLang with its documentation",
        found=f"{checkout.root}, without docs/docs.json and docs_new/docs.json in HEAD",
        cause="a sparse checkout, or a release before that documentation",
        hint=f"git -C {checkout.root} sparse-checkout disable",
    )


def page_of(patch_set: PatchSet, commits: Collection[str]) -> str | None:
    """Return the page with the parts that these commits bring."""
    path = patch_set.repository / OURS / PAGE
    if not path.is_file():
        return None
    return for_sglang(path.read_text(encoding="utf-8"), {PAGE}, commits)


def with_entry(navigation: bytes) -> bytes | None:
    """Return the navigation with the page behind that on disaggregation.

    None for a navigation that has no such entry.
    """
    page = b'"' + PAGE.removesuffix(".mdx").encode() + b'"'
    entry = re.search(rb'^( *)"' + _NEIGHBOUR + rb'",?$', navigation, re.M)
    if page in navigation or entry is None:
        return navigation if page in navigation else None
    before = entry[0].rstrip(b",") + b",\n"
    after = b"," if entry[0].endswith(b",") else b""
    start, end = entry.span()
    return navigation[:start] + before + entry[1] + page + after + navigation[end:]


def verified_by(patch_set: PatchSet, commit: str, is_first: bool) -> list[list[str]]:
    """Return the rows of the page's table of what was verified, for one commit.

    The first row is the table's head.
    """
    path = patch_set.repository / OURS / PAGE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    rows: list[list[str]] = []
    for line in text.partition(_VERIFIED)[2].partition("\n## ")[0].splitlines():
        if not line.startswith("|") or line.startswith("|--"):
            if rows and not line.startswith("|"):
                break
            continue
        mark = _OPEN.search(line)
        cells = [cell.strip() for cell in _without_marks(line).strip("| ").split("|")]
        named = mark[1] if mark else None
        if not rows or named == commit or (is_first and mark is None):
            rows.append(cells)
    return rows


def _without_marks(line: str) -> str:
    return re.sub(" ?" + _OPEN.pattern, "", line).rstrip()


def for_sglang(text: str, pages: set[str], commits: Collection[str]) -> str:
    """Return a page as it reads inside SGLang, where of ours only ``pages`` exist.

    Links are by file here, so that they work in a clone, and by address on SGLang's site.
    Links to others of our pages become their text. Raises ValueError for a part that is
    closed without being open, or never closed.
    """
    kept: list[str] = []
    part: re.Match[str] | None = None
    for number, line in enumerate(text.split("\n"), 1):
        opens, closes = _OPEN.search(line), _CLOSE.fullmatch(line.strip())
        if closes or (opens and opens[0] == line.strip()):
            if bool(closes) is (part is None):
                raise ValueError(f"line {number}: unexpected {line.strip()}")
            part = None if closes else opens
        elif (part is None or part[1] in commits) and (
            opens is None or opens[1] in commits
        ):
            kept.append(_without_marks(line))
    if part is not None:
        raise ValueError(f"{part[0]} is never closed")
    addresses = {page.rpartition("/")[2]: "/" + page[: -len(".mdx")] for page in pages}

    def on_the_site(link: re.Match[str]) -> str:
        text, file, heading = link.groups(default="")
        address = addresses.get(file.rpartition("/")[2])
        return f"[{text}]({address}{heading})" if address else text

    found = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).rstrip() + "\n"
    return _LINK.sub(on_the_site, found)
