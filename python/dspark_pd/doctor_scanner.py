"""Words of a script: quotes, expansions and redirections, as a shell has them.

`doctor_shell` gives the words of whole scripts; see there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

_EXPANSION = re.compile(r"(\w+|[@*#?$!-])(\[[@*]\])?((?::?[-=?+])?)", re.A)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.A | re.S)
_QUOTE = re.compile(r'(?<!\\)"')
_POSITIONAL: Final = ("@", "*")
ANY_OTHER: Final = ""
"""In place of a name: variables without an assignment may have a value all the same."""


@dataclass(frozen=True)
class Word:
    """One word; ``unread`` is the first expression in it that has no value here.

    Such an expression stands in ``text`` as it was written.
    """

    text: str
    unread: str | None = None


Variables = dict[str, list[Word]]
"""Values by name; an array has one word for each of its elements."""


def unread(expression: str) -> Word:
    """Return a word without a value."""
    return Word(expression, expression)


def assignment(word: Word) -> tuple[str, Word] | None:
    """Return (name, value) of a word such as ``TP=4``."""
    found = _ASSIGNMENT.match(word.text)
    return (found[1], Word(found[2], word.unread)) if found else None


@dataclass
class Scanner:
    """Reads ``text`` from left to right."""

    text: str
    variables: Variables
    at: int = 0
    words: list[Word] = field(default_factory=list)
    dropping: bool = False
    """Whether the next word is the file of a redirection."""
    doubting: bool = False
    """Whether only a run can tell if a command is reached."""

    @property
    def more(self) -> bool:
        return self.at < len(self.text)

    def command(self) -> list[Word]:
        """Return the words up to the end of a command."""
        self.words = []
        while self.more:
            rest = self.text[self.at : self.at + 2]
            if rest == "\\\n":
                self.at += 2
            elif rest[0] == "\n":
                self.at += 1
                if not re.compile(r"\s*--\w").match(self.text, self.at):
                    break
            elif rest[0] in " \t\r":
                self.at += 1
            elif rest[0] == "#":
                self._skip_line()
            elif rest[0] in "<>" or rest == "&>":
                self._redirection()
            elif rest[0] in ";|&()":
                self.at += 1
                break
            else:
                self._word()
        return self.words

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _redirection(self) -> None:
        operator = re.compile(r"&?[<>]+[&|]?").match(self.text, self.at)
        assert operator is not None
        self.at = operator.end()
        self.dropping = True

    def _word(self) -> None:
        """Read one word, which an unquoted variable can make none or several."""
        pieces: list[Word] = [Word("")]
        quoted = False
        while self.more and self.text[self.at] not in " \t\r\n;|&<>)":
            char = self.text[self.at]
            if char in "\"'":
                inner = self._quoted(char)
                quoted = quoted or bool(inner)
                pieces = _joined(pieces, inner)
            elif char == "$" or char == "`":
                pieces = _joined(pieces, self._expansion(quoted=False))
            elif char == "(":
                if not self._array(pieces[-1].text):
                    break
                return
            else:
                pieces = _joined(pieces, [Word(self._plain())])
        if self.text[self.at : self.at + 1] in ("<", ">") and pieces[-1].text.isdigit():
            return  # the 2 of 2>&1
        if self.dropping:
            self.dropping = False
        else:
            self.words += [w for w in pieces if w.text or w.unread or quoted]

    def _plain(self) -> str:
        """Return one unquoted character; a backslash stands for the next one."""
        if self.text[self.at] == "\\":
            self.at += 1
            if self.text[self.at : self.at + 1] == "\n":
                self.at += 1
                return ""
        char = self.text[self.at : self.at + 1]
        self.at += 1
        return char

    def _quoted(self, mark: str) -> list[Word]:
        """Return what stands between two quotes; an array can make several words."""
        begin = self.at
        self.at += 1
        pieces: list[Word] = [Word("")]
        gone = 0
        while self.more and self.text[self.at] != mark:
            char = self.text[self.at]
            if mark == '"' and char in "$`":
                start, found = self.at, self._expansion(quoted=True)
                gone += 0 if found else self.at - start
                pieces = _joined(pieces, found)
            elif mark == '"' and char == "\\":
                pieces = _joined(pieces, [Word(self._plain())])
            else:
                pieces = _joined(pieces, [Word(char)])
                self.at += 1
        if not self.more:
            line = self.text[:begin].count("\n") + 1
            raise ValueError(f"the quote {mark} of line {line} is not closed")
        self.at += 1
        # "$@" without arguments is no word, while "" is an empty one.
        return [] if gone and gone == self.at - begin - 2 else pieces

    def _array(self, head: str) -> bool:
        """Read ``NAME=(a b)``; return False where the bracket means something else."""
        found = _ASSIGNMENT.fullmatch(head)
        if found is None or found[2]:
            return False
        inner = Scanner(self._bracketed("(", ")").replace("\n", " "), self.variables)
        elements = inner.command()
        if self.doubting:
            elements = [unread(f"{found[1]} under a condition")]
        if head.endswith("+="):
            elements = [*self.variables.get(found[1], []), *elements]
        self.variables[found[1]] = elements
        return True

    def _bracketed(self, opening: str, closing: str) -> str:
        """Step over a pair of brackets; return what is inside."""
        begin, depth = self.at, 0
        while self.more:
            char = self.text[self.at]
            depth += (char == opening) - (char == closing)
            self.at += 1
            if depth == 0:
                return self.text[begin + 1 : self.at - 1]
        line = self.text[:begin].count("\n") + 1
        raise ValueError(f"the bracket {opening} of line {line} is not closed")

    def _expansion(self, quoted: bool) -> list[Word]:
        """Return the value of the variable or command here, split unless quoted."""
        begin = self.at
        following = self.text[begin + 1 : begin + 2]
        if self.text[begin] == "`":
            self.at = self.text.find("`", begin + 1) + 1 or len(self.text)
        elif following == "(":
            self.at += 1
            self._bracketed("(", ")")
        elif following == "{":
            self.at += 1
            inner = self._bracketed("{", "}")
            return self._braced(inner, self.text[begin : self.at], quoted)
        else:
            found = _EXPANSION.match(self.text, begin + 1)
            self.at = begin + 1 + len(found[1] if found else "")
            if found is None:
                return [Word("$")]
            return self._value(found[1], self.text[begin : self.at], quoted)
        return [unread(self.text[begin : self.at])]

    def _value(self, name: str, shown: str, quoted: bool) -> list[Word]:
        # Arguments of the script itself: a script is described as it starts alone.
        if name in _POSITIONAL:
            return []
        words = self.variables.get(name, [unread(shown)])
        return words if quoted else _split(words)

    def _braced(self, inner: str, shown: str, quoted: bool) -> list[Word]:
        """Return the value of ``${inner}``."""
        found = _EXPANSION.match(inner)
        if found is None:
            return [unread(shown)]
        name, operator, rest = found[1], found[3], inner[found.end() :]
        if not operator:
            return [unread(shown)] if rest else self._value(name, shown, quoted)
        known = self.variables.get(name)
        given = known is not None and (
            ":" not in operator or any(word.text or word.unread for word in known)
        )
        if operator[-1] == "+":
            return self._words_of(rest, quoted) if given else [Word("")]
        if given:
            return self._value(name, shown, quoted)
        if operator[-1] == "?":
            return [unread(f"${{{name}}}")]
        if ANY_OTHER in self.variables:
            return [unread(shown)]
        words = self._words_of(rest, quoted) or [Word("")]
        if operator[-1] == "=":
            self.variables[name] = words
        return words

    def _words_of(self, text: str, quoted: bool) -> list[Word]:
        if not quoted:
            return Scanner(text, self.variables).command()
        # Quotes inside quoted braces go, and nothing is split.
        return Scanner(f'"{_QUOTE.sub("", text)}"', self.variables)._quoted('"')


def _joined(pieces: list[Word], more: list[Word]) -> list[Word]:
    """Append words to words: the last of one and the first of the other are one."""
    if not more:
        return pieces
    last, first = pieces[-1], more[0]
    middle = Word(last.text + first.text, last.unread or first.unread)
    return [*pieces[:-1], middle, *more[1:]]


def _split(words: list[Word]) -> list[Word]:
    """Split the values of an unquoted expansion at their spaces."""
    found: list[Word] = []
    for word in words:
        parts = [] if word.unread else word.text.split()
        found += [Word(part) for part in parts] or [word]
    return found
