"""pip changes a real SGLang under the set: every verb says so and repairs it."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import release_wheels
from dspark_pd.cli import main
from dspark_pd.patchset.patch_set import load_patch_set
from fake_sglang import snapshot

pytestmark = pytest.mark.release

OLD, NEW = "0.5.22", "0.5.23"
TIMEOUT_S = 120


def small_wheel(release: str, folder: Path) -> Path:
    """A wheel of the real files that the set looks at: pip takes a second for it."""
    hunks = load_patch_set().hunks
    asked = {
        argument.partition("::")[0] for _, argument in (h.drop_when for h in hunks)
    }
    names = {hunk.target for hunk in hunks} | asked | {"__init__.py"}
    wheel = folder / f"sglang-{release}-py3-none-any.whl"
    info = f"sglang-{release}.dist-info"
    with zipfile.ZipFile(release_wheels.wheel(release)) as whole:
        record = csv.reader(io.TextIOWrapper(whole.open(f"{info}/RECORD")))
        rows = [row for row in record if row[0].removeprefix("sglang/") in names]
        with zipfile.ZipFile(wheel, "w") as small:
            for path in [row[0] for row in rows] + [f"{info}/METADATA"]:
                small.writestr(path, whole.read(path))
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            small.writestr(f"{info}/WHEEL", tag)
            lines = [*map(",".join, rows), f"{info}/METADATA,,", f"{info}/WHEEL,,"]
            small.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]))
    return wheel


@dataclass
class Environment:
    """A virtual environment, pip, and our verbs on it."""

    root: Path
    wheels: dict[str, Path]
    capsys: pytest.CaptureFixture[str]

    @property
    def site(self) -> Path:
        (found,) = self.root.glob("lib/python3*/site-packages")
        return found

    def pip(self, *words: object) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.root / "bin/python"]
        subprocess.run(
            [*map(str, command), *map(str, words), "-q"],
            check=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        )

    def install(self, release: str, *words: str) -> None:
        given = ("--no-deps", "--no-index", "--no-compile", *words)
        self.pip("install", *given, self.wheels[release])

    def files(self) -> dict[str, object]:
        """Return SGLang's files with our lines and modules, without the record."""
        return {k: v for k, v in snapshot(self.site).items() if ".dspark_pd" not in k}

    def run(self, verb: str) -> tuple[int, list[str], dict[str, Any]]:
        self.capsys.readouterr()
        code = main([verb, "--target", str(self.root), "--json"])
        document = json.loads(self.capsys.readouterr().out)
        return code, document["notes"], document


@pytest.fixture
def environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Environment:
    venv.create(tmp_path / "venv")
    wheels = {release: small_wheel(release, tmp_path) for release in (OLD, NEW)}
    return Environment(tmp_path / "venv", wheels, capsys)


def test_what_pip_does_under_the_set_is_told_and_repaired(
    environment: Environment, tmp_path: Path
) -> None:
    released = {}
    for release in (NEW, OLD):
        environment.install(release)
        released[release] = environment.files()

    def told(happened: str, repair: str) -> None:
        """Both the verb that reads and the one that repairs say what happened."""
        code, notes, _ = environment.run("status")
        assert code == 1 and notes[0].startswith(f"{happened}; dspark-pd apply"), notes
        code, notes, _ = environment.run(repair)
        assert code == 0 and notes[0] == happened, notes
        code, notes, document = environment.run("status")
        assert code == (0 if repair == "apply" else 1) and happened not in str(notes)
        assert not document["data"]["updated"]

    assert environment.run("apply")[0] == 0
    environment.install(NEW)
    told(f"SGLang went from {OLD} to {NEW} under the applied set", "apply")
    applied = environment.files()
    environment.install(OLD)
    told(f"SGLang went from {NEW} to {OLD} under the applied set", "revert")
    assert environment.files() == released[OLD]
    environment.install(NEW)
    cached = shutil.copytree(environment.site, tmp_path / "cache")
    assert environment.run("apply")[0] == 0
    again = f"SGLang {NEW} was installed again or restored over the applied set: "
    changed = sum(applied[file] != was for file, was in released[NEW].items())
    again += f"{changed} changed files as released"
    environment.install(NEW, "--force-reinstall")
    told(again, "apply")
    assert environment.files() == applied
    shutil.copytree(cached, environment.site, dirs_exist_ok=True)
    told(again, "revert")
    assert environment.files() == released[NEW]
    assert environment.run("apply")[0] == 0
    environment.pip("uninstall", "-y", "sglang")
    for verb in ("status", "apply"):
        code, _, document = environment.run(verb)
        assert (code, document["errors"][0]["code"]) == (3, "T107")
    code, notes, _ = environment.run("revert")
    assert (code, notes[0]) == (
        0,
        f"SGLang {NEW} was uninstalled under the applied set",
    )
    assert not (environment.site / "sglang").exists()
