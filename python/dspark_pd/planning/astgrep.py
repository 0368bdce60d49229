"""The one place that runs ast-grep.

ast-grep finds the places and indents our lines; it does not count, and it inserts again
on a second run. Counting and idempotence are done with its answers, in ``plan``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from dspark_pd.messages.errors import refuse

PINNED: Final = "0.51.1"
_TIMEOUT_S: Final = 60


@dataclass(frozen=True)
class Match:
    """Where a rule matched and what its fix puts there; offsets are in bytes."""

    rule_id: str
    start: int
    end: int
    line: int
    replacement: str


@cache
def program() -> str:
    """Return the ast-grep to run: the one of this environment, else one on PATH."""
    name = "ast-grep.exe" if sys.platform == "win32" else "ast-grep"
    # The venv's bin holds a link to the base interpreter, so it is not resolved.
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        refuse(
            "F505",
            program="ast-grep",
            beside=beside.parent,
            detail="not found",
            cause="the package ast-grep-cli is not installed here",
            hint=f"pip install ast-grep-cli=={PINNED}",
        )
    return found


def as_document(rule: dict[str, Any]) -> str:
    """Return a rule as one YAML document; JSON is a subset of YAML."""
    return json.dumps(rule)


def scan(source: bytes, rules: Iterable[str], shown: str) -> list[Match]:
    """Return all matches of ``rules`` (JSON texts) in ``source``, in file order."""
    documents = "\n---\n".join(rules)
    command = [program(), "scan", "--inline-rules", documents]
    command += ["--stdin", "--json=compact"]
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except OSError as error:
        _refuse_program(str(error))
    except subprocess.TimeoutExpired:
        _refuse_program(f"no answer within {_TIMEOUT_S} s for {shown}")
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").partition("Stack backtrace")[0]
        detail = " ".join(told.split())[:400]
        refuse("S204", file=shown, version=PINNED, detail=detail)
    return [_match(item) for item in json.loads(done.stdout or b"[]")]


def _refuse_program(detail: str) -> NoReturn:
    refuse(
        "F505",
        program="ast-grep",
        beside=Path(sys.executable).parent,
        detail=detail,
        cause="a damaged or foreign ast-grep",
        hint=f"pip install --force-reinstall ast-grep-cli=={PINNED}",
    )


def _match(item: dict[str, Any]) -> Match:
    offsets = item.get("replacementOffsets") or item["range"]["byteOffset"]
    return Match(
        rule_id=item["ruleId"],
        start=offsets["start"],
        end=offsets["end"],
        line=item["range"]["start"]["line"] + 1,
        replacement=item.get("replacement", ""),
    )
