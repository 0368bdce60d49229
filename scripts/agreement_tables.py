"""Tables of the page on agreement, from the rules that the engines decide by."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dspark_pd.doctor.checks import CHECKS
from dspark_pd.doctor.remarks import REMARKS
from dspark_pd.doctor.tables import load

Table = Callable[[tuple[str, ...], list[tuple[object, ...]]], str]
Prose = Callable[[str], str]

_ROW_HEADER = ("code", "what happens", "compares", "says", "leads to", "fix")


def agreement_rules(table: Table, prose: Prose) -> str:
    """One table per group of rules, in the order in which they decide."""
    rules = load("rules")
    parts = []
    for title, group in (
        ("Engines and target KV", rules.ENGINE_RULES),
        ("Draft", rules.DRAFT_RULES),
        ("Tail", rules.TAIL_RULES),
    ):
        body = [_row(rule, prose) for rule in group]
        parts.append(f"### {title}\n\n{table(_ROW_HEADER, body)}")
    return "\n\n".join(parts)


def _row(rule: Any, prose: Prose) -> tuple[object, ...]:
    words = {"refuse": "refused", "warn": "warning", "note": "note"}
    return (
        f"`{rule.code}`",
        words[rule.severity],
        f"`{rule.about}`",
        prose(rule.says),
        prose(rule.leads_to),
        prose(rule.fix),
    )


def runtime_codes(table: Table, prose: Prose) -> str:
    """Codes of errors that are not rules."""
    codes = load("rules").RUNTIME_CODES
    rows: list[tuple[object, ...]] = [
        (f"`{c.code}`", c.where, prose(c.meaning), prose(c.fix)) for c in codes
    ]
    return table(("code", "raised by", "means", "fix"), rows)


def doctor_checks(table: Table, prose: Prose) -> str:
    """What the doctor checks in addition to the engines' own rules."""
    rows: list[tuple[object, ...]] = [
        (
            f"`{check.code}`",
            check.severity,
            *(
                prose(_named(text))
                for text in (check.message, check.consequence, check.fix)
            ),
        )
        for check in (*REMARKS.values(), *CHECKS)
    ]
    parts = [table(("code", "finding", "says", "leads to", "fix"), rows)]
    refused: list[tuple[object, ...]] = [
        (
            f"`DOC-{refusal.code}`",
            refusal.role,
            *(prose(_named(text)) for text in (refusal.says, refusal.fix)),
        )
        for refusal in load("handoff_refusals").REFUSALS
    ]
    parts.append(
        "Settings with which an engine refuses to start a tail handoff. The doctor checks "
        "them for engines that do not run yet; an engine says the code without `DOC-`:"
    )
    parts.append(table(("code", "engine", "says", "fix"), refused))
    return "\n\n".join(parts)


def _named(text: str) -> str:
    """Show the fields of a sentence as words."""
    return re.sub(r"\{(\w+)(![rs])?\}", lambda field: field[1].upper(), text)
