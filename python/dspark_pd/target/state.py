"""What was done to a target, kept inside it so that it can always be undone.

``sglang/.dspark_pd/`` holds

- ``record.json``  the applied set: per file the sha256 before and after;
- ``journal.json`` the same for a change that is under way. It is written before the
  first file is touched and removed after the record, so a killed run is recognised;
- ``originals/<sha256>`` the replaced files, named by content;
- ``.gitignore``   so that a checkout stays clean.

The folder's name is no Python identifier and holds no ``.py`` file: neither imports nor
packaging tools pick it up.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from dspark_pd.messages.errors import refuse
from dspark_pd.target import fsops

FOLDER: Final = ".dspark_pd"
SCHEMA: Final = 1


@dataclass(frozen=True)
class Entry:
    """One file that the set changes or adds.

    ``before`` is the sha256 of the original, None for a file that we add; ``ours`` are
    the contents that this tool wrote or was about to write. ``link`` is the text of the
    symbolic link that stood there, ``mtime_ns`` the time of the original.
    """

    before: str | None
    ours: tuple[str, ...]
    hunks: tuple[str, ...] = ()
    link: str | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True)
class Ledger:
    """The record or, when a run was killed, its journal."""

    release: str | None = None
    components: tuple[str, ...] = ()
    set_version: str | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    assumed_over: str | None = None
    """What could be read of the release when the user assumed ``release``."""
    unfinished: str | None = None
    """The verb of a run that did not come to its end."""

    def as_json(self) -> bytes:
        document = {"schema": SCHEMA, **asdict(self)}
        if self.assumed_over is None:
            del document["assumed_over"]
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


class StateFolder:
    """Reads and names the files of ``.dspark_pd``; writing is the transaction's."""

    def __init__(self, root: Path) -> None:
        self.path = root / FOLDER
        self.record = self.path / "record.json"
        self.journal = self.path / "journal.json"
        self.originals = self.path / "originals"
        self.ignore = self.path / ".gitignore"

    def original_path(self, sha256: str) -> Path:
        return self.originals / sha256

    def load(self) -> Ledger:
        """Return what is recorded; an empty ledger for an untouched target.

        The journal wins: it names everything that the record names and more.
        """
        for path in (self.journal, self.record):
            data = fsops.read_or_none(path)
            if data is not None:
                return _parse(path, data)
        return Ledger()

    def original(self, path: str, entry: Entry, release: str | None) -> bytes:
        """Return the kept original of ``path``; refuse with E403 if it is damaged."""
        assert entry.before is not None
        data = fsops.read_or_none(self.original_path(entry.before))
        found = "no such file" if data is None else fsops.digest(data)
        if data is None or found != entry.before:
            fields = {"file": path, "wanted": entry.before, "value": found}
            refuse("E403", version=release, **fields)
        return data


def _parse(path: Path, data: bytes) -> Ledger:
    try:
        document: dict[str, Any] = json.loads(data)
        schema = document.pop("schema")
        if schema != SCHEMA:
            _refuse_record(path, f"schema {schema}")
        entries = {
            name: Entry(
                **{**item, "ours": tuple(item["ours"]), "hunks": tuple(item["hunks"])}
            )
            for name, item in document.pop("entries").items()
        }
        for name in ("components", "folders"):
            document[name] = tuple(document[name])
        return Ledger(entries=entries, **document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse_record(path, f"{type(error).__name__}: {error}")


def _refuse_record(path: Path, value: str) -> NoReturn:
    refuse("E404", path=path, folder=path.parent, schema=SCHEMA, value=value)
