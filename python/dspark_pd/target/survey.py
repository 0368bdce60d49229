"""Compare a target with its record: what is original, what is ours, what is neither.

Every file of the record is in one of these conditions:

- ``original``  as upstream shipped it (apply has not run, or someone restored it);
- ``ours``      as this tool wrote it;
- ``replaced``  upstream's own file of another release: an update ran over the set;
- ``missing``   gone;
- ``edited``    none of these. It is somebody's work, and the tool leaves it alone.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from dspark_pd.messages.errors import Problem
from dspark_pd.patchset.patch_set import default_overlay
from dspark_pd.target import fsops
from dspark_pd.target.provenance import Provenance
from dspark_pd.target.state import Entry, Ledger, StateFolder
from dspark_pd.target.target import Target

Condition = Literal["original", "ours", "replaced", "missing", "edited"]


@dataclass(frozen=True)
class Seen:
    """One recorded file as it is now."""

    path: str
    entry: Entry
    current: bytes | None
    condition: Condition


class Survey:
    """Reads of one target; nothing here writes."""

    def __init__(
        self,
        target: Target,
        discard_edits: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.target = target
        self._discard_edits = discard_edits
        self.state = StateFolder(target.root)
        self.ledger: Ledger = ledger or self.state.load()
        self._provenance = Provenance(target.root)
        self._originals: dict[str, bytes | None] = {}

    @property
    def updated(self) -> bool:
        """Whether SGLang's release changed after the set was applied."""
        recorded = self.ledger.release
        return recorded is not None and recorded != str(self.target.release)

    @cached_property
    def seen(self) -> dict[str, Seen]:
        return {
            path: self._look(path, entry) for path, entry in self.ledger.entries.items()
        }

    def path(self, path: str) -> Path:
        return self.target.root / path

    def current(self, path: str) -> bytes | None:
        known = self.seen.get(path)
        return known.current if known else fsops.read_or_none(self.path(path))

    def applied(self, path: str) -> bytes | None:
        """Return the content of ``path`` if it is what this tool wrote there."""
        known = self.seen.get(path)
        return known.current if known and known.condition == "ours" else None

    def original(self, path: str) -> bytes | None:
        """Return upstream's content of ``path``, None where upstream has no file."""
        if path not in self._originals:
            self._originals[path] = self._find_original(path)
        return self._originals[path]

    def restored(self, condition: Condition) -> int:
        """Count the files of upstream that the record says are ours and are not."""
        found = (seen for seen in self.seen.values() if seen.entry.before)
        return sum(seen.condition == condition for seen in found)

    def settled(self) -> dict[str, Entry]:
        """Return the entries that still speak of this release's files."""
        return {
            path: seen.entry
            for path, seen in self.seen.items()
            if seen.condition != "replaced"
            and not (self.updated and seen.condition in ("missing", "edited"))
        }

    def problems(self) -> list[Problem]:
        """Return E401 or E405 for each file that the record cannot explain."""
        found: list[Problem] = []
        if self._discard_edits:
            return found
        for path, seen in self.seen.items():
            if seen.condition == "edited" and self.updated:
                found.append(self._left_over(path))
            elif seen.condition == "edited":
                found.append(Problem("E401", {"file": path, "see": self._diff(seen)}))
            elif seen.condition == "ours" and self.updated and seen.entry.before:
                original = self.original(path)
                if original and self._provenance.vouches(path, original) is False:
                    found.append(self._left_over(path))
        return found

    def foreign_originals(self, paths: list[str]) -> list[str]:
        """Return those of ``paths`` whose original is not as upstream released it."""
        return [
            path
            for path in paths
            if (data := self.original(path)) is not None
            and self._provenance.vouches(path, data) is False
        ]

    def _look(self, path: str, entry: Entry) -> Seen:
        data = fsops.read_or_none(self.path(path))
        return Seen(path, entry, data, self._condition(path, entry, data))

    def _condition(self, path: str, entry: Entry, data: bytes | None) -> Condition:
        if data is None:
            return "missing" if entry.before else "original"
        found = fsops.digest(data)
        if found == entry.before:
            return "original"
        if found in entry.ours:
            return "ours"
        return "replaced" if self._provenance.vouches(path, data) else "edited"

    def _find_original(self, path: str) -> bytes | None:
        known = self.seen.get(path)
        if known is None:
            return fsops.read_or_none(self.path(path))
        if known.condition in ("original", "replaced"):
            return known.current
        if known.condition == "edited" and self.updated:
            # The kept original is another release's: nothing better is known.
            return known.current
        if known.entry.before is None or (
            known.condition == "missing" and self.updated
        ):
            return None
        return self.state.original(path, known.entry, self.ledger.release)

    def _diff(self, seen: Seen) -> str:
        """Return a command that shows what was edited."""
        if seen.entry.before is None:
            old, shows = default_overlay() / seen.path, "the edit"
        else:
            old = self.state.original_path(seen.entry.before)
            shows = "the edit and our lines"
        names = (shlex.quote(str(path)) for path in (old, self.path(seen.path)))
        return f"diff -u {' '.join(names)} ({shows})"

    def _left_over(self, path: str) -> Problem:
        new = self.target.release
        if self.target.source == "dist-info":
            hint = f"pip install --force-reinstall --no-deps sglang=={new}"
        else:
            hint = f"git checkout -- {path} (in {self.target.root})"
        old = self.ledger.release
        return Problem("E405", {"file": path, "old": old, "new": new, "hint": hint})
