"""``explain``: what the register and the catalogues know of a hunk or of a code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from dspark_pd.doctor.checks import CHECKS
from dspark_pd.doctor.remarks import REMARKS
from dspark_pd.doctor.tables import load, severity_of
from dspark_pd.measure.diagnosis import CAUSES
from dspark_pd.messages.errors import Problem, catalogue
from dspark_pd.messages.result import Result
from dspark_pd.patchset.patch_set import PatchSet, load_patch_set
from dspark_pd.verbs.context import refuse_name
from dspark_pd.verbs.listing import describe

Entry = tuple[str, list[str]]
"""A name as it is asked for, and what is known of it, in lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    text = "a hunk, an error code such as H301, or a code of the engines or the doctor"
    parser.add_argument("name", metavar="CODE|HUNK", help=text)


def run(options: argparse.Namespace) -> Result:
    """Explain ``options.name``; refuse with U002 and the nearest names what is none."""
    patch_set = load_patch_set(options.overlay)
    entries = [*_hunks(patch_set), *_errors(), *_rules(), *_tail(), *_doctors()]
    entries += _measured()
    asked = str(options.name)
    found = [lines for name, lines in entries if name.lower() == asked.lower()]
    if not found:
        hint = "dspark-pd list for hunks, dspark-pd list --errors for error codes"
        refuse_name("name", asked, (name for name, _ in entries), hint)
    lines = [line for part in found for line in ["", *part]][1:]
    return Result(lines=lines, data={"name": asked, "explained": found})


def _hunks(patch_set: PatchSet) -> Iterator[Entry]:
    for identity, variants in patch_set.identities.items():
        for hunk in variants:
            yield identity, describe(hunk)


def _errors() -> Iterator[Entry]:
    for code, kind in catalogue().items():
        lines = [*Problem(code, kind.example).as_text().splitlines()]
        yield code, [*lines, f"  exit     {kind.exit_code}", "  (values are made up)"]


def _rules() -> Iterator[Entry]:
    rules = load("rules")
    for rule in (*rules.ENGINE_RULES, *rules.DRAFT_RULES):
        says = {"compares": rule.about, "says": rule.says, "leads to": rule.leads_to}
        head = f"{severity_of(rule)}, from comparing the two engines"
        yield rule.code, _lines(rule.code, head, {**says, "fix": rule.fix})
    for code in rules.RUNTIME_CODES:
        says = {"raised by": code.where, "means": code.meaning, "fix": code.fix}
        yield code.code, _lines(code.code, "raised while engines run", says)


def _tail() -> Iterator[Entry]:
    """The doctor shows a refusal of the start-up under a prefix; both names are known."""
    for refusal in load("handoff_refusals").REFUSALS:
        head = f"refused at start-up by {refusal.role}"
        lines = _lines(refusal.code, head, {"says": refusal.says, "fix": refusal.fix})
        yield refusal.code, lines
        yield f"DOC-{refusal.code}", lines


def _doctors() -> Iterator[Entry]:
    for found in (*REMARKS.values(), *CHECKS):
        says = {"says": found.message, "leads to": found.consequence, "fix": found.fix}
        yield found.code, _lines(found.code, f"{found.severity}, of the doctor", says)


def _measured() -> Iterator[Entry]:
    for code, cause in CAUSES.items():
        says = {"means": cause.means, "next": cause.next}
        says = {label: text.format(place="NAME") for label, text in says.items()}
        yield code, _lines(code, "found by measure", says)


def _lines(code: str, head: str, says: dict[str, Any]) -> list[str]:
    return [
        f"{code}  {head}",
        *(f"  {label:<10} {text}" for label, text in says.items()),
    ]
