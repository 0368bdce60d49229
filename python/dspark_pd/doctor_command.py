"""What a file says of one engine, and what of it could not be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark_pd.doctor_fields import FIELDS, VARIABLES, meant_by, variable_meant_by


class NotArguments(ValueError):
    """The text holds no arguments of an engine; the message says what it holds."""


@dataclass
class Command:
    """What a text says of one engine.

    ``unread`` has the expression of each field or variable without a value; ``sources``
    are places, not read, that may set more: flags if ``open_args``, variables if
    ``open_environ``. ``misspelt`` gives what an unknown name may mean, ``certain`` says
    that SGLang is started by its name.
    """

    args: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] | None = field(default_factory=dict)
    release: str | None = None
    unread: dict[str, str] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    misspelt: dict[str, str] = field(default_factory=dict)
    open_args: bool = False
    open_environ: bool = False
    count: int = 1
    certain: bool = False


def chosen(read: list[Command], role: str) -> Command:
    """Return the engine of ``role``, else the first, and count them all in it.

    Where a program is SGLang by its name, others only resemble one.
    """
    read = [c for c in read if c.certain] or read
    ours = [c for c in read if c.args.get("disaggregation_mode") == role]
    command = (ours or read)[0]
    command.count = sum(each.count for each in read)
    return command


def note_spelling(command: Command, typed: Mapping[str, str]) -> None:
    """Remember unknown names that look like known ones, and what they may mean."""
    for name in command.args:
        meant = meant_by(name)
        if meant and meant not in command.args:
            command.misspelt[typed.get(name, name)] = meant
    for name in [*(command.environ or {}), *command.unread]:
        meant = variable_meant_by(name)
        if meant:
            command.misspelt[name] = meant


def unknown_names(command: Command) -> Iterator[str]:
    """Yield the fields and variables that the doctor reads and cannot know here."""
    yield from (name for name in command.unread if name in {**FIELDS, **VARIABLES})
    yield from command.misspelt.values()
    if command.open_args:
        yield from (name for name in FIELDS if name not in command.args)
    if command.open_environ:
        given = command.environ or {}
        yield from (name for name in VARIABLES if name not in given)
