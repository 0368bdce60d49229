"""The one place that runs ast-grep.

ast-grep finds the places and indents our lines; it does not count, and it inserts again
on a second run. Counting and idempotence are done with its answers, in ``plan``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
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


@dataclass(frozen=True)
class Search:
    """One file to search: its path for messages, its text, and rules as JSON texts."""

    path: str
    source: bytes
    rules: tuple[str, ...]


def scan(searches: Iterable[Search]) -> dict[str, list[Match]]:
    """Return the matches of each search by its path, in file order.

    One process searches all files. Where it refuses the rules, each file is searched by
    itself, so that S204 can name the one whose rules are wrong.
    """
    searches = [search for search in searches if search.rules]
    found: dict[str, list[Match]] = {search.path: [] for search in searches}
    if not searches:
        return found
    done = _run(searches)
    if done.returncode != 0:
        if len(searches) == 1:
            _refuse_rules(searches[0].path, done.stderr)
        for search in searches:
            found |= scan([search])
        return found
    for item in json.loads(done.stdout or b"[]"):
        search = searches[int(Path(item["file"]).stem)]
        found[search.path].append(_match(item))
    for matches in found.values():
        matches.sort(key=lambda match: match.start)
    return found


def _run(searches: list[Search]) -> subprocess.CompletedProcess[bytes]:
    """Search copies of the texts: what is to be searched may not be what is installed."""
    with tempfile.TemporaryDirectory(prefix="dspark-pd-") as folder:
        names, documents = [], []
        for index, search in enumerate(searches):
            name = f"{index}.py"
            names.append(name)
            Path(folder, name).write_bytes(search.source)
            # A rule is for one file. JSON is a subset of YAML.
            rules = (json.loads(rule) for rule in search.rules)
            documents += [json.dumps({**rule, "files": [name]}) for rule in rules]
        Path(folder, "rules.yml").write_text("\n---\n".join(documents))
        command = [program(), "scan", "--rule", "rules.yml", "--json=compact", *names]
        try:
            return subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except OSError as error:
            _refuse_program(str(error))
        except subprocess.TimeoutExpired:
            _refuse_program(f"no answer within {_TIMEOUT_S} s")


def _refuse_rules(path: str, told: bytes) -> NoReturn:
    text = told.decode(errors="replace").partition("Stack backtrace")[0]
    detail = " ".join(text.split())[:400]
    refuse("S204", file=path, version=PINNED, detail=detail)


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
