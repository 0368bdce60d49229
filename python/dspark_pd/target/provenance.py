"""Is this content upstream's own? The installer and git know, and are asked here.

Needed when a file is neither what apply wrote nor what it replaced: after ``pip install
-U sglang`` it is the new release's file and may be patched again; after a hand edit it
is somebody's work and must not be touched.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cached_property
from pathlib import Path

from dspark_pd.target.release import dist_info, git


class Provenance:
    """What is known of the files of one target."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def vouches(self, path: str, data: bytes) -> bool | None:
        """Whether ``data`` is upstream's ``path``; None when nobody can tell."""
        if self._record:
            line = f"\n{self._root.name}/{path},sha256={_record_digest(data)},"
            return line in self._record
        blob = git(self._root, "rev-parse", f"HEAD:./{path}")
        return None if blob is None else blob == _git_digest(data)

    @cached_property
    def _record(self) -> str:
        """The RECORD of an installed or unpacked wheel, each line behind a line end.

        Names of SGLang's modules need no quotes in it. A RECORD that names none of
        SGLang's files, as that of an editable install, counts as none.
        """
        folder = dist_info(self._root)
        record = folder / "RECORD" if folder else None
        if record is None or not record.is_file():
            return ""
        text = "\n" + record.read_text(encoding="utf-8").replace("\r\n", "\n")
        return text if f"\n{self._root.name}/" in text else ""


def _record_digest(data: bytes) -> str:
    raw = hashlib.sha256(data).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
