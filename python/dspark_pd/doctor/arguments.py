"""From the words of a command to server arguments, by SGLang's own spelling rules.

The words are those that a program gets: shells, containers and supervisors have done
their part. ``read_line`` takes one flat command from a text and refuses what only a
shell can expand; ``argv_of`` finds the engine's flags behind its launcher; ``parse``
reads those that the doctor knows.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from dspark_pd.doctor.fields import ALIASES, FIELDS, settled

LAUNCHERS: Final = ("sglang.launch_server", "dynamo.sglang")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OPERATOR = re.compile(r"[();<>|&]+")
_SHELLS_OWN = re.compile(r"[$`]|^~")
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_RUN_DESCRIBE: Final = "run dspark-pd describe where the real shell expands it"


class NotArguments(ValueError):
    """The words are no command of one engine; the message says why."""


@dataclass
class Words:
    """The words of an engine's command, and the variables set in front of it."""

    argv: list[str]
    environ: dict[str, str] = field(default_factory=dict)


def read_line(text: str) -> Words:
    """Return one flat command; raises NotArguments for anything a shell must read."""
    commands = [words for line in _logical_lines(text) if (words := _split(line))]
    if not commands:
        raise NotArguments("no command in it")
    if len(commands) > 1:
        raise NotArguments(f"more than one command; {_RUN_DESCRIBE}")
    return argv_of(commands[0])


def _logical_lines(text: str) -> list[str]:
    """Join lines that end with a backslash, as a shell does."""
    lines, open_line = [], ""
    for line in text.splitlines():
        if (len(line) - len(line.rstrip("\\"))) % 2 == 0:
            lines.append(open_line + line)
            open_line = ""
        elif _shlex(line[:-1], comments=True) == _shlex(line[:-1], comments=False):
            open_line += line[:-1]
        else:
            raise NotArguments(
                f"a comment in a line that continues on the next; {_RUN_DESCRIBE}"
            )
    if open_line:
        lines.append(open_line)
    return lines


def _split(line: str) -> list[str]:
    words = _shlex(line, comments=True)
    for word in words:
        if _OPERATOR.fullmatch(word) or _SHELLS_OWN.search(word):
            raise NotArguments(f"{word} in it; {_RUN_DESCRIBE}")
    return words


def _shlex(line: str, comments: bool) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    if not comments:
        lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise NotArguments(f"{str(error).lower()}; {_RUN_DESCRIBE}") from None


def argv_of(words: Sequence[str]) -> Words:
    """Return the engine's flags without the launcher in front of them.

    Known are ``python -m`` with one of LAUNCHERS, ``sglang serve [MODEL]`` and nothing
    at all, each behind ``env``, ``exec``, ``nohup`` and ``NAME=value``.
    """
    rest = list(words)
    environ: dict[str, str] = {}
    while rest and is_front(rest[0]):
        if _ASSIGNMENT.match(rest[0]):
            name, _, value = rest[0].partition("=")
            environ[name] = value
        del rest[0]
    launcher = next((i for i, word in enumerate(rest) if word in LAUNCHERS), None)
    if launcher and rest[launcher - 1] == "-m" and _only_python(rest[: launcher - 1]):
        if not rest[launcher + 1 :]:
            raise NotArguments("nothing behind the launcher")
        return Words(rest[launcher + 1 :], environ)
    if len(rest) > 1 and Path(rest[0]).name == "sglang" and rest[1] == "serve":
        rest = rest[2:]
        if rest and not rest[0].startswith("-"):
            rest.insert(0, "--model-path")
    if not rest:
        raise NotArguments("no flags" if not words else "nothing behind the launcher")
    if not rest[0].startswith("-"):
        wanted = f"flags, sglang serve or python -m {LAUNCHERS[0]}"
        raise NotArguments(f"it starts with {rest[0]}, not with {wanted}")
    return Words(rest, environ)


def is_front(word: str) -> bool:
    """Whether a word in front of a command leaves its arguments as they are."""
    return bool(_ASSIGNMENT.match(word)) or word in ("env", "exec", "nohup")


def _only_python(words: list[str]) -> bool:
    """Whether the words before ``-m`` are an interpreter and its options, or none."""
    return not words or bool(_PYTHON.fullmatch(words[0]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NotArguments(message)


def parse(argv: Sequence[str], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the server arguments that are given, by field, and what is not known: flags,
    and words that belong to no flag.

    As in SGLang, a flag may be shortened while that is unambiguous, the last of several
    counts, and the flags of ``--config FILE`` (relative to ``folder``) come first.
    """
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for name, kind in FIELDS.items():
        spellings = [
            name,
            *(alias for alias, meant in ALIASES.items() if meant == name),
        ]
        flags = [f"--{spelling.replace('_', '-')}" for spelling in spellings]
        action = "store_true" if kind == "switch" else "store"
        parser.add_argument(*flags, dest=name, action=action)
    parser.add_argument("--config")
    words = _with_config(list(argv), folder)
    given, rest = parser.parse_known_args(words)
    given.__dict__.pop("config", None)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("--")]
    args = {name: settled(name, value) for name, value in vars(given).items()}
    return args, list(dict.fromkeys([*unknown, *stray(words, rest)]))


def stray(words: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return those of ``rest``, what a parser left of ``words``, that follow no flag.

    What stands behind an unknown flag is taken for its values.
    """
    found, left, behind_known = [], list(rest), True
    for word in words:
        if not left or word != left[0]:
            behind_known = True
            continue
        del left[0]
        if word.startswith("-"):
            behind_known = False
        elif behind_known:
            found.append(word)
    return found


def _with_config(argv: list[str], folder: Path) -> list[str]:
    """Put the flags of a configuration file in front, where SGLang puts them."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    if at + 1 == len(argv):
        raise NotArguments("--config without a file")
    path = folder / argv[at + 1]
    try:
        items = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        raise NotArguments(f"--config {argv[at + 1]}: {detail}") from None
    if not isinstance(items, dict):
        raise NotArguments(f"--config {argv[at + 1]}: not a mapping of flags")
    return [*_as_flags(items), *argv[:at], *argv[at + 2 :]]


def _as_flags(items: dict[Any, Any]) -> list[str]:
    words: list[str] = []
    for key, value in items.items():
        name = str(key).replace("-", "_")
        switch = FIELDS.get(ALIASES.get(name, name)) == "switch"
        if isinstance(value, bool) and switch:
            words += [f"--{key}"] if value else []
        elif isinstance(value, bool):
            words += [f"--{key}", str(value).lower()]
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{key}", text]
    return words
