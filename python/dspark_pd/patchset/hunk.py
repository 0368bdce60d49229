"""One hunk: an ast-grep rule with a record of why it exists and when it goes away.

A hunk file stands where the upstream file would stand and holds one YAML document per
hunk. Every field is checked when it is read: a wrong record is refused, never skipped,
because a hunk that silently does nothing is what this tool exists to prevent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from dspark_pd.messages.errors import Problem, Refused
from dspark_pd.patchset.fields import wrong_fields
from dspark_pd.patchset.lists import ReleaseRange
from dspark_pd.patchset.yaml_documents import Document, load_documents

HUNK_SUFFIX: Final = ".hunks.yml"


@dataclass(frozen=True)
class Hunk:
    """A checked hunk document.

    ``target`` is the upstream file relative to the folder ``sglang``; ``place`` is
    ``<hunk file>:<line>`` for messages.
    """

    id: str
    target: str
    place: str
    data: dict[str, Any]

    @property
    def identity(self) -> str:
        """The id without its variant: what users, docs and goldens speak of."""
        return self.id.partition("@")[0]

    @property
    def message(self) -> str:
        return str(self.data["message"])

    @property
    def note(self) -> str:
        return str(self.data["note"]).strip()

    @property
    def url(self) -> str | None:
        return self.data.get("url")

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.data["metadata"])

    @property
    def component(self) -> str:
        return str(self.metadata["component"])

    @property
    def expect(self) -> int:
        return int(self.metadata.get("expect", 1))

    @property
    def drop_when(self) -> tuple[str, str]:
        """The condition that makes the hunk unnecessary, as (kind, argument)."""
        ((kind, argument),) = self.metadata["drop_when"].items()
        return kind, str(argument)

    @cached_property
    def releases(self) -> ReleaseRange:
        return ReleaseRange(str(self.metadata["releases"]))

    def serves(self, release: Version) -> bool:
        return self.releases.serves(release)

    def as_rule(self) -> str:
        """Return what ast-grep needs of the document, as one YAML document.

        JSON is a subset of YAML.
        """
        keys = ("id", "language", "severity", "rule", "fix")
        return json.dumps({key: self.data[key] for key in keys})


def load_hunk_file(path: Path, overlay: Path, components: Iterable[str]) -> list[Hunk]:
    """Return the hunks of one file of ``overlay``; refuse with S201 or S202."""
    shown = path.relative_to(overlay).as_posix()
    target = shown.removesuffix(HUNK_SUFFIX)
    hunks, problems = [], []
    for document in load_documents(path, shown):
        found = _problems_of(document, shown, components)
        problems += found
        if not found:
            place = f"{shown}:{document.line}"
            hunks.append(Hunk(document.data["id"], target, place, document.data))
    if problems:
        raise Refused(problems)
    return hunks


def _problems_of(
    document: Document, shown: str, components: Iterable[str]
) -> list[Problem]:
    data = document.data
    hunk_id = data.get("id", "a hunk") if isinstance(data, dict) else "a hunk"
    return [
        Problem(
            "S202",
            {
                "file": shown,
                "line": document.line,
                "id": hunk_id,
                "field": field,
                "wanted": wanted,
                "value": value,
            },
        )
        for field, wanted, value in wrong_fields(data, components)
    ]
