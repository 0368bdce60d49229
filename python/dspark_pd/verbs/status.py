"""``status``: what each hunk is to this target.

``applied``      its lines are in the file;
``needed``       they are not, and apply would put them there;
``not needed``   upstream has it, with the release since when;
``not applicable`` this release is older than what the hunk is about;
``conflict``     the hunk fits no place in this target, or the file was edited.

A person gets counts and what needs attention; ``-v`` lists every hunk.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from typing import Final

from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import Problem, about
from dspark_pd.messages.result import Result, count
from dspark_pd.patchset.lists import with_needs
from dspark_pd.planning import changes
from dspark_pd.planning.plan import Plan
from dspark_pd.planning.selection import Choice
from dspark_pd.target.survey import Survey
from dspark_pd.verbs.context import (
    Context,
    asked_components,
    named_components,
    open_context,
)

Row = dict[str, str]
_STATES: Final = ("applied", "needed", "not needed", "not applicable", "conflict")
_MAX_SHOWN: Final = 12


def run(options: Namespace) -> Result:
    context = open_context(options)
    with about(context.target):
        return _status(context, options)


def _status(context: Context, options: Namespace) -> Result:
    survey = context.survey
    known = context.patch_set.components
    named = with_needs(known, named_components(options, known))
    components = named or asked_components(options, known, survey.ledger.components)
    plan = context.plan(components)
    edited = survey.problems()
    rows = [_row(choice, plan, survey, edited) for choice in plan.choices]
    result = Result(target=context.target, problems=context.problems(options, plan))
    result.exit_code = _exit_code(context, plan, result.problems, components)
    result.lines = _lines(rows, components, survey, plan)
    result.details = ["", *_table(rows), *_details(plan)]
    result.notes = context.notes(options, plan, components) + _applied_notes(survey)
    result.data = _data(survey, components, rows)
    return result


def _row(choice: Choice, plan: Plan, survey: Survey, edited: list[Problem]) -> Row:
    hunk = choice.hunk
    state: str = choice.verdict
    detail = choice.detail
    if choice.identity in plan.unfit:
        state, detail = "conflict", plan.unfit[choice.identity].part("title")
    elif hunk.target in {problem.fields["file"] for problem in edited}:
        state, detail = "conflict", "the file was edited"
    elif state == "wanted":
        planned = plan.files.get(hunk.target)
        current = survey.current(hunk.target)
        applied = planned is not None and current == planned.desired
        state, detail = ("applied", "") if applied else ("needed", "")
        if not applied and current != survey.original(hunk.target):
            detail = "another version or part of the set is applied"
    return {
        "id": choice.identity,
        "state": state,
        "detail": detail,
        "file": hunk.target,
        "component": hunk.component,
        "message": hunk.message,
    }


def _exit_code(
    context: Context, plan: Plan, problems: list[Problem], components: tuple[str, ...]
) -> int:
    if problems:
        return problems[0].exit_code
    survey = context.survey
    everything = tuple(dict.fromkeys([*components, *survey.ledger.components]))
    if everything != components:
        plan = context.plan(everything)
    asked = changes.build(survey, "status", everything, plan.files)
    if asked.changes or survey.ledger.unfinished:
        return exit_codes.DIFFERS
    return exit_codes.OK


def _lines(
    rows: list[Row], components: Iterable[str], survey: Survey, plan: Plan
) -> list[str]:
    """Counts by component, what needs attention, and a summary: one screen."""
    attention = [row for row in rows if row["state"] == "conflict" or _is_odd(row)]
    lines = _counts(rows, components)
    if attention:
        lines += ["", *_table(attention[:_MAX_SHOWN])]
    if len(attention) > _MAX_SHOWN:
        lines.append(f"... and {len(attention) - _MAX_SHOWN} more; -v lists all")
    added = [file for file in plan.files.values() if file.kind == "add"]
    present = sum(survey.current(file.path) == file.desired for file in added)
    totals = Counter(row["state"] for row in rows)
    summary = ", ".join(
        f"{totals[state]} {state}" for state in _STATES if totals[state]
    )
    lines += ["", f"hunks: {summary or 'none'}; modules: {present} of {len(added)}"]
    return lines


def _is_odd(row: Row) -> bool:
    """Whether a hunk is needed though a part of the set is in its file."""
    return row["state"] == "needed" and bool(row["detail"])


def _counts(rows: list[Row], order: Iterable[str]) -> list[str]:
    """Return a table with a line for each component, a column for each state met."""
    counts = Counter((row["component"], row["state"]) for row in rows)
    states = [state for state in _STATES if any(s == state for _, s in counts)]
    met = {row["component"] for row in rows}
    components = [name for name in order if name in met]
    width = max(map(len, ("component", *components)))
    lines = ["  ".join([f"{'component':<{width}}", *states]).rstrip()]
    for component in components:
        cells = [f"{counts[component, s] or '-':>{len(s)}}" for s in states]
        lines.append("  ".join([f"{component:<{width}}", *cells]))
    return lines if rows else []


def _table(rows: list[Row]) -> list[str]:
    width = max((len(row["id"]) for row in rows), default=0)
    part = max((len(row["component"]) for row in rows), default=0)
    lines = []
    for row in rows:
        # The state stands in front already.
        detail = row["detail"].removeprefix(f"{row['state']} ")
        tail = f"  ({detail})" if detail else ""
        head = f"{row['state']:<15} {row['component']:<{part}} {row['id']:<{width}}"
        lines.append(f"{head}  {row['file']}{tail}")
    return lines


def _details(plan: Plan) -> list[str]:
    """What each hunk does, and until when it is needed."""
    lines = []
    for choice in plan.choices:
        kind, argument = choice.hunk.drop_when
        lines += [
            "",
            f"{choice.identity}  {choice.hunk.message}",
            f"  releases  {choice.hunk.releases}",
            f"  drop when {kind}: {argument}",
        ]
    return lines


def _applied_notes(survey: Survey) -> list[str]:
    ours = sum(
        seen.condition == "ours" and seen.entry.before is not None
        for seen in survey.seen.values()
    )
    if not ours or survey.target.source != "dist-info":
        return []
    return [
        f"tools that compare files with pip's RECORD report {count(ours, 'modified file')}; "
        "revert before pip install -U sglang"
    ]


def _data(
    survey: Survey, components: tuple[str, ...], rows: list[Row]
) -> dict[str, object]:
    return {
        "components": list(components),
        "applied_components": list(survey.ledger.components),
        "applied_release": survey.ledger.release,
        "set_version": survey.ledger.set_version,
        "unfinished": survey.ledger.unfinished,
        "updated": survey.updated,
        "hunks": rows,
        "files": {path: seen.condition for path, seen in survey.seen.items()},
    }
