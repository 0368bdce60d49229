"""``diff``: the lines that apply would change, as a unified diff."""

from __future__ import annotations

import difflib
from argparse import Namespace

from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import about
from dspark_pd.messages.result import Result
from dspark_pd.planning import changes
from dspark_pd.target.transaction import Change
from dspark_pd.verbs.context import open_context


def run(options: Namespace) -> Result:
    context = open_context(options)
    with about(context.target):
        components, plan = context.asked(options)
        transaction = changes.build(context.survey, "diff", components, plan.files)
    texts = {change.path: unified(change) for change in transaction.changes}
    return Result(
        exit_code=exit_codes.DIFFERS if texts else exit_codes.OK,
        target=context.target,
        lines=[line for text in texts.values() for line in text.splitlines()],
        data={"files": texts, "components": list(components)},
        notes=context.notes(options, plan, components),
    )


def unified(change: Change) -> str:
    """Return ``change`` as a unified diff with the paths of a checkout."""
    old = (change.current or b"").decode("utf-8", "replace").splitlines(keepends=True)
    new = (change.desired or b"").decode("utf-8", "replace").splitlines(keepends=True)
    before = f"a/{change.path}" if change.current is not None else "/dev/null"
    after = f"b/{change.path}" if change.desired is not None else "/dev/null"
    return "".join(difflib.unified_diff(old, new, before, after))
