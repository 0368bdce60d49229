"""Which files of this repository go into which commit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.patch_set import PatchSet
from dspark_pd.patchset.python_source import imported, module_name
from dspark_pd.planning.plan import Plan

TESTS: Final = "test/registered/unit"
NAVIGATION: Final = "docs_new/docs.json"
_NEIGHBOUR: Final = b"docs/advanced_features/pd_disaggregation"
USER_PAGE: Final = "docs_new/docs/advanced_features/dspark_pd.mdx"
# A marker alone on its line opens a part, one behind other text is about that line.
_OPEN: Final = "{/* repository only */}"
_CLOSE: Final = "{/* end of repository only */}"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?:)[^)#\s]*\.mdx)(#[^)\s]*)?\)")


@dataclass
class TestFile:
    """A unit test, or a helper beside it, and what it needs."""

    __test__ = False

    path: str
    data: bytes
    components: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


def tests_of(patch_set: PatchSet, component: str, plan: Plan) -> dict[str, bytes]:
    """Return the test files that the commit of ``component`` brings, by path.

    A test goes with the last component it needs, and only where every module it imports
    is part of the plan: on a release without them it would not be collected.
    """
    repository = patch_set.overlay.parent.parent
    files = _unit_tests(patch_set, repository)
    tests = [
        file
        for file in files
        if file.components
        and _last(patch_set, file.components) == component
        and file.modules <= plan.files.keys()
        and _hunks_planned(patch_set, file, plan)
    ]
    chosen = {file.path: file.data for file in tests}
    for helper in files:
        if not helper.path.rpartition("/")[2].startswith("test_"):
            stem = Path(helper.path).stem.encode()
            if any(stem in file.data for file in tests):
                chosen[helper.path] = helper.data
    return chosen


def _last(patch_set: PatchSet, components: Iterable[str]) -> str:
    return max(components, key=list(patch_set.components).index)


def _unit_tests(patch_set: PatchSet, repository: Path) -> list[TestFile]:
    by_name = {module_name(module.path): module for module in patch_set.modules}
    files = []
    for path in sorted((repository / TESTS).rglob("*.py")):
        file = TestFile(path.relative_to(repository).as_posix(), path.read_bytes())
        for module in imported(file.data, by_name):
            file.components.add(module.component)
            file.modules.add(module.path)
        for hunk in _proved_by(patch_set, file):
            file.components.add(hunk.component)
        files.append(file)
    return files


def _proved_by(patch_set: PatchSet, file: TestFile) -> list[Hunk]:
    return [
        hunk
        for hunk in patch_set.hunks
        if str(hunk.metadata["proved_by"]).partition("::")[0] == file.path
    ]


def _hunks_planned(patch_set: PatchSet, file: TestFile, plan: Plan) -> bool:
    """Whether at least one hunk that the test proves is part of the plan, if it has any."""
    identities = {hunk.identity for hunk in _proved_by(patch_set, file)}
    planned = {identity for item in plan.files.values() for identity in item.hunks}
    return not identities or bool(identities & planned)


def docs_of(patch_set: PatchSet, navigation: bytes | None) -> dict[str, bytes]:
    """Return the user page and the navigation with it, for the last commit.

    The page goes without the parts that are about this repository, and after
    the one on disaggregation; a checkout that has no such entry keeps its navigation.
    """
    path = patch_set.overlay.parent.parent / USER_PAGE
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    files = {USER_PAGE: for_sglang(text, {USER_PAGE}).encode("utf-8")}
    entry = re.search(rb'^( *)"' + _NEIGHBOUR + rb'",?$', navigation or b"", re.M)
    if navigation and entry:
        page = USER_PAGE.removeprefix("docs_new/").removesuffix(".mdx").encode()
        line = entry[1] + b'"' + page + b'"'
        before = entry[0].rstrip(b",") + b",\n"
        after = b"," if entry[0].endswith(b",") else b""
        changed = before + line + after
        start, end = entry.span()
        files[NAVIGATION] = navigation[:start] + changed + navigation[end:]
    return files


def for_sglang(text: str, pages: set[str]) -> str:
    """Return a page as it reads inside SGLang, where of ours only ``pages`` exist.

    Links are by file here, so that they work in a clone, and by address on SGLang's site.
    Links to others of our pages become their text. Raises ValueError for a part that is
    closed without being open, or never closed.
    """
    kept: list[str] = []
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() in (_OPEN, _CLOSE):
            if inside is (line.strip() == _OPEN):
                raise ValueError(f"line {number}: unexpected {line.strip()}")
            inside = not inside
        elif not inside and _OPEN not in line:
            kept.append(line)
    if inside:
        raise ValueError(f"{_OPEN} is never closed")
    addresses = {
        page.rpartition("/")[2]: page.removeprefix("docs_new").removesuffix(".mdx")
        for page in pages
    }

    def on_the_site(link: re.Match[str]) -> str:
        text, file, heading = link.groups(default="")
        address = addresses.get(file.rpartition("/")[2])
        return f"[{text}]({address}{heading})" if address else text

    found = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).rstrip() + "\n"
    return _LINK.sub(on_the_site, found)
