"""Options of the verbs that talk to running servers."""

from __future__ import annotations

import argparse
import math
import os

from dspark_pd.messages.errors import refuse

_MAX_TIMEOUT_S = 3600


def seconds(text: str) -> float:
    """The value of an option that is a time."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= _MAX_TIMEOUT_S:
        wanted = f"a number of seconds above 0, at most {_MAX_TIMEOUT_S}"
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return found


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """The option that names the key, and never holds it."""
    text = "variable that holds the API key of the engines"
    parser.add_argument("--api-key-env", metavar="NAME", help=text)


def api_key(options: argparse.Namespace) -> str | None:
    """The key in the variable that was named; refuses with U001 a variable without."""
    name = options.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        what = "holds no key" if key else "is not set"
        message = f"argument --api-key-env: the variable {name} {what}"
        refuse("U001", message=message, command=f"dspark-pd {options.verb}")
    return key
