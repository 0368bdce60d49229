"""The wheel holds the set as data and never a package that could shadow SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dspark_pd
from dspark_pd.patchset.patch_set import load_patch_set

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builders = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    builder = builders.WheelBuilder(str(REPOSITORY))
    (built,) = builder.build(directory=str(folder), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_only_our_package_is_importable(installed: Path) -> None:
    """And pyproject has its version."""
    names = {path.name for path in installed.iterdir()}
    info = f"sglang_dspark_pd-{dspark_pd.__version__}.dist-info"
    assert names == {"dspark_pd", info}


def test_the_whole_set_is_inside(installed: Path) -> None:
    packed = load_patch_set(installed / "dspark_pd" / "_overlay")
    cloned = load_patch_set()
    assert {hunk.id for hunk in packed.hunks} == {hunk.id for hunk in cloned.hunks}
    assert packed.modules == cloned.modules
    for module in packed.modules:
        assert packed.source(module) == cloned.source(module)


def test_the_installed_tool_uses_its_own_set(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-m", "dspark_pd", "list", "--json"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    document = json.loads(done.stdout)
    assert document["data"]["releases"]
    assert document["tool"]["version"] == dspark_pd.__version__
