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
import shlex
import sys
from pathlib import Path
from typing import Any, Final

from dspark_pd.doctor import arguments, sglang_parser
from dspark_pd.doctor.fields import relevant, settled
from dspark_pd.messages.errors import Refused, refuse
from dspark_pd.messages.result import Result
from dspark_pd.target.target import find_target

SCHEMA: Final = 1
_SHELLS: Final = ("sh", "bash")
_SCRIPTS: Final = (".sh", ".bash")
_PATHS: Final = ("model_path", "speculative_draft_model_path")
_EPILOG: Final = """\
ARGV is the engine's command or its flags alone:
  dspark-pd describe -- python -m sglang.launch_server --model-path M ...
  dspark-pd describe -- sglang serve M ...

A script that runs sglang serve, such as scripts/launch/deepseek_v4_flash_prefill.sh, is
described when another program of that name comes first on PATH:
  mkdir -p /tmp/describe
  printf '#!/bin/sh\\nexec dspark-pd describe -- sglang "$@"\\n' > /tmp/describe/sglang
  chmod +x /tmp/describe/sglang
  PATH=/tmp/describe:$PATH ./start_prefill.sh > prefill.json
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
    except arguments.NotArguments as error:
        cause, hint = _no_engine(options.argv)
        refuse("U006", found=error, cause=cause, hint=hint)
    try:
        args, unknown = _read(words.argv, options, notes)
    except arguments.NotArguments as error:
        cause, hint = _bad_flags(str(error))
        refuse("U008", found=error, cause=cause, hint=hint)
    described = {
        "schema": SCHEMA,
        "server_args": _absolute(args),
        "environ": relevant({**os.environ, **words.environ}),
        "version": _release(),
    }
    if unknown:
        described["unknown"] = unknown
        notes.append(f"not read: {', '.join(unknown)}")
    lines = json.dumps(described, indent=1, sort_keys=True).splitlines()
    return Result(lines=lines, data=described, notes=notes, is_document=True)


def _no_engine(argv: list[str]) -> tuple[str, str]:
    """Return why words are no engine's command, and what to type instead."""
    engine = f"dspark-pd describe -- python -m {arguments.LAUNCHERS[0]} ..."
    if not argv or argv[-1] in (*arguments.LAUNCHERS, "serve"):
        return "the engine's flags are missing", f"{engine} with its flags"
    first = next((word for word in argv if not arguments.is_front(word)), "")
    name = Path(first).name
    if name in _SHELLS or name.endswith(_SCRIPTS):
        hint = f"if it runs sglang serve: PATH=/tmp/describe:$PATH {shlex.join(argv)}, with "
        hint += "the folder that dspark-pd describe --help tells how to make; "
        hint += f"else {engine} in it, in place of the engine"
        return "a script, which only its shell can read", hint
    if any(word in (*arguments.LAUNCHERS, "sglang") for word in argv[1:]):
        return (
            f"another program, {name}, in front of the engine's own command",
            f"put describe behind it: {first} ... {engine}",
        )
    return (
        f"{name} is no launcher of an engine that dspark-pd knows",
        f"{engine}; inside a container, run it there",
    )


def _bad_flags(found: str) -> tuple[str, str]:
    """Return why flags cannot be read, and what to do."""
    if "config" in found.lower():
        return (
            "the file of --config is missing, or is no YAML mapping of flags",
            "correct the path or the file, then repeat the command",
        )
    if "ambiguous" in found:
        return "a shortened flag that fits several", "give the flag in full"
    return (
        "a flag without its value, or a value that SGLang does not take",
        f"correct it; python -m {arguments.LAUNCHERS[0]} --help lists what it takes",
    )


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
