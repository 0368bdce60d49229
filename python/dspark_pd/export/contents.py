"""Which tests of this repository go into a commit, and where they go."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import Version

from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Module
from dspark_pd.patchset.marks import resolve
from dspark_pd.patchset.patch_set import PatchSet
from dspark_pd.patchset.python_source import defines, imported, module_name
from dspark_pd.patchset.series import commit_of
from dspark_pd.planning.plan import Plan

TESTS: Final = "test/registered/unit"
HELPERS: Final = "python/sglang/test"
"""SGLang wants a registry call in every file below test/registered; helpers go here."""


@dataclass(frozen=True)
class Exported:
    """What is exported: a release, the commits made so far, and the whole set."""

    patch_set: PatchSet
    release: Version
    commits: Collection[str]
    plan: Plan

    def text(self, path: Path) -> bytes:
        """Return a file of the repository without what its marks leave out."""
        try:
            return resolve(path.read_bytes(), self.release, self.commits)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def tests(self) -> dict[str, bytes]:
        """Return the tests whose modules and hunks are all there, and their helpers."""
        root = self.patch_set.repository
        paths = sorted((root / TESTS).rglob("*.py"))
        helpers = {p.stem: p for p in paths if not p.name.startswith("test_")}
        chosen = {
            path.relative_to(root).as_posix(): text
            for path in paths
            if path.stem not in helpers
            and self._is_ready(path, text := self.text(path))
        }
        used = list(_imports(chosen.values(), helpers))
        while used:
            stem = used.pop()
            place = f"{HELPERS}/{stem}.py"
            if place not in chosen:
                chosen[place] = self.text(helpers[stem])
                used += _imports([chosen[place]], helpers)
        return {path: _at_home(text, helpers) for path, text in chosen.items()}

    def _is_ready(self, path: Path, text: bytes) -> bool:
        """Whether a test is about modules or hunks of ours, all of them exported."""
        by_name = {module_name(m.path): m for m in self.patch_set.modules}
        used = imported(text, by_name)
        proved = list(self._proved_in(path, text))
        needed: list[Module | Hunk] = [*used, *proved]
        has_all = all(module.path in self.plan.files for module in used)
        ready = has_all and all(map(self._is_made, needed))
        return ready and bool(used or proved) and b"def test_" in text

    def _proved_in(self, path: Path, text: bytes) -> Iterator[Hunk]:
        """Yield hunks for this release that tests in ``text`` prove."""
        place = path.relative_to(self.patch_set.repository).as_posix()
        for hunk in self.patch_set.hunks:
            file, _, name = str(hunk.metadata["proved_by"]).partition("::")
            known = self.patch_set.knows(self.release)
            serves = hunk.serves(self.release) or not known
            if file == place and serves and defines(text, name.replace("::", ".")):
                yield hunk

    def _is_made(self, item: Module | Hunk) -> bool:
        commit = commit_of(self.patch_set, item)
        return commit is not None and commit.name in self.commits


def _imports(texts: Collection[bytes], helpers: Collection[str]) -> Iterator[str]:
    for stem in helpers:
        pattern = re.compile(rb"^\s*(?:from|import) " + stem.encode() + rb"\b", re.M)
        if any(pattern.search(text) for text in texts):
            yield stem


def _at_home(text: bytes, helpers: Collection[str]) -> bytes:
    """Import helpers from where they are in SGLang; here they lie beside the tests."""
    for stem in helpers:
        name = stem.encode()
        text = re.sub(
            rb"^(\s*)from " + name + rb" import\b",
            rb"\1from sglang.test." + name + rb" import",
            text,
            flags=re.M,
        )
    return text
