"""Results as text for a person or as one JSON document for a program."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import dspark_pd
from dspark_pd.messages import exit_codes
from dspark_pd.messages.result import Result

SCHEMA: Final = 1
MAX_SHOWN_PROBLEMS: Final = 10


class Unwritten(Exception):
    """Standard output does not take an answer; ``error`` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def write(text: str) -> None:
    """Write an answer, or raise Unwritten."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise Unwritten(error) from error


class Parser(argparse.ArgumentParser):
    """An argument parser whose help is an answer: argparse drops what it cannot write."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            super()._print_message(message, file)
        else:
            write(message)


def a_path(text: str) -> str:
    """Refuse what an unset variable leaves: an empty path would mean a default."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return text


def a_new_file(text: str) -> Path:
    """Refuse a path that no answer can be written to, before anything is done for it."""
    path = Path(a_path(text))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected a file")
    if not path.resolve().parent.is_dir():
        found = f"{text!r} is in no existing folder"
        raise argparse.ArgumentTypeError(f"{found}; mkdir -p {path.resolve().parent}")
    return path


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


def as_json(command: str | None, result: Result) -> None:
    # Nothing is written before all of it can be.
    write(json.dumps(envelope(command, result), indent=1) + "\n")


def as_text(result: Result, quiet: bool, verbose: bool) -> None:
    """Print the answer to stdout, and problems and notes to stderr."""
    if not quiet:
        target = [f"target  {result.target.shown}"] if result.target else []
        lines = [*target, *result.lines, *(result.details if verbose else ())]
        # Flushed, to keep the order for a reader who sees both streams in one terminal.
        write("".join(f"{line}\n" for line in lines))
        for note in result.notes:
            print(f"note: {note}", file=sys.stderr)
    elif result.is_document:
        write("\n".join(result.lines) + "\n")
    shown = result.problems if verbose else result.problems[:MAX_SHOWN_PROBLEMS]
    for problem in shown:
        print(problem.as_text(), file=sys.stderr)
    if len(shown) < len(result.problems):
        more = len(result.problems) - len(shown)
        print(f"... and {more} more; -v shows all", file=sys.stderr)
