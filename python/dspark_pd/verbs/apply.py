"""``apply``: put the set, or components of it, on a target."""

from __future__ import annotations

from argparse import Namespace

from dspark_pd.messages import exit_codes
from dspark_pd.messages.result import Result
from dspark_pd.planning import changes
from dspark_pd.planning.plan import Plan, PlannedFile
from dspark_pd.target.lock import locked
from dspark_pd.target.survey import Survey
from dspark_pd.target.transaction import remove_leftovers
from dspark_pd.verbs.context import (
    Context,
    asked_components,
    look_again,
    need_notes,
    open_context,
    refuse_any,
)


def run(options: Namespace) -> Result:
    context = open_context(options)
    if options.dry_run:
        return _apply(context, options)
    with locked(context.target.root):
        return _apply(look_again(context.patch_set, context.target), options)


def _apply(context: Context, options: Namespace) -> Result:
    survey = context.survey
    refuse_any(survey.problems())
    components = asked_components(
        options, context.patch_set.components, survey.ledger.components
    )
    plan = context.plan(components)
    unknown = context.unknown_release(plan)
    refuse_any([unknown] if unknown else plan.problems)
    idle = context.idle_component(options, plan)
    refuse_any([idle] if idle else [])
    transaction = changes.build(survey, "apply", components, plan.files)
    needed = changes.is_needed(transaction, survey)
    if needed and not options.dry_run:
        remove_leftovers(context.target.root, survey.ledger.entries)
        transaction.run()
    result = _describe(plan, context, options.dry_run, needed)
    result.data["components"] = list(components)
    result.notes += need_notes(options, context.patch_set.components, components)
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
    result.notes = notes(context.survey, plan)
    result.data = {
        "changed": needed and not dry_run,
        "pending": pending,
        "files": [file_data(file) for file in files],
    }
    return result


def describe_file(file: PlannedFile) -> str:
    if file.kind == "add":
        return f"add   {file.path}  {file.added_lines} lines"
    count = len(file.hunks)
    hunks = "1 hunk" if count == 1 else f"{count} hunks"
    return f"hunk  {file.path}  {hunks}  +{file.added_lines} lines"


def summary(files: list[PlannedFile]) -> str:
    modules = sum(file.kind == "add" for file in files)
    hunked = [file for file in files if file.kind == "hunk"]
    hunks = sum(len(file.hunks) for file in hunked)
    lines = sum(file.added_lines for file in hunked)
    return f"{modules} modules, {hunks} hunks in {len(hunked)} files, +{lines} lines"


def file_data(file: PlannedFile) -> dict[str, object]:
    return {
        "path": file.path,
        "kind": file.kind,
        "hunks": list(file.hunks),
        "added_lines": file.added_lines,
    }


def notes(survey: Survey, plan: Plan) -> list[str]:
    """Return what a user should hear about the target besides the result."""
    found = []
    if survey.updated:
        old, new = survey.ledger.release, survey.target.release
        found.append(f"SGLang went from {old} to {new} under the applied set")
    if survey.ledger.unfinished:
        found.append(f"an earlier {survey.ledger.unfinished} was cut off; repaired")
    release = survey.target.release
    found += [
        f"component {component} has nothing for SGLang {release}: it serves later ones"
        for component in plan.idle_components()
    ]
    if any(problem.code == "E402" for problem in plan.problems):
        return found  # The lines that upstream did not ship are ours.
    hunked = [path for path, file in plan.files.items() if file.kind == "hunk"]
    for path in survey.foreign_originals(hunked):
        found.append(
            f"{path} was edited before apply; the edit is kept, under our lines"
        )
    return found
