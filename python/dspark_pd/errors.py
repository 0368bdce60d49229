"""Problems and how they travel.

Functions that can judge several things return a list of ``Problem``; functions that
cannot go on raise ``Refused`` with all the problems they know of. The CLI alone turns
them into text, JSON and an exit code.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from dspark_pd.error_catalogue import PARTS, ErrorKind, catalogue


@dataclass(frozen=True)
class Problem:
    """One coded error with the values of its fields."""

    code: str
    fields: Mapping[str, object]

    @property
    def kind(self) -> ErrorKind:
        return catalogue()[self.code]

    @property
    def exit_code(self) -> int:
        return self.kind.exit_code

    def part(self, name: str) -> str:
        """Return the text of ``title``, ``expected``, ``found``, ``cause`` or ``next``."""
        template: str = getattr(self.kind, name)
        return template.format(**self.fields)

    def as_dict(self) -> dict[str, object]:
        return {"code": self.code, **{name: self.part(name) for name in PARTS}}

    def as_text(self) -> str:
        lines = [f"error[{self.code}] {self.part('title')}"]
        for label in PARTS[1:]:
            lines.append(f"  {label:<9}{self.part(label)}")
        return "\n".join(lines)


class Refused(Exception):
    """The command cannot be carried out; ``problems`` says why."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.part("title") for problem in problems))
        self.problems = problems

    @property
    def exit_code(self) -> int:
        return self.problems[0].exit_code


def refuse(code: str, **fields: object) -> NoReturn:
    """Raise ``Refused`` with one problem."""
    raise Refused([Problem(code, fields)])


UNCHANGED = "nothing was changed"
HALF_DONE = "the state is recorded: run dspark-pd apply or revert"


def from_os_error(error: OSError, left: str = UNCHANGED) -> Problem:
    """Return the problem for a failed system call; ``left`` says how it ended."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        code = "F501"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        code = "F502"
    else:
        code = "F503"
    path = error.filename or "the target"
    return Problem(code, {"path": path, "detail": str(error), "left": left})
