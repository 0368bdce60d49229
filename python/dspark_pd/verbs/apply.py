"""``apply``: put the set, or components of it, on a target."""

from __future__ import annotations

from argparse import Namespace

from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import about
from dspark_pd.messages.result import Result, count
from dspark_pd.planning import changes
from dspark_pd.planning.plan import Plan, PlannedFile
from dspark_pd.target.lock import locked
from dspark_pd.target.survey import Survey
from dspark_pd.target.transaction import remove_leftovers
from dspark_pd.verbs.context import RESTART, Context, open_context


def run(options: Namespace) -> Result:
    context = open_context(options)
    with about(context.target):
        return _locked_apply(context, options)


def _locked_apply(context: Context, options: Namespace) -> Result:
    if options.dry_run:
        return _apply(context, options)
    with locked(context.target.root):
        # What was seen before may have been another writer's.
        return _apply(Context(context.patch_set, Survey(context.target)), options)


def _apply(context: Context, options: Namespace) -> Result:
    survey = context.survey
    components, plan = context.asked(options)
    transaction = changes.build(survey, "apply", components, plan.files)
    needed = changes.is_needed(transaction, survey)
    if needed and not options.dry_run:
        remove_leftovers(context.target.root, survey.ledger.entries)
        transaction.run()
    result = _describe(plan, context, options.dry_run, needed)
    result.data["components"] = list(components)
    result.notes = context.notes(options, plan, components)
    if transaction.changes and not options.dry_run:
        result.notes.append(RESTART)
    return result


def _describe(plan: Plan, context: Context, dry_run: bool, needed: bool) -> Result:
    files = sorted(plan.files.values(), key=lambda file: (file.kind, file.path))
    result = Result(target=context.target)
    described = [describe_file(file) for file in files]
    result.lines, result.details = (described, []) if needed else ([], described)
    pending = needed and dry_run
    if pending:
        verb = "would apply"
        result.exit_code = exit_codes.DIFFERS
    else:
        verb = "applied" if needed else "already applied:"
    result.lines.append(f"{verb} {summary(files)}")
    result.data = {
        "changed": needed and not dry_run,
        "pending": pending,
        "files": [file_data(file) for file in files],
    }
    return result


def describe_file(file: PlannedFile) -> str:
    if file.kind == "add":
        return f"add   {file.path}  {count(file.added_lines, 'line')}"
    hunks, lines = count(len(file.hunks), "hunk"), count(file.added_lines, "line")
    return f"hunk  {file.path}  {hunks}  +{lines}"


def summary(files: list[PlannedFile]) -> str:
    modules = count(sum(file.kind == "add" for file in files), "module")
    hunked = [file for file in files if file.kind == "hunk"]
    hunks = count(sum(len(file.hunks) for file in hunked), "hunk")
    lines = count(sum(file.added_lines for file in hunked), "line")
    return f"{modules}, {hunks} in {count(len(hunked), 'file')}, +{lines}"


def file_data(file: PlannedFile) -> dict[str, object]:
    return {
        "path": file.path,
        "kind": file.kind,
        "hunks": list(file.hunks),
        "added_lines": file.added_lines,
    }
