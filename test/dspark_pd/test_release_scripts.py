"""The scripts that take in a release and keep generated pages fresh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fake_sglang

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the real tool and scripts and the fake patch set."""
    root = tmp_path / "clone"
    without = shutil.ignore_patterns("__pycache__", "bed")
    package = REPOSITORY / "python" / "dspark_pd"
    shutil.copytree(package, root / "python" / "dspark_pd", ignore=without)
    (root / "scripts").mkdir()
    for name in ("widen_releases.py", "size_limits.py"):
        shutil.copy(REPOSITORY / "scripts" / name, root / "scripts")
    fake_sglang.write_overlay(root / "python" / "sglang")
    return root


def script(root: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / name), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_new_release_widens_the_ranges_that_reached_the_newest(clone: Path) -> None:
    overlay = clone / "python" / "sglang"
    for path in overlay.rglob("*.yml"):
        path.write_text(path.read_text().replace("<1.3.0", "<1.2.1"))
    done = script(clone, "widen_releases.py", "1.2.1")
    assert done.returncode == 0, done.stderr
    assert '- "1.2.1"\n' in (overlay / "releases.yml").read_text()
    texts = {path.name: path.read_text() for path in overlay.rglob("*.yml")}
    for name in ("overlay.yml", "relay.py.hunks.yml", "devices.py.hunks.yml"):
        assert "<1.2.2" in texts[name], name
        assert "<1.2.1" not in texts[name], name
    assert ">=1.0.0,<1.1.0" in texts["relay.py.hunks.yml"], "an older variant moved"
    assert "<1.2.2" not in texts["start.py.hunks.yml"], "an ended range moved"


def test_what_no_release_needs_is_named(clone: Path) -> None:
    done = script(clone, "widen_releases.py", "--droppable")
    assert done.stdout == (
        "start.check-settings: last needed on 1.1.0, drop it with that release\n"
    )


def test_reviews_are_listed_once_with_their_hunks(clone: Path) -> None:
    review = "https://github.com/sgl-project/sglang/pull/1"
    done = script(clone, "widen_releases.py", "--reviews")
    assert done.stdout == (
        f"review {review}\n    could drop: devices.accept-named, relay.keep-input\n"
    )


def test_an_older_release_is_refused(clone: Path) -> None:
    done = script(clone, "widen_releases.py", "1.1.0")
    assert done.returncode == 1
    assert "1.1.0 is not newer than 1.2.0" in done.stderr


def test_a_long_function_is_found(clone: Path) -> None:
    assert script(clone, "size_limits.py").returncode == 0
    body = "    x = 1\n" * 80
    (clone / "python/dspark_pd/long.py").write_text(f"def f():\n{body}")
    done = script(clone, "size_limits.py")
    assert done.returncode == 1
    assert "python/dspark_pd/long.py:1 f: 81 lines" in done.stderr


def test_generated_pages_are_fresh() -> None:
    done = script(REPOSITORY, "generate_docs.py", "--check")
    assert done.returncode == 0, done.stdout
