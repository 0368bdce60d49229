"""Arguments of an engine from a file: a script, a unit, a manifest, flags or JSON.

JSON is server arguments by field name, as ``/server_info`` gives them, alone or under
``server_args`` beside ``environ`` and ``version``. A manifest's containers are scripts
(`doctor_yaml`). All other text is read as a shell would (`doctor_shell`): of its
commands, the one that starts SGLang counts, with the variables that are set for it.
What cannot be read is kept by name, so that nobody takes it for absent.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dspark_pd import doctor_yaml
from dspark_pd.doctor_command import Command, NotArguments, chosen, note_spelling
from dspark_pd.doctor_containers import Script, read_manifest
from dspark_pd.doctor_fields import (
    FIELDS,
    VARIABLES,
    field_of,
    value_of,
)
from dspark_pd.doctor_scanner import Word, assignment
from dspark_pd.doctor_shell import commands

_UNIT_LINES: Final = (
    (re.compile(r"^\s*Environment=", re.M), "export "),
    (re.compile(r"^\s*ExecStart=[-@:+!]*", re.M), ""),
    (re.compile(r"^\s*EnvironmentFile=-?", re.M), "source "),
)
_SOURCING: Final = ("source", ".", "--env-file")
_COMMENT = re.compile(r"^\s*#.*$", re.M)
_NESTED = re.compile(r"(sglang|launch_server)\S*\s.*--\w", re.S)
_MODULE = re.compile(r"(^|[./])launch_server(\.py)?$")


def parse(text: str, role: str) -> Command:
    """Return what ``text`` says; raises NotArguments, and ValueError for bad syntax."""
    try:
        documents = doctor_yaml.documents(text)
        if documents is not None:
            return _parse_yaml(documents, role)
        return parse_json(text) if _is_json(text) else parse_command(text, role)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_yaml(documents: list[Any], role: str) -> Command:
    manifest = read_manifest(documents)
    read = _engines_of(manifest.containers, role) or _engines_of(manifest.texts, role)
    if read:
        return chosen(read, role)
    flags = doctor_yaml.flags_of(documents[0]) if len(documents) == 1 else None
    if not flags or not FIELDS.keys() & flags:
        raise NotArguments("YAML without an engine in it")
    command = Command(flags)
    note_spelling(command, {})
    return command


def _engines_of(scripts: list[Script], role: str) -> list[Command]:
    """What can be read; raises ValueError where nothing can be and something should."""
    read, broken = [], []
    for script in scripts:
        try:
            command = parse_command(script.text, role, script.outside)
        except NotArguments:
            continue
        except ValueError as error:
            broken.append(error)
            continue
        command.release = script.release
        # Other programs have a --config, too.
        if command.certain or "model_path" in {*command.args, *command.unread}:
            read.append(command)
    if broken and not read:
        raise broken[0]
    return read


def _is_json(text: str) -> bool:
    """A list is JSON only where it can be read: ``[Unit]`` opens a systemd unit."""
    if text.lstrip().startswith("["):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return False
        return True
    return text.lstrip().startswith("{")


# -- JSON -------------------------------------------------------------------------------


def parse_json(text: str) -> Command:
    document = json.loads(text)
    if not isinstance(document, dict):
        raise NotArguments(f"JSON of a {type(document).__name__}, not an object")
    args = document.get("server_args", document)
    environ = document.get("environ")
    for name, value in (("server_args", args), ("environ", environ)):
        optional = name == "environ" and value is None
        if not isinstance(value, dict) and not optional:
            raise NotArguments(f"{name} is {json.dumps(value)[:40]}, not an object")
    release = document.get("version")
    if environ is not None:
        environ = {key: str(value) for key, value in environ.items()}
    command = Command(dict(args), environ, str(release) if release else None)
    note_spelling(command, {})
    return command


# -- text -------------------------------------------------------------------------------


def parse_command(
    text: str, role: str = "", outside: Mapping[str, str] | None = None
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
    command = chosen([_command(around, flags) for around, flags in found], role)
    _note_other_forms(command, text)
    return command


def _note_other_forms(command: Command, text: str) -> None:
    """Remember variables that the text names in a form that is not read, as YAML."""
    text = _COMMENT.sub("", text)
    for name in VARIABLES:
        known = name in command.unread or name in (command.environ or {})
        if not known and re.search(rf"\b{name}\b", text):
            command.unread[name] = "not written as NAME=value before the command"


def _all_commands(text: str, outside: Mapping[str, str]) -> Iterator[list[Word]]:
    """Yield all commands; one that is handed to another shell, as by ``bash -c``, too."""
    for words in commands(text, outside):
        inner = [
            word.text
            for word in words
            if _NESTED.search(word.text) and len(word.text) < len(text)
        ]
        for nested in inner:
            yield from _all_commands(nested, outside)
        if not inner:
            yield words


def _flags_of(words: list[Word]) -> list[Word] | None:
    """Return the flags of a command that starts an engine, else None."""
    texts = [word.text for word in words]
    for index, text in enumerate(texts):
        name = text.rpartition("/")[2]
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
        elif word.text in _SOURCING:
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
