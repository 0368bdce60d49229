"""Which release a folder ``sglang`` holds, from the files around it."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

_TIMEOUT_S: Final = 10
_ASSIGNED = re.compile(r"^(?:__version__ = )?(?:version|__version__) = '([^']+)'", re.M)


def read_release(
    root: Path, installed_as: Path | None = None
) -> tuple[Version | None, str]:
    """Return the release and where it was read.

    The distribution's metadata comes first: it is what an installer replaces. A
    checkout has none beside it and is asked for its generated module, then for its tag.
    Last comes ``installed_as``, the metadata of an editable install of the checkout: it
    is of the day of the install.
    """
    for source, read in (
        ("dist-info", partial(_from_metadata, dist_info(root))),
        ("_version.py", partial(_from_generated_module, root)),
        ("git tag", partial(_from_tag, root)),
        ("editable install", partial(_from_metadata, installed_as)),
    ):
        try:
            return Version(read() or ""), source
        except InvalidVersion:
            continue
    return None, "not recorded"


def dist_info(root: Path) -> Path | None:
    """Return the ``sglang-<release>.dist-info`` beside the folder, if there is one."""
    found = sorted(root.parent.glob("sglang-*.dist-info"))
    return found[-1] if found else None


def git(root: Path, *arguments: str) -> str | None:
    """Return what git says of the checkout around ``root``; None where it does not."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _from_metadata(folder: Path | None) -> str | None:
    if folder is None:
        return None
    return folder.name.removeprefix("sglang-").removesuffix(".dist-info")


def _from_generated_module(root: Path) -> str | None:
    path = root / "_version.py"
    if not path.is_file():
        return None
    found = _ASSIGNED.search(path.read_text(encoding="utf-8", errors="replace"))
    return found.group(1) if found else None


def _from_tag(root: Path) -> str | None:
    """Only an exact tag counts: a commit after it is no release."""
    tag = git(root, "describe", "--tags", "--exact-match", "--match", "v[0-9]*")
    return tag and tag.removeprefix("v")
