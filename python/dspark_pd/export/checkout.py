"""A git checkout as a source of files and a place for commits."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NoReturn

from dspark_pd.messages.errors import refuse

_TIMEOUT_S: Final = 120
_NEW_FILE_MODE: Final = "100644"
_FALLBACK_IDENTITY: Final = ("dspark-pd", "dspark-pd@localhost")
# The patch must not depend on the git version or the user's settings.
_PATCH_OPTIONS: Final = (
    "--zero-commit",
    "--no-signature",
    "--full-index",
    "--no-color",
)


class Checkout:
    """``root`` is the top of the work tree; files are those of ``HEAD``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.head = self._git("rev-parse", "--verify", "HEAD").decode().strip()

    def read(self, path: str) -> bytes | None:
        """Return the committed content of ``path``, None if HEAD has no such file."""
        name = f"{self.head}:{path}"
        if self._run("cat-file", "-e", name).returncode != 0:
            return None
        return self._git("cat-file", "blob", name)

    def takes_branch(self, name: str) -> bool:
        """Whether git takes ``name`` for a branch."""
        return self._run("check-ref-format", "--branch", name).returncode == 0

    def has_branch(self, name: str) -> bool:
        ref = f"refs/heads/{name}"
        return self._run("show-ref", "--verify", "--quiet", ref).returncode == 0

    def commit(self, parent: str, files: dict[str, bytes], message: str) -> str:
        """Return a new commit on ``parent`` in which ``files`` have new content."""
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            self._git("read-tree", parent, extra=index)
            entries = [
                f"{self._mode(parent, path)},{self._store(data)},{path}"
                for path, data in sorted(files.items())
            ]
            for entry in entries:
                self._git("update-index", "--add", "--cacheinfo", entry, extra=index)
            tree = self._git("write-tree", extra=index).decode().strip()
        text = message.encode("utf-8")
        command = ("commit-tree", tree, "-p", parent)
        return self._git(*command, stdin=text, extra=self._identity()).decode().strip()

    def set_branch(self, name: str, commit: str) -> None:
        self._git("branch", name, commit)

    def patch(self, commit: str) -> bytes:
        """Return the commits after HEAD as one mailbox, for ``git am``."""
        span = f"{self.head}..{commit}"
        return self._git("format-patch", "--stdout", *_PATCH_OPTIONS, span)

    def _mode(self, commit: str, path: str) -> str:
        line = self._git("ls-tree", commit, "--", path).decode()
        return line.split(" ", 1)[0] if line else _NEW_FILE_MODE

    def _store(self, data: bytes) -> str:
        return self._git("hash-object", "-w", "--stdin", stdin=data).decode().strip()

    def _identity(self) -> dict[str, str]:
        """Commit as the user; a machine without an identity gets a neutral one."""
        if self._run("config", "user.email").returncode == 0:
            return {}
        name, email = _FALLBACK_IDENTITY
        return {
            f"GIT_{role}_{part}": value
            for role in ("AUTHOR", "COMMITTER")
            for part, value in (("NAME", name), ("EMAIL", email))
        }

    def _run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        extra: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["git", "-C", str(self.root), *arguments],
            input=stdin,
            capture_output=True,
            env={**os.environ, **(extra or {})},
            timeout=_TIMEOUT_S,
            check=False,
        )

    def _git(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        extra: dict[str, str] | None = None,
    ) -> bytes:
        done = self._run(*arguments, stdin=stdin, extra=extra)
        if done.returncode != 0:
            found = (
                f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}"
            )
            refuse("F503", path=self.root, detail=found, left="nothing was changed")
        return done.stdout


def open_checkout(folder: Path) -> Checkout:
    """Return the checkout that holds ``folder``; refuse with T104 if there is none."""
    if not folder.is_dir():
        refuse(
            "T104",
            what="export",
            needed="a git checkout of SGLang",
            found=f"{folder} is a file" if folder.exists() else f"no folder {folder}",
            cause="a mistyped path",
            hint="dspark-pd export DIR with the folder of the checkout",
        )
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except OSError as error:
        _refuse_program(str(error))
    root = Path(done.stdout.strip() or folder)
    if done.returncode != 0 or not (root / "python" / "sglang").is_dir():
        refuse(
            "T104",
            what="export",
            needed="a git checkout of SGLang",
            found=f"{folder}, without .git or without python/sglang",
            cause="the path names an installed SGLang or another repository",
            hint="git clone https://github.com/sgl-project/sglang",
        )
    return Checkout(root)


def _refuse_program(detail: str) -> NoReturn:
    refuse(
        "F505",
        program="git",
        beside="/usr/bin",
        detail=detail,
        cause="git is not installed",
        hint="install git",
    )
