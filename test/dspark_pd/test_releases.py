"""The real set on every release it serves.

``pytest -m release --update-goldens`` writes the golden files anew; review their diff
like code: it is the effect of the set.
"""

from __future__ import annotations

import hashlib
import json
import py_compile
from pathlib import Path

import pytest
from packaging.version import Version

import golden_text
import release_wheels
from dspark_pd.cli import main
from dspark_pd.messages import exit_codes
from dspark_pd.patchset.fields import MAX_INSERTED_LINES
from dspark_pd.patchset.patch_set import load_patch_set
from dspark_pd.planning.plan import Plan
from dspark_pd.target.survey import Survey
from dspark_pd.target.target import find_target
from dspark_pd.verbs.context import Context

pytestmark = pytest.mark.release

PATCH_SET = load_patch_set()
RELEASES = [str(release) for release in PATCH_SET.releases]
SINCE = {"robustness": "0.5.20", "agreement": "0.5.20", "handoff": "0.5.23"}
"""The first release of each component that does not serve all of them."""


@pytest.fixture(scope="module", params=RELEASES)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An unpacked wheel of one release."""
    folder = tmp_path_factory.mktemp(f"sglang-{request.param}-")
    release_wheels.unpack(request.param, folder)
    return folder


def tree_hash(folder: Path) -> str:
    """Return one hash of all files, their modes and times."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            status = path.stat()
            shown = path.relative_to(folder)
            found.update(f"{shown} {status.st_mode} {status.st_mtime_ns}\n".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _plan(site: Path) -> Plan:
    return Context(PATCH_SET, Survey(find_target(str(site)))).plan(PATCH_SET.components)


def test_the_set_goes_on_and_comes_off(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree_hash(site)
    target = ["--target", str(site)]
    assert main(["apply", *target, "--component", "all", "--json"]) == 0
    applied = json.loads(capsys.readouterr().out)
    for file in applied["data"]["files"]:
        path = site / "sglang" / file["path"]
        py_compile.compile(str(path), doraise=True)
    once = tree_hash(site)
    assert main(["apply", *target]) == 0
    assert tree_hash(site) == once
    assert main(["status", *target, "--component", "all"]) == 0
    assert main(["diff", *target, "--component", "all"]) == 0
    assert main(["revert", *target]) == 0
    assert tree_hash(site) == before


def test_each_component_goes_on_alone(site: Path) -> None:
    """Where the release is too old for it, that is said and nothing is written."""
    before = tree_hash(site)
    release = find_target(str(site)).release
    for component in PATCH_SET.components:
        named = ["--target", str(site), "--component", component]
        if release < Version(SINCE.get(component, "0")):
            assert main(["apply", *named, "-q"]) == exit_codes.TARGET, component
            assert main(["status", *named, "-q"]) == exit_codes.TARGET, component
            assert tree_hash(site) == before, component
            continue
        assert main(["apply", *named, "-q"]) == 0, component
        assert main(["status", *named, "-q"]) == 0, component
        # With what it needs, which its own revert would leave.
        assert main(["revert", "--target", str(site), "-q"]) == 0, component
        assert tree_hash(site) == before, component


def test_goldens_are_fresh(site: Path, request: pytest.FixtureRequest) -> None:
    release = str(find_target(str(site)).release)
    texts = golden_text.golden_files(_plan(site))
    update = request.config.getoption("--update-goldens")
    stale = golden_text.compare(release, texts, update)
    assert not stale, "\n".join(stale)


def test_no_added_line_is_of_spaces_alone(site: Path) -> None:
    for file in _plan(site).files.values():
        old = (file.original or b"").splitlines()
        blank = [line for line in file.desired.splitlines() if line.isspace()]
        assert len(blank) <= sum(line.isspace() for line in old), file.path


def test_hunks_stay_small(site: Path) -> None:
    for file in _plan(site).files.values():
        added: dict[str, int] = {}
        for edit in file.edits:
            lines = sum(bool(line.strip()) for line in edit.text.splitlines())
            added[edit.hunk_id] = added.get(edit.hunk_id, 0) + lines
        for hunk_id, lines in added.items():
            expect = next(h.expect for h in PATCH_SET.hunks if h.id == hunk_id)
            assert lines <= MAX_INSERTED_LINES * expect, hunk_id


def test_the_release_is_as_it_was_published(site: Path) -> None:
    """Else a golden would say something about somebody's edit."""
    context = Context(PATCH_SET, Survey(find_target(str(site))))
    touched = [path for path, file in _plan(site).files.items() if file.original]
    assert touched
    assert context.survey.foreign_originals(touched) == []


def test_the_next_release_is_tried_and_refused(
    site: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A release that nobody proved is reported, not patched, unless the user insists."""
    release = str(find_target(str(site)).release)
    info = site / f"sglang-{release}.dist-info"
    unknown = info.with_name("sglang-0.9.99.dist-info")
    before = tree_hash(site / "sglang")
    info.rename(unknown)
    try:
        target = ["--target", str(site), "--json"]
        assert main(["apply", *target]) == 3
        (error,) = json.loads(capsys.readouterr().out)["errors"]
        assert error["code"] == "T103"
        assert tree_hash(site / "sglang") == before
        assert main(["apply", *target, "--assume-version", release]) == 0
        assert main(["revert", *target]) == 0
        assert tree_hash(site / "sglang") == before
    finally:
        unknown.rename(info)
