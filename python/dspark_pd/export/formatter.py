"""Upstream's formatter, as the checkout at hand asks for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from packaging.version import Version

from dspark_pd.export.checkout import Checkout
from dspark_pd.messages.errors import refuse

_TIMEOUT_S: Final = 60
_HOOKS_FILE: Final = ".pre-commit-config.yaml"
_PINS_FILE: Final = "requirements/check.txt"
_LAST_WITH_BLACK: Final = Version("0.5.18")
_ISORT: Final = (
    'lint.isort.known-first-party=["sglang"]',
    "lint.isort.split-on-trailing-comma=false",
)


@dataclass(frozen=True)
class Formatter:
    """``name`` is ``black`` or ``ruff``; it reads its settings from the checkout."""

    name: str
    program: str
    sorter: str
    root: Path

    def format(self, path: str, source: bytes) -> bytes:
        """Return ``source`` formatted; refuse with F505 if the formatter fails."""
        command = [self.program, "-q"]
        if self.name == "ruff":
            command = [self.program, "format", "-q"]
        return self._run(self.name, [*command, "--stdin-filename", path, "-"], source)

    def sort(self, path: str, source: bytes) -> bytes:
        """Return ``source`` with the imports that it uses, in isort's order."""
        command = [self.sorter, "check", "-q", "--isolated", "--select", "I,F401"]
        command += ["--fix", "--exit-zero"]
        for setting in _ISORT:
            command += ["--config", setting]
        return self._run("ruff", [*command, "--stdin-filename", path, "-"], source)

    def _run(self, name: str, command: list[str], source: bytes) -> bytes:
        done = subprocess.run(
            command,
            input=source,
            capture_output=True,
            cwd=self.root,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            _refuse(name, done.stderr.decode(errors="replace").strip()[-300:])
        return done.stdout

    def settle(self, path: str, original: bytes | None, result: bytes) -> bytes:
        """Return ``result`` so that the formatter has nothing to say about our lines.

        A file that upstream itself left unformatted is not reformatted by us.
        """
        if not path.endswith(".py"):
            return result
        if original is not None and self.format(path, original) != original:
            return result
        if original is None:
            result = self.sort(path, result)
        return self.format(path, result)


def formatter_for(checkout: Checkout, release: Version, repository: Path) -> Formatter:
    """Return the formatter of the checkout's hooks; without hooks that of its release.

    ``repository`` is the clone of this set, which pins the formatters.
    """
    hooks = (checkout.read(_HOOKS_FILE) or b"").decode(errors="replace")
    if "id: ruff-format" in hooks:
        name = "ruff"
    elif "id: black" in hooks:
        name = "black"
    else:
        name = "black" if release <= _LAST_WITH_BLACK else "ruff"
    program = _program(name, repository)
    sorter = program if name == "ruff" else _program("ruff", repository)
    return Formatter(name, program, sorter, checkout.root)


def _program(name: str, repository: Path) -> str:
    beside = Path(sys.executable).parent / name
    program = str(beside) if beside.is_file() else shutil.which(name)
    if program is None:
        _refuse(name, "not found", _pinned(name, repository))
    return program


def _pinned(name: str, repository: Path) -> str:
    """Return the requirement with which the set's own tests run the formatter."""
    pins = repository / _PINS_FILE
    lines = pins.read_text(encoding="utf-8").splitlines() if pins.is_file() else []
    found = (line for line in lines if line.startswith(f"{name}=="))
    return next(found, name)


def _refuse(name: str, detail: str, pinned: str | None = None) -> NoReturn:
    refuse(
        "F505",
        program=name,
        beside=Path(sys.executable).parent,
        detail=detail,
        cause=f"this release of SGLang is formatted with {name}",
        hint=f"pip install {pinned or name}",
    )
