"""Change a target so that a kill at any point leaves something repairable.

1. *Stage.* Originals, then the journal, then every new file beside the one it replaces,
   and the record beside the old one. A failure here is cleaned up: nothing changed.
2. *Publish.* Renames and removals only; they need no space. A failure here is undone.
3. *Finish.* The record is renamed, the journal removed, unneeded originals dropped.

Between the journal and the record the next run finds the journal: it names for every
file the original and all contents that may be there, so both verbs can carry on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dspark_pd.messages.errors import HALF_DONE, UNCHANGED, Refused, from_os_error
from dspark_pd.target import fsops
from dspark_pd.target.state import Entry, Ledger, StateFolder


@dataclass(frozen=True)
class Change:
    """One file before and after; None stands for no file.

    ``link`` and ``mtime_ns`` are set when an original comes back.
    """

    path: str
    current: bytes | None
    desired: bytes | None
    link: str | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True)
class Transaction:
    """All of one run: the changes and the ledger before and after."""

    root: Path
    verb: str
    old: Ledger
    new: Ledger
    changes: tuple[Change, ...]
    originals: dict[str, bytes]

    def run(self) -> None:
        """Carry the changes out, or raise ``Refused`` with a file system problem."""
        try:
            self._stage()
        except OSError as error:
            self._clean_up()
            raise Refused([from_os_error(error, UNCHANGED)]) from error
        done: list[Change] = []
        try:
            for change in self.changes:
                done.append(change)
                self._publish(change)
            self._finish()
        except OSError as error:
            left = self._undo(done)
            raise Refused([from_os_error(error, left)]) from error

    @property
    def _state(self) -> StateFolder:
        return StateFolder(self.root)

    def _journal(self) -> Ledger:
        """Return the union of both ledgers: all that a killed run may leave."""
        entries = dict(self.old.entries)
        for path, entry in self.new.entries.items():
            earlier = entries.get(path)
            ours = entry.ours + (earlier.ours if earlier else ())
            entries[path] = replace(entry, ours=tuple(dict.fromkeys(ours)))
        base = self.new if self.new.entries else self.old
        folders = tuple(sorted({*self.old.folders, *self.new.folders}))
        return replace(base, entries=entries, folders=folders, unfinished=self.verb)

    def _stage(self) -> None:
        state = self._state
        fsops.make_folder(state.path)
        fsops.make_folder(state.originals)
        _write_state(state.ignore, b"*\n")
        for sha256, data in self.originals.items():
            if fsops.read_or_none(state.original_path(sha256)) != data:
                _write_state(state.original_path(sha256), data)
        _write_state(state.journal, self._journal().as_json())
        fsops.flush_folders({state.originals, state.path})
        for folder in self.new.folders:
            fsops.make_folder(self.root / folder)
        for change in self.changes:
            if change.desired is not None:
                self._stage_file(change, change.desired)
        if self.new.entries:
            wanted = fsops.look_of_new_file(state.record)
            fsops.write_temporary(state.record, self.new.as_json(), wanted)

    def _stage_file(self, change: Change, data: bytes) -> None:
        path = self.root / change.path
        look = fsops.look if path.exists() else fsops.look_of_new_file
        wanted = look(path)
        if change.link is not None and self._still_links(path, change.link, data):
            fsops.link(path, change.link, wanted)
            return
        temporary = fsops.write_temporary(path, data, wanted)
        if change.mtime_ns is not None:
            os.utime(temporary, ns=(change.mtime_ns, change.mtime_ns))

    @staticmethod
    def _still_links(path: Path, link: str, data: bytes) -> bool:
        return fsops.read_or_none(path.parent / link) == data

    def _publish(self, change: Change) -> None:
        path = self.root / change.path
        if change.desired is None:
            fsops.remove(path)
            _remove_bytecode(path)
        else:
            _remove_bytecode(path, unchecked=True)
            os.replace(fsops.temporary_of(path), path)

    def _finish(self) -> None:
        state = self._state
        fsops.flush_folders({(self.root / c.path).parent for c in self.changes})
        self._remove_folders(set(self.old.folders) - set(self.new.folders))
        if self.new.entries:
            os.replace(fsops.temporary_of(state.record), state.record)
        else:
            fsops.remove(state.record)
        fsops.flush_folders({state.path})
        fsops.remove(state.journal)
        # The asked state holds from here on; leftovers cost only space.
        with contextlib.suppress(OSError):
            keep = {entry.before for entry in self.new.entries.values()}
            for path in state.originals.iterdir():
                if path.name not in keep:
                    fsops.remove(path)
        if not self.new.entries:
            remove_state_folder(state)

    def _remove_folders(self, folders: Iterable[str]) -> None:
        for folder in sorted(folders, reverse=True):
            fsops.remove_empty_folder(self.root / folder / "__pycache__")
            fsops.remove_empty_folder(self.root / folder)

    def _clean_up(self) -> None:
        """Take staged files away again; what fails here is harmless and overwritten."""
        with contextlib.suppress(OSError):
            for change in self.changes:
                fsops.remove(fsops.temporary_of(self.root / change.path))
            self._remove_folders(set(self.new.folders) - set(self.old.folders))
            fsops.remove(fsops.temporary_of(self._state.record))
            self._forget()

    def _forget(self) -> None:
        """Drop the journal of a run that changed nothing, unless it repairs another."""
        if self.old.unfinished is not None:
            _write_state(self._state.journal, self.old.as_json())
            return
        fsops.remove(self._state.journal)
        if not self.old.entries:
            remove_state_folder(self._state)

    def _undo(self, done: list[Change]) -> str:
        """Put back what was published; return how the target was left."""
        try:
            for change in reversed(done):
                path = self.root / change.path
                if change.current is None:
                    fsops.remove(path)
                elif fsops.read_or_none(path) != change.current:
                    self._stage_file(self._reverse(change), change.current)
                    os.replace(fsops.temporary_of(path), path)
        except OSError:
            return HALF_DONE
        self._clean_up()
        return UNCHANGED

    def _reverse(self, change: Change) -> Change:
        """Return the change back; only an original may have been a link."""
        entry = self.new.entries.get(change.path)
        if entry is None or entry.before != fsops.digest(change.current or b""):
            return Change(change.path, change.desired, change.current)
        return Change(
            change.path, change.desired, change.current, entry.link, entry.mtime_ns
        )


def _write_state(path: Path, data: bytes) -> None:
    fsops.write(path, data, fsops.look_of_new_file(path))


def remove_state_folder(state: StateFolder) -> None:
    """Remove ``.dspark_pd`` with all that this tool puts there, and nothing else."""
    with contextlib.suppress(OSError):
        for path in [*state.originals.glob("*"), *state.originals.glob(".*")]:
            fsops.remove(path)
        fsops.remove_empty_folder(state.originals)
        for path in (state.journal, state.record, state.ignore):
            fsops.remove(fsops.temporary_of(path))
            fsops.remove(path)
        fsops.remove_empty_folder(state.path)


def remove_leftovers(root: Path, entries: dict[str, Entry]) -> None:
    """Remove new content that a killed run staged and never renamed."""
    for path in entries:
        fsops.remove(fsops.temporary_of(root / path))


def _remove_bytecode(path: Path, unchecked: bool = False) -> None:
    """Remove the compiled forms of a module, or those that Python never compares with it.

    A module that is gone must not keep its folder. An unchecked-hash form (PEP 552, as in
    images compiled that way) would be loaded in place of the new text for ever.
    """
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        if not unchecked or _is_unchecked(compiled):
            fsops.remove(compiled)


def _is_unchecked(compiled: Path) -> bool:
    """Whether the flags, bytes 4 to 7, say hash-based (1) and not checked (no 2)."""
    with compiled.open("rb") as file:
        return int.from_bytes(file.read(8)[4:], "little") == 1
