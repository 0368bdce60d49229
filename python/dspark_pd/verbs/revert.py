"""``revert``: take the set, or components of it, off a target, byte for byte."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path, PurePosixPath

from dspark_pd.messages.errors import Problem, Refused, about, from_os_error
from dspark_pd.messages.result import Result, count
from dspark_pd.patchset.lists import in_order, load_components, with_needs, without
from dspark_pd.patchset.patch_set import PatchSet, default_overlay, load_patch_set
from dspark_pd.planning import changes
from dspark_pd.planning.matching import names_our_module, unrecorded
from dspark_pd.planning.plan import PlannedFile
from dspark_pd.target import fsops
from dspark_pd.target.lock import locked
from dspark_pd.target.state import Entry, Ledger, StateFolder
from dspark_pd.target.survey import Seen, Survey
from dspark_pd.target.target import UNINSTALLED, find_target
from dspark_pd.target.transaction import remove_leftovers, remove_state_folder
from dspark_pd.verbs.context import (
    RESTART,
    Context,
    named_components,
    refuse_any,
    what_happened,
)

EDITED_SUFFIX = ".edited"


def run(options: Namespace) -> Result:
    """Revert needs no known release unless a part stays applied."""
    target = find_target(options.target, leftovers=True)
    with about(target), locked(target.root):
        survey = Survey(target, options.discard_edits)
        happened = what_happened(survey)
        refuse_any(survey.problems())
        if not survey.ledger.entries:
            patch_set = load_patch_set(options.overlay)
            refuse_any(_unrecorded(survey, patch_set))
            left = _modules(survey, patch_set)
            survey = Survey(target, options.discard_edits, left)
        edited = [s for s in survey.seen.values() if s.condition == "edited"]
        kept = [] if survey.updated else _keep_edits(survey, edited)
        result = _revert(survey, options)
        if target.source == UNINSTALLED:
            _remove_empty_folders(target.root)
    result.notes += [happened] if happened else []
    result.notes += [f"the edited file is kept as {path}" for path in kept]
    if survey.updated:
        # Its original belongs to the release before; putting it back would mix two.
        result.notes += [f"{seen.path} was left as it is" for seen in edited]
    if result.data["restored"] or result.data["removed"]:
        result.notes.append(RESTART)
    result.data["kept_edits"] = kept
    return result


def _remove_empty_folders(root: Path) -> None:
    """Else ``import sglang`` would go on to find a package without a file."""
    folders = [path for path in root.rglob("*") if path.is_dir()]
    for folder in [*sorted(folders, reverse=True), root]:
        fsops.remove_empty_folder(folder)


def _unrecorded(survey: Survey, patch_set: PatchSet) -> list[Problem]:
    """Return E402 if files hold our lines while nothing is recorded."""
    ids: dict[str, list[str]] = {}
    for hunk in patch_set.hunks:
        known = ids.setdefault(hunk.target, [])
        source = survey.current(hunk.target) or b""
        if hunk.identity not in known and names_our_module(hunk, source):
            known.append(hunk.identity)
    places = {file: found for file, found in ids.items() if found}
    return [unrecorded(places)] if places else []


def _modules(survey: Survey, patch_set: PatchSet) -> Ledger:
    """Return a record of our modules that lie there without one, as after a reinstall."""
    entries, folders = {}, set()
    for module in patch_set.modules:
        data = patch_set.source(module)
        if survey.current(module.path) == data:
            entries[module.path] = Entry(None, (fsops.digest(data),))
            parents = PurePosixPath(module.path).parents[:-1]
            folders |= {parent.as_posix() for parent in parents}
    return Ledger(entries=entries, folders=tuple(sorted(folders)))


def _revert(survey: Survey, options: Namespace) -> Result:
    rest, also = _rest(survey, options)
    files = _files_of(survey, rest, options) if rest else {}
    transaction = changes.build(survey, "revert", rest, files)
    needed = changes.is_needed(transaction, survey)
    if needed:
        remove_leftovers(survey.target.root, survey.ledger.entries)
        transaction.run()
    elif not survey.ledger.entries:
        remove_state_folder(StateFolder(survey.target.root))
    restored = [c.path for c in transaction.changes if c.desired is not None]
    removed = [c.path for c in transaction.changes if c.desired is None]
    lines = [f"restore  {path}" for path in restored]
    lines += [f"remove   {path}" for path in removed]
    if needed:
        modules = count(len(removed), "module")
        lines.append(f"reverted {count(len(restored), 'file')}, removed {modules}")
    else:
        lines.append("nothing to revert")
    data = {
        "changed": needed,
        "restored": restored,
        "removed": removed,
        "components": list(rest),
    }
    notes = [
        f"{name} is reverted too, because it needs {' and '.join(needed)}"
        for name, needed in also.items()
    ]
    return Result(target=survey.target, lines=lines, data=data, notes=notes)


def _rest(
    survey: Survey, options: Namespace
) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the components that stay, and those that go with the named ones they need."""
    if not options.component:
        return (), {}
    components = load_components(options.overlay or default_overlay())
    named = named_components(options, components)
    applied = survey.ledger.components
    rest = without(components, applied, named)
    gone = set(in_order(components, applied)) - {*rest, *named}
    also = {}
    for name in in_order(components, gone):
        needs = with_needs(components, [name])
        also[name] = [other for other in named if other in needs]
    return rest, also


def _files_of(
    survey: Survey, components: tuple[str, ...], options: Namespace
) -> dict[str, PlannedFile]:
    context = Context(load_patch_set(options.overlay), Survey(survey.target))
    plan = context.plan(components)
    refuse_any(plan.problems)
    return plan.files


def _keep_edits(survey: Survey, edited: list[Seen]) -> list[str]:
    """Copy each edited file beside itself; return the names of the copies."""
    kept = []
    try:
        for seen in edited:
            if seen.current is not None:
                name = seen.path + EDITED_SUFFIX
                wanted = fsops.look(survey.path(seen.path))
                fsops.write(survey.path(name), seen.current, wanted)
                kept.append(name)
    except OSError as error:
        raise Refused([from_os_error(error)]) from error
    return kept
