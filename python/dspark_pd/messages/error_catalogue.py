"""The errors of the tool: ``error_catalogue.yml`` as checked records."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from dspark_pd.messages import exit_codes

PARTS: Final = ("title", "expected", "found", "cause", "next")
"""What every error says: what is wrong, what was wanted, what is there, why, what now."""


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
    path = Path(__file__).with_suffix(".yml")
    documents = yaml.safe_load(path.read_text(encoding="utf-8"))
    kinds = {}
    for code, item in documents.items():
        exit_code = getattr(exit_codes, item.pop("exit"))
        kinds[code] = ErrorKind(code=code, exit_code=exit_code, **item)
    return kinds
