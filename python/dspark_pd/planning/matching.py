"""From the matches of a file to the edits of one hunk, or to why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

from dspark_pd.messages.errors import Problem, Refused, refuse
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.planning.astgrep import Match
from dspark_pd.planning.insertion import Edit, NotAnInsertion, edits_of
from dspark_pd.planning.selection import Choice

_FEW: Final = 3


def edits_of_choice(choice: Choice, plain: bytes, matches: list[Match]) -> list[Edit]:
    """Return the edits of the first variant whose count is right, or refuse."""
    hunk = choice.hunk
    if names_our_module(hunk, plain):
        _refuse_unrecorded(hunk)
    for variant in choice.variants:
        found = [match for match in matches if match.rule_id == variant.id]
        if len(found) == variant.expect:
            return [
                e for match in found for e in _edits_of_match(variant, match, plain)
            ]
    found = [match for match in matches if match.rule_id == hunk.id]
    _refuse_count(hunk, found)


def _edits_of_match(hunk: Hunk, match: Match, plain: bytes) -> list[Edit]:
    try:
        edits = edits_of(match, plain)
    except NotAnInsertion as error:
        change = f"line {match.line}: {error}"
        refuse("H302", id=hunk.identity, file=hunk.target, change=change)
    if any(_already_there(edit, plain) for edit in edits):
        _refuse_unrecorded(hunk)
    return edits


def names_our_module(hunk: Hunk, plain: bytes) -> bool:
    """Whether an original imports the module that only our lines import."""
    module = str(hunk.metadata.get("calls", "")).rpartition(".")[0]
    return bool(module) and f"from {module} import".encode() in plain


def _already_there(edit: Edit, plain: bytes) -> bool:
    """Whether the lines to insert stand at their place already, without a record."""
    text = edit.text.encode("utf-8")
    around = plain[max(0, edit.at - len(text)) : edit.at + len(text)]
    return text.strip() in around and b"\n" in text


def _refuse_unrecorded(hunk: Hunk) -> NoReturn:
    raise Refused([unrecorded({hunk.target: [hunk.identity]})])


def unrecorded(places: Mapping[str, list[str]]) -> Problem:
    """Return one E402 for the files that hold our lines, by hunk: cause and remedy
    are the same for all."""
    files = _few(list(places))
    if len(places) > 1:
        files = f"{len(places)} files: {files}"
    ids = [identity for found in places.values() for identity in found]
    return Problem("E402", {"id": _few(ids), "file": files})


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:_FEW])
    more = len(names) - _FEW
    return f"{shown} and {more} more" if more > 0 else shown


def _refuse_count(hunk: Hunk, found: list[Match]) -> NoReturn:
    lines = ", ".join(str(match.line) for match in found)
    refuse(
        "H301",
        id=hunk.identity,
        file=hunk.target,
        wanted=hunk.expect,
        count=len(found),
        lines=f" (lines {lines})" if lines else "",
    )
