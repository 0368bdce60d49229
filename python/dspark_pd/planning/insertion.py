"""From what ast-grep proposes to bytes that keep every byte of upstream.

1. ``normalise`` takes carriage returns out, so that rules see one kind of line end.
2. ``edits_of`` reduces a match to what it adds. ast-grep repeats the matched text in its
   replacement and re-indents it, strings over several lines included; only the added
   lines are taken over, and the matched text stays as it was.
3. ``splice`` puts all edits of a file into the original bytes at once, so that hunks do
   not see each other's lines and their order in the file does not matter.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from dataclasses import dataclass

from dspark_pd.planning.astgrep import Match

_REST_OF_LINE = re.compile(rb"[ \t]*(#[^\n]*)?(?=\n|\Z)")


@dataclass(frozen=True)
class Edit:
    """Put ``text`` at an offset; nothing is ever taken out."""

    at: int
    text: str
    hunk_id: str


class NotAnInsertion(ValueError):
    """The replacement lacks part of what it replaces."""


def normalise(data: bytes) -> tuple[bytes, list[int]]:
    """Return ``data`` with LF line ends and the offsets, in it, that had a CR."""
    if b"\r\n" not in data:
        return data, []
    lines = data.split(b"\n")
    offsets, position = [], 0
    for index, line in enumerate(lines[:-1]):
        if line.endswith(b"\r"):
            lines[index] = line = line[:-1]
            offsets.append(position + len(line))
        position += len(line) + 1
    return b"\n".join(lines), offsets


def edits_of(match: Match, source: bytes) -> list[Edit]:
    """Return what ``match`` adds to ``source`` (LF line ends).

    Raises ``NotAnInsertion`` where it changes something.
    """
    old = source[match.start : match.end].decode("utf-8")
    new = match.replacement
    around = _lines_around(old, new)
    if around is not None:
        before, after = around
        end = match.end
        if after.startswith("\n"):
            end = _end_of_line(source, end)
        pairs = [(match.start, before), (end, after)]
    else:
        pairs = _text_between(old, new, match.start)
    return [Edit(at, _bare(text), match.rule_id) for at, text in pairs if text]


def _bare(text: str) -> str:
    """Take from empty lines the indentation that ast-grep gives them.

    The first and the last line share theirs with what upstream has there.
    """
    first, *lines = text.split("\n")
    bare = [line if line.strip() else "" for line in lines[:-1]]
    return "\n".join([first, *bare, *lines[-1:]])


def splice(data: bytes, edits: list[Edit], carriage_returns: list[int]) -> bytes:
    """Return ``data`` with ``edits``, whose offsets are those of the LF text.

    Edits at one offset keep their order.
    """
    pieces, done = [], 0
    for edit in sorted(edits, key=lambda edit: edit.at):
        at = edit.at + bisect_left(carriage_returns, edit.at)
        text = edit.text.replace("\n", "\r\n") if carriage_returns else edit.text
        pieces += [data[done:at], text.encode("utf-8")]
        done = at
    return b"".join([*pieces, data[done:]])


def _lines_around(old: str, new: str) -> tuple[str, str] | None:
    """Return the lines that ``new`` has before and after ``old``, or None.

    Lines are compared without indentation, which ast-grep changes inside strings.
    """
    old_lines, new_lines = old.split("\n"), new.split("\n")
    bare_old = [line.strip() for line in old_lines]
    bare_new = [line.strip() for line in new_lines]
    count = len(old_lines)
    for first in range(len(new_lines) - count + 1):
        if bare_new[first : first + count] == bare_old:
            break
    else:
        return None
    before = ""
    if first:
        anchor = new_lines[first]
        indent = anchor[: len(anchor) - len(anchor.lstrip())]
        before = "\n".join(new_lines[:first]) + "\n" + indent
    after = "".join("\n" + line for line in new_lines[first + count :])
    return before, after


def _text_between(old: str, new: str, start: int) -> list[tuple[int, str]]:
    """Return the (offset, text) that turn ``old`` into ``new``, word by word."""
    old_words, new_words = _words(old), _words(new)
    matcher = difflib.SequenceMatcher(
        None, [old[a:b] for a, b in old_words], [new[a:b] for a, b in new_words], False
    )
    pairs = []
    for kind, first, last, new_first, new_last in matcher.get_opcodes():
        if kind == "equal":
            continue
        if first != last:
            raise NotAnInsertion(f"{_brief(old)} -> {_brief(new)}")
        # What stands between two words of upstream, there and in the replacement.
        gap = _gap(old_words, first, first, len(old))
        new_gap = _gap(new_words, new_first, new_last, len(new))
        at, text = _added(old[slice(*gap)], new[slice(*new_gap)])
        at, text = _slide(old, gap[0] + at, text)
        pairs.append((start + len(old[:at].encode("utf-8")), text))
    return pairs


def _slide(old: str, at: int, text: str) -> tuple[int, str]:
    """Move an insertion behind what it shares with upstream.

    ``) and (b)`` before a parenthesis is `` and (b))`` behind it: the same result, told
    as a person would tell it.
    """
    while at < len(old) and text[0] == old[at]:
        text = text[1:] + text[0]
        at += 1
    return at, text


def _words(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer(r"\w+|[^\w\s]", text)]


def _gap(
    words: list[tuple[int, int]], first: int, last: int, end: int
) -> tuple[int, int]:
    """Return the span from the word before ``first`` to the word at ``last``."""
    before = words[first - 1][1] if first else 0
    return before, words[last][0] if last < len(words) else end


def _added(old_space: str, new: str) -> tuple[int, str]:
    """Return where in the space of upstream, and what, was added."""
    if new.endswith(old_space):
        return 0, new[: len(new) - len(old_space)]
    if new.startswith(old_space):
        return len(old_space), new[len(old_space) :]
    raise NotAnInsertion(f"the space before {_brief(new)}")


def _end_of_line(source: bytes, offset: int) -> int:
    """Step over a trailing comment, which belongs to the statement before it."""
    rest = _REST_OF_LINE.match(source, offset)
    return rest.end() if rest else offset


def _brief(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
