"""What a verb returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import Place, Problem


def count(number: int, noun: str) -> str:
    """Return a number of things as a person writes it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass
class Result:
    """The outcome of one verb.

    ``lines`` is the answer for a person, ``data`` the same for a program, ``notes`` is
    what a person should know besides, ``details`` what ``-v`` adds.
    """

    exit_code: int = exit_codes.OK
    target: Place | None = None
    data: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    is_document: bool = False
    """Whether ``lines`` are for another program, and printed with ``-q`` as well."""
