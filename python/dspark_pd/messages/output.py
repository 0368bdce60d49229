"""Results as text for a person or as one JSON document for a program."""

from __future__ import annotations

import json
import sys
from typing import Any, Final, TextIO

import dspark_pd
from dspark_pd.messages import exit_codes
from dspark_pd.messages.result import Result

SCHEMA: Final = 1
MAX_SHOWN_PROBLEMS: Final = 10


def status_word(result: Result) -> str:
    if result.problems:
        return "error"
    return "differs" if result.exit_code == exit_codes.DIFFERS else "ok"


def envelope(command: str | None, result: Result) -> dict[str, Any]:
    """Return the JSON document; its keys are the same for success and refusal."""
    return {
        "schema": SCHEMA,
        "tool": {"name": "dspark-pd", "version": dspark_pd.__version__},
        "command": command,
        "status": status_word(result),
        "exit_code": result.exit_code,
        "target": result.target.as_dict() if result.target else None,
        "data": result.data,
        "notes": result.notes,
        "errors": [problem.as_dict() for problem in result.problems],
    }


def as_json(command: str | None, result: Result, out: TextIO) -> None:
    # Nothing is written before all of it can be.
    out.write(json.dumps(envelope(command, result), indent=1) + "\n")


def as_text(result: Result, quiet: bool, verbose: bool) -> None:
    """Print the answer to stdout, and problems and notes to stderr."""
    if not quiet:
        if result.target is not None:
            print(f"target  {result.target.shown}")
        for line in [*result.lines, *(result.details if verbose else ())]:
            print(line)
        # Keep the order for a reader who sees both streams in one terminal.
        sys.stdout.flush()
        for note in result.notes:
            print(f"note: {note}", file=sys.stderr)
    elif result.is_document:
        print("\n".join(result.lines))
    shown = result.problems if verbose else result.problems[:MAX_SHOWN_PROBLEMS]
    for problem in shown:
        print(problem.as_text(), file=sys.stderr)
    if len(shown) < len(result.problems):
        more = len(result.problems) - len(shown)
        print(f"... and {more} more; -v shows all", file=sys.stderr)
