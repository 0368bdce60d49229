"""Problems, their wording in ``error_catalogue.yml``, and how they travel.

Functions that can judge several things return a list of ``Problem``; functions that
cannot go on raise ``Refused`` with all the problems they know of. The CLI alone turns
them into text, JSON and an exit code.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import yaml

from dspark_pd.messages import exit_codes

PARTS: Final = ("title", "expected", "found", "cause", "next")
"""What every error says: what is wrong, what was wanted, what is there, why, what now."""
_ON_TARGET = re.compile(r"dspark-pd (status|diff|apply|revert)\b(?! --target)")


class Place(Protocol):
    """The target of a verb, as far as it is shown."""

    @property
    def shown(self) -> str: ...

    def as_dict(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class ErrorKind:
    """One error: templates for ``str.format`` and the values of their preview."""

    code: str
    exit_code: int
    title: str
    expected: str
    found: str
    cause: str
    next: str
    example: dict[str, Any]


@cache
def catalogue() -> dict[str, ErrorKind]:
    """Return all errors by code; read only when there is one to report."""
    path = Path(__file__).with_name("error_catalogue.yml")
    documents = yaml.safe_load(path.read_text(encoding="utf-8"))
    kinds = {}
    for code, item in documents.items():
        exit_code = getattr(exit_codes, item.pop("exit"))
        kinds[code] = ErrorKind(code=code, exit_code=exit_code, **item)
    return kinds


@dataclass(frozen=True)
class Problem:
    """One coded error with the values of its fields."""

    code: str
    fields: Mapping[str, object]
    target: str | None = None
    """The target as the user named it, for the commands in ``next``."""

    def on(self, target: str | None) -> Problem:
        return replace(self, target=target)

    @property
    def kind(self) -> ErrorKind:
        return catalogue()[self.code]

    @property
    def exit_code(self) -> int:
        return self.kind.exit_code

    def part(self, name: str) -> str:
        """Return the text of ``title``, ``expected``, ``found``, ``cause`` or ``next``."""
        template: str = getattr(self.kind, name)
        text = template.format(**self.fields)
        return on_target(text, self.target) if name == "next" else text

    def as_dict(self) -> dict[str, object]:
        return {"code": self.code, **{name: self.part(name) for name in PARTS}}

    def as_text(self) -> str:
        lines = [f"error[{self.code}] {self.part('title')}"]
        for label in PARTS[1:]:
            lines.append(f"  {label:<9}{self.part(label)}")
        return "\n".join(lines)


def on_target(text: str, target: str | None) -> str:
    """Name ``target`` in the commands of ``text`` that work on one."""
    if target is None:
        return text
    return _ON_TARGET.sub(lambda c: f"{c[0]} --target {shlex.quote(target)}", text)


class Refused(Exception):
    """The command cannot be carried out; ``problems`` says why, ``target`` where."""

    target: Place | None = None

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.part("title") for problem in problems))
        self.problems = problems

    @property
    def exit_code(self) -> int:
        return self.problems[0].exit_code


def refuse(code: str, **fields: object) -> NoReturn:
    """Raise ``Refused`` with one problem."""
    raise Refused([Problem(code, fields)])


@contextmanager
def about(target: Place) -> Iterator[None]:
    """Name the target, once it is found, in all that is refused from here on."""
    try:
        yield
    except Refused as refused:
        refused.target = refused.target or target
        raise
    except OSError as error:
        failed = Refused([from_os_error(error)])
        failed.target = target
        raise failed from error


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


def from_fault(error: Exception) -> Problem:
    """Return the problem for an unexpected exception."""
    from traceback import extract_tb

    import dspark_pd

    frames = extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f"{Path(last.filename).name}:{last.lineno}" if last else "nowhere"
    detail = f"{type(error).__name__}: {error}"[:300]
    fields = {"detail": detail, "place": place, "version": dspark_pd.__version__}
    return Problem("X901", fields)
