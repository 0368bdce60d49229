"""The words of a start script, as a shell would hand them to the program it starts.

A script is read, never run. Quotes, comments, continued lines, ``;``, ``|``, ``&&`` and
redirections end or leave a command as they do in a shell; variables and arrays that the
file assigns are expanded, and so is ``${NAME:-default}``. What only a run could tell
(``$(command)``, a variable that nobody assigned) is kept as a word that is marked
``unread``, so that nobody takes it for a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from dspark_pd.doctor_scanner import (
    ANY_OTHER,
    Scanner,
    Variables,
    Word,
    assignment,
    unread,
)

_HEREDOC = re.compile(r"(<<-?\s*(['\"]?)(\w+)\2[^\n]*)\n.*?^\s*\3\s*$", re.M | re.S)
_PREFIXES: Final = (
    "export",
    "declare",
    "local",
    "readonly",
    "-x",
    "-gx",
    "then",
    "do",
    "else",
)
SOURCING: Final = ("source", ".", "--env-file")
_OPENING: Final = ("if", "case", "for", "while", "until")
_CLOSING: Final = ("fi", "esac", "done")


def commands(text: str, outside: Mapping[str, str | None]) -> Iterator[list[Word]]:
    """Yield the words of each command of a script, assignments included.

    ``outside`` gives variables that the file does not assign; None is a value that is
    not known. Raises ValueError for a quote or brace that is never closed.
    """
    variables = {
        name: [unread(f"${name}") if value is None else Word(value)]
        for name, value in outside.items()
    }
    scanner = Scanner(_HEREDOC.sub(r"\1", text), variables)
    depth = 0
    while scanner.more:
        scanner.doubting = depth > 0
        words = scanner.command()
        first = words[0].text if words else ""
        depth += (first in _OPENING) - (first in _CLOSING)
        if _only_assigns(words):
            if depth > 0:
                words = [_doubted(word) for word in words]
            _assign(words, variables)
        if first in SOURCING:
            variables[ANY_OTHER] = []
        if words:
            yield words


def _only_assigns(words: list[Word]) -> bool:
    return all(w.text in _PREFIXES or assignment(w) is not None for w in words)


def _doubted(word: Word) -> Word:
    """Under a condition, whether something is assigned is known to a run alone."""
    pair = assignment(word)
    if pair is None:
        return word
    return Word(word.text, word.unread or f"{pair[1].text} under a condition")


def _assign(words: list[Word], variables: Variables) -> None:
    """Remember what a command of nothing but assignments gives to later ones."""
    for word in words:
        pair = assignment(word)
        if pair is None:
            continue
        name, value = pair
        if word.text.startswith(f"{name}+="):
            old = variables.get(name, [Word("")])[0]
            value = Word(old.text + value.text, old.unread or value.unread)
        variables[name] = [unread(f"${name}") if value.unread else value]
