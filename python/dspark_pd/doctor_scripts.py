"""Start scripts: of the commands of a text, the one that starts SGLang.

Text is read as a shell would (`doctor_shell`), a script that is handed to another shell
as well, with the variables that are set for the command. What cannot be read is kept by
name, so that nobody takes it for absent.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from dspark_pd import doctor_yaml
from dspark_pd.doctor_command import Command, NotArguments, chosen, note_spelling
from dspark_pd.doctor_containers import ENGINE_TEXT
from dspark_pd.doctor_fields import FIELDS, VARIABLES, field_of, value_of
from dspark_pd.doctor_scanner import ANY_OTHER, Word, assignment
from dspark_pd.doctor_shell import SOURCING, commands

_UNIT_LINES: Final = (
    (re.compile(r"^\s*Environment=", re.M), "export "),
    (re.compile(r"^\s*ExecStart=[-@:+!]*", re.M), ""),
    (re.compile(r"^\s*EnvironmentFile=-?", re.M), "source "),
)
_ARGUMENTS = re.compile(r'"\$[@*]"|\$[@*]')
_COMMENT = re.compile(r"^\s*#.*$", re.M)
_MODULE = re.compile(r"(^|[./])launch_server(\.py)?$")


def parse_command(
    text: str, role: str = "", outside: Mapping[str, str | None] | None = None
) -> Command:
    """Return the flags by field name, and the environment, of a start command.

    ``outside`` gives variables that the text does not assign; default: the process's
    own environment. Raises ValueError for text with unbalanced quotes.
    """
    for pattern, plain in _UNIT_LINES:
        text = pattern.sub(plain, text)
    outside = os.environ if outside is None else outside
    before: list[Word] = []
    found: list[tuple[list[Word], list[Word]]] = []
    for words in _all_commands(text, outside):
        flags = _flags_of(words)
        if flags is None:
            before += words
        else:
            found.append(([*before, *words[: len(words) - len(flags)]], flags))
    if not any(flags for _, flags in found):
        raise NotArguments("no flag of an engine")
    if not any(_starts_engine(around, flags) for around, flags in found):
        raise NotArguments("no sglang serve, no launch_server and no --model-path")
    read = [_command(around, flags) for around, flags in found]
    # A word such as the name of a module, in a message or for pkill, starts nothing.
    telling = [c for c in read if c.open_args or FIELDS.keys() & c.args]
    command = chosen(telling or read, role)
    _note_other_forms(command, text)
    return command


def _note_other_forms(command: Command, text: str) -> None:
    """Remember variables that the text names in a form that is not read, as YAML."""
    text = _COMMENT.sub("", text)
    for name in VARIABLES:
        known = name in command.unread or name in (command.environ or {})
        if not known and re.search(rf"\b{name}\b", text):
            command.unread[name] = "not written as NAME=value before the command"


def _all_commands(text: str, outside: Mapping[str, str | None]) -> Iterator[list[Word]]:
    """Yield all commands; one that is handed to another shell, as by ``bash -c``, too."""
    for words in commands(text, outside):
        if words and words[0].text in SOURCING:
            outside = {**outside, ANY_OTHER: None}
        inner = False
        for index, word in enumerate(words):
            if _is_script(word.text) and len(word.text) < len(text):
                inner = True
                nested = _with_arguments(word.text, words[index + 2 :])
                yield from _all_commands(nested, outside)
        if not inner:
            yield words


def _is_script(text: str) -> bool:
    return " " in text and ENGINE_TEXT.search(text) is not None


def _with_arguments(script: str, arguments: list[Word]) -> str:
    """A script with what the shell hands to it, which is its ``"$@"``."""
    if not arguments:
        return script
    typed = [f'"{w.text}"' if w.unread else shlex.quote(w.text) for w in arguments]
    return _ARGUMENTS.sub(lambda _: " ".join(typed), script)


def _flags_of(words: list[Word]) -> list[Word] | None:
    """Return the flags of a command that starts an engine, else None."""
    texts = [word.text for word in words]
    for index, text in enumerate(texts):
        name = text.rpartition("/")[2]
        if " " in text or assignment(words[index]):
            continue
        if _MODULE.search(text) or (
            name == "sglang" and texts[index + 1 :][:1] == ["serve"]
        ):
            return words[index + 1 :]
    for index, text in enumerate(texts):
        if text.startswith("--"):
            flags = [field_of(t[2:].partition("=")[0]) for t in texts[index:]]
            return words[index:] if set(flags) & set(FIELDS) else None
    return None


def _starts_engine(around: list[Word], flags: list[Word]) -> bool:
    """Whether it is SGLang, has a model, or may have what nobody could read."""
    if _is_program(around):
        return True
    names = [field_of(w.text[2:].partition("=")[0]) for w in flags]
    return "model_path" in names or "config" in names


def _is_program(around: list[Word]) -> bool:
    """Whether the words before the flags start SGLang by name."""
    started = around[-1].text if around else ""
    return bool(_MODULE.search(started)) or started.rpartition("/")[2] == "sglang"


def _command(around: list[Word], flags: list[Word]) -> Command:
    command = Command(certain=_is_program(around))
    for index, word in enumerate(around):
        pair = assignment(word)
        if pair and word.text[0] != "-":
            _set_variable(command, *pair)
        elif word.text in SOURCING:
            place = " ".join(w.text or w.unread or "" for w in around[index:][:2])
            command.sources.append(place)
            command.open_environ = True
    typed = _read_flags(command, flags)
    note_spelling(command, typed)
    return command


def _set_variable(command: Command, name: str, value: Word) -> None:
    assert command.environ is not None
    command.environ.pop(name, None)
    command.unread.pop(name, None)
    if value.unread:
        command.unread[name] = value.unread
    else:
        command.environ[name] = value.text


def _read_flags(command: Command, words: list[Word]) -> dict[str, str]:
    """Read flags and their values; return how each field was typed."""
    typed: dict[str, str] = {}
    pending: str | None = None
    for word in words:
        if word.text.startswith("--"):
            flag, equals, value = word.text.partition("=")
            if " " in flag:  # one word where SGLang wants two
                command.unread[field_of(flag.split()[0][2:])] = word.text
                pending = None
                continue
            pending = field_of(flag[2:])
            command.open_args |= "$" in flag
            typed[pending] = flag
            command.args[pending] = True
            command.unread.pop(pending, None)
            if equals:
                _add_value(command, pending, Word(value, word.unread))
                pending = None
        elif pending is None or (word.unread and not _takes_value(command, pending)):
            if word.unread:  # it may be any flags
                command.sources.append(word.unread)
                command.open_args = True
        else:
            _add_value(command, pending, word)
    if command.args.get("config"):
        _read_config(command)
    return typed


def _read_config(command: Command) -> None:
    """Flags of the file of ``--config``; those of the command itself go before."""
    place = command.args["config"]
    known = isinstance(place, str) and "config" not in command.unread
    flags = doctor_yaml.config_flags(place) if known else None
    if flags is None:
        shown = command.unread.get("config", place)
        command.sources.append(f"--config {shown}")
        command.open_args = True
    else:
        command.args = flags | command.args


def _takes_value(command: Command, name: str) -> bool:
    given = command.args[name] is not True or name in command.unread
    return FIELDS.get(name) != "switch" and not given


def _add_value(command: Command, name: str, word: Word) -> None:
    if word.unread:
        command.unread[name] = word.unread
        return
    value = word.text if FIELDS.get(name) == "text" else value_of(word.text)
    known = command.args[name]
    if known is True:
        command.args[name] = value
    else:
        # A second value makes it a list, as argparse's nargs does.
        command.args[name] = [*(known if isinstance(known, list) else [known]), value]
