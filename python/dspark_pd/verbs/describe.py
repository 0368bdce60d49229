"""``describe``: what an engine would be started with, as JSON for the doctor.

It stands in the place of the engine's command, so that the real shell, container or
supervisor has expanded every variable and file. Where SGLang is installed beside this
tool, its own parser reads the flags; elsewhere those are read that the doctor knows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from dspark_pd.doctor import arguments, sglang_parser
from dspark_pd.doctor.fields import relevant, settled
from dspark_pd.messages.errors import Refused, refuse
from dspark_pd.messages.result import Result
from dspark_pd.target.target import find_target

SCHEMA: Final = 1
_PATHS: Final = ("model_path", "speculative_draft_model_path")
_EPILOG: Final = """\
ARGV is the engine's command or its flags alone:
  dspark-pd describe -- python -m sglang.launch_server --model-path M ...
  dspark-pd describe -- sglang serve M ...
  PYTHON="dspark-pd describe --" ./start_prefill.sh > prefill.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    text = "do not load SGLang; read the flags that dspark-pd knows"
    parser.add_argument("--without-sglang", action="store_true", help=text)
    text = "the engine's command, behind --"
    parser.add_argument("argv", nargs="*", metavar="ARGV", help=text)


def run(options: argparse.Namespace) -> Result:
    """Describe the engine of ``options.argv`` with the environment of this process."""
    notes: list[str] = []
    try:
        words = arguments.argv_of(options.argv)
        args, unknown = _read(words.argv, options, notes)
    except arguments.NotArguments as error:
        hint = f"dspark-pd describe -- python -m {arguments.LAUNCHERS[0]} ..."
        hint += "; inside a container, run it there"
        refuse("U006", found=error, hint=hint)
    described = {
        "schema": SCHEMA,
        "server_args": _absolute(args),
        "environ": relevant({**os.environ, **words.environ}),
        "version": _release(),
    }
    if unknown:
        described["unknown"] = unknown
        notes.append(f"flags that are not read: {', '.join(unknown)}")
    lines = json.dumps(described, indent=1, sort_keys=True).splitlines()
    return Result(lines=lines, data=described, notes=notes, is_document=True)


def _read(
    argv: list[str], options: argparse.Namespace, notes: list[str]
) -> tuple[dict[str, Any], list[str]]:
    if not options.without_sglang and _has_sglang():
        if not options.quiet:
            text = "asking SGLang for its flags, which takes some seconds"
            print(f"{text} (--without-sglang does not)", file=sys.stderr, flush=True)
        try:
            args, unknown = sglang_parser.ask(argv)
        except sglang_parser.Unavailable as error:
            notes.append(f"SGLang's parser cannot be loaded ({error})")
        else:
            return {n: settled(n, value) for n, value in args.items()}, unknown
    notes.append("read without SGLang: only flags that dspark-pd knows")
    return arguments.parse(argv, Path())


def _has_sglang() -> bool:
    spec = importlib.util.find_spec("sglang")
    return spec is not None and spec.origin is not None


def _absolute(args: dict[str, Any]) -> dict[str, Any]:
    """Local folders by their full path: the doctor may run in another folder."""
    return {
        name: os.path.abspath(value)
        if name in _PATHS and isinstance(value, str) and os.path.isdir(value)
        else value
        for name, value in args.items()
    }


def _release() -> str | None:
    try:
        target = find_target(None)
    except Refused:
        return None
    return str(target.release) if target.release else None
