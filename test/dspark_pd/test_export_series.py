"""The real series on the newest release: sizes, words, and upstream's own checks.

That each commit's tests pass on it alone takes minutes: ``scripts/series_tests.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import release_wheels
from dspark_pd.cli import main
from dspark_pd.export.contents import TESTS
from dspark_pd.patchset.patch_set import load_patch_set
from dspark_pd.patchset.series import commit_of
from test_export import ENTRY, git

pytestmark = pytest.mark.release

MOST_LINES = 800
FIRST_WITH_TESTS = 300
REGISTRY = "test/ci/ci_register.py"
# Words of this repository and of its view of SGLang.
FOREIGN = re.compile(
    r"dspark-pd|dspark_pd\.(?!mdx)|\bdoctor|patch set|\bth(e|is) set\b|\bhunk|unpatched"
    r"|upstream|# export:|\{/\*",
    re.IGNORECASE,
)
# Lint rules of upstream's hooks, and whatever shows that a commit lacks a line.
RUFF = ["check", "-q", "--isolated", "--select", "F401,F811,F821,E9,I"]
RUFF += ["--config", 'lint.isort.known-first-party=["sglang"]']


@dataclass(frozen=True)
class Series:
    """The series on one stand-in checkout; commits in order, each with its parent."""

    root: Path
    docs: str
    commits: list[str]

    def names(self, index: int, *more: str) -> list[str]:
        """Return the files that a commit changes, or with ``more`` some of them."""
        commit = self.commits[index]
        return git(
            self.root, "diff", "--name-only", *more, f"{commit}~1", commit
        ).split()

    def added(self, index: int, *folders: str) -> int:
        commit = self.commits[index]
        counts = git(
            self.root, "diff", "--numstat", f"{commit}~1", commit, "--", *folders
        )
        return sum(int(line.split()[0]) for line in counts.splitlines())

    def write(self, index: int, folder: Path) -> list[str]:
        """Write the files of a commit that the release does not have; return them."""
        commit = self.commits[index]
        new = set(
            git(
                self.root, "diff", "--name-only", "--diff-filter=A", "main", commit
            ).split()
        )
        for path in (names := sorted(new.intersection(self.names(index)))):
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(git(self.root, "show", f"{commit}:{path}"))
        return names


def standin(folder: Path, docs: str) -> Path:
    """Make a checkout of the newest release: its Python sources and a navigation."""
    patch_set = load_patch_set()
    release = str(patch_set.releases[-1])
    stock = release_wheels.unpack(release, folder / "site")
    root = folder / "checkout"
    package = root / "python/sglang"
    for part in ("srt", Path(REGISTRY).parent):
        shutil.copytree(stock / part, package / part)
    shutil.copy(stock / "__init__.py", package)
    (root / docs).mkdir()
    (root / docs / "docs.json").write_text(ENTRY)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-qm", "start")
    git(root, "tag", f"v{release}")
    return root


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    root = standin(tmp_path_factory.mktemp("series"), "docs")
    return exported(root, "docs")


def exported(root: Path, docs: str, *more: str) -> Series:
    assert main(["export", str(root), "--out", "series", "-q", *more]) == 0
    commits = git(root, "rev-list", "--reverse", "main..series").split()
    return Series(root, docs, commits)


def test_each_step_is_there_and_each_commit_is_of_a_size_to_review(
    series: Series,
) -> None:
    sizes = [series.added(i, "python/sglang/srt") for i in range(len(series.commits))]
    assert len(sizes) >= 10
    assert max(sizes) <= MOST_LINES, sizes
    first = series.added(0, "python", "test")
    assert first < FIRST_WITH_TESTS, first


def test_each_commit_brings_its_tests(series: Series) -> None:
    for index, commit in enumerate(series.commits):
        names = series.names(index)
        title = git(series.root, "log", "-1", "--format=%s", commit)
        assert [n for n in names if "/test_" in n], title


def test_each_hunk_comes_with_the_test_that_proves_it(series: Series) -> None:
    patch_set = load_patch_set()
    release = patch_set.releases[-1]
    wanted: dict[str, set[str]] = {}
    for hunk in patch_set.hunks:
        place = str(hunk.metadata["proved_by"]).partition("::")[0]
        if hunk.serves(release) and place.startswith(TESTS):
            commit = commit_of(patch_set, hunk)
            assert commit is not None
            wanted.setdefault(commit.title, set()).add(place)
    late = {}
    for commit in series.commits:
        title = git(series.root, "log", "-1", "--format=%s", commit).strip()
        there = git(series.root, "ls-tree", "-r", "--name-only", commit, "test")
        late[title] = wanted.get(title, set()) - set(there.split())
    assert len(wanted) > 10
    assert not any(late.values()), late


def test_an_older_checkout_keeps_its_folder_of_the_docs(tmp_path: Path) -> None:
    series = exported(standin(tmp_path, "docs_new"), "docs_new", "--component=native")
    names = {path for i in range(len(series.commits)) for path in series.names(i)}
    assert {path.split("/")[0] for path in names} == {"docs_new", "python", "test"}
    assert "docs_new/docs.json" in series.names(0)


def test_the_page_grows_with_the_commits(series: Series) -> None:
    assert f"{series.docs}/docs.json" in series.names(0)
    pages = [i for i in range(len(series.commits)) if series.added(i, series.docs)]
    assert len(pages) > 4


def test_nothing_of_this_repository_is_in_it(series: Series) -> None:
    diff = git(series.root, "diff", "main", "series")
    lines = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(lines) > 5000
    assert [line for line in lines if FOREIGN.search(line)] == []
    bodies = git(series.root, "log", "--format=%B", "main..series")
    assert [line for line in bodies.splitlines() if FOREIGN.search(line)] == []


def test_no_test_is_skipped_by_release(series: Series) -> None:
    diff = git(series.root, "diff", "main", "series")
    assert "skipTest" not in diff


def test_every_file_is_registered_as_sglangs_runner_wants_it(
    series: Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = series.root / "python/sglang" / REGISTRY
    spec = importlib.util.spec_from_file_location("ci_register_of_sglang", place)
    assert spec and spec.loader
    registry = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, registry)
    spec.loader.exec_module(registry)
    written = [series.write(i, tmp_path) for i in range(len(series.commits))]
    paths = sorted({p for w in written for p in w if p.startswith("test/registered")})
    monkeypatch.chdir(tmp_path)
    assert len(registry.collect_tests(paths)) == len(paths) > 10


@pytest.mark.parametrize("tool", ["ruff", "ruff format", "isort", "codespell"])
def test_the_hooks_of_sglang_pass_on_each_commit(
    series: Series, tmp_path: Path, tool: str
) -> None:
    program, *_ = tool.split()
    beside = Path(sys.executable).parent / program
    if not beside.is_file() and os.environ.get("CI") != "true":
        pytest.skip(f"{program} is not installed: see requirements/check.txt")
    for index in range(len(series.commits)):
        files = series.write(index, folder := tmp_path / str(index))
        python = [path for path in files if path.endswith(".py")]
        assert python
        commands = {
            "ruff": [*RUFF, *python],
            "ruff format": ["format", "-q", "--isolated", "--check", *python],
            "isort": ["-q", "--check", "--profile=black", "-p", "sglang", *python],
            "codespell": files,
        }
        done = subprocess.run(
            [beside, *commands[tool]],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (index, done.stdout + done.stderr)
