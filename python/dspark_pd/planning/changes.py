"""From a plan and a survey to the transaction that makes them agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import dspark_pd
from dspark_pd.planning.plan import PlannedFile
from dspark_pd.target import fsops
from dspark_pd.target.state import Entry, Ledger
from dspark_pd.target.survey import Survey
from dspark_pd.target.transaction import Change, Transaction


def build(
    survey: Survey,
    verb: str,
    components: Iterable[str],
    files: dict[str, PlannedFile],
) -> Transaction:
    """Return the transaction after which the target holds exactly ``files`` of ours."""
    settled = survey.settled()
    entries = {
        path: _entry(survey, file, settled.get(path)) for path, file in files.items()
    }
    new = Ledger(
        release=str(survey.target.release),
        components=tuple(components),
        set_version=dspark_pd.__version__,
        entries=entries,
        folders=_folders(survey, files),
        assumed_over=survey.target.assumed_over,
    )
    if not entries:
        new = Ledger()
    return Transaction(
        root=survey.target.root,
        verb=verb,
        old=replace(survey.ledger, entries=settled),
        new=new,
        changes=tuple(_changes(survey, settled, files)),
        originals={
            fsops.digest(file.original): file.original
            for file in files.values()
            if file.original is not None
        },
    )


def is_needed(transaction: Transaction, survey: Survey) -> bool:
    """Whether anything on the disk would differ after the transaction."""
    return bool(transaction.changes) or transaction.new != survey.ledger


def _entry(survey: Survey, file: PlannedFile, earlier: Entry | None) -> Entry:
    if file.original is None:
        return Entry(before=None, ours=(fsops.digest(file.desired),))
    before = fsops.digest(file.original)
    seen = survey.seen.get(file.path)
    known = earlier if earlier and earlier.before == before else None
    if known and seen and seen.condition != "original":
        link, mtime_ns = known.link, known.mtime_ns
    else:
        link, mtime_ns = _appearance(survey.path(file.path))
    return Entry(
        before=before,
        ours=(fsops.digest(file.desired),),
        hunks=file.hunks,
        link=link,
        mtime_ns=mtime_ns,
    )


def _appearance(path: Path) -> tuple[str | None, int | None]:
    """Return the text of the link at ``path``, if it is one, and the file's time."""
    link = str(path.readlink()) if path.is_symlink() else None
    return link, path.stat().st_mtime_ns


def _changes(
    survey: Survey, settled: dict[str, Entry], files: dict[str, PlannedFile]
) -> Iterable[Change]:
    for path in sorted({*settled, *files}):
        current = survey.current(path)
        if path in files:
            if current != files[path].desired:
                yield Change(path, current, files[path].desired)
        elif current != (original := survey.original(path)):
            entry = settled[path]
            yield Change(path, current, original, entry.link, entry.mtime_ns)


def _folders(survey: Survey, files: dict[str, PlannedFile]) -> tuple[str, ...]:
    """Return the folders that exist for our modules alone."""
    earlier = set(survey.ledger.folders)
    folders: set[str] = set()
    for path, file in files.items():
        if file.original is None:
            for parent in PurePosixPath(path).parents[:-1]:
                shown = parent.as_posix()
                if shown in earlier or not survey.path(shown).is_dir():
                    folders.add(shown)
    return tuple(sorted(folders))
