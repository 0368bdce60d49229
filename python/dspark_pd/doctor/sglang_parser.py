"""Asks SGLang's own argument parser what a command line means.

SGLang takes seconds to import and brings torch along, so it is imported in a process of
its own. Its parser alone is asked: nothing is resolved and no device is touched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from dspark_pd.doctor.arguments import NotArguments, stray

_TIMEOUT_S: Final = 300
_MARK: Final = "dspark-pd describe: "
_SCRIPT: Final = """
import argparse, dataclasses, json, sys
lines, mark = json.load(sys.stdin)
from sglang.srt.server_args import ServerArgs

class Refused(Exception):
    pass

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)

def merged(argv):
    if "--config" not in argv:
        return argv
    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    except ImportError:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    try:
        return ConfigArgumentMerger(parser).merge_config_with_args(argv)
    except (OSError, ValueError) as error:
        raise Refused(str(error))

def read(argv):
    try:
        given, rest = parser.parse_known_args(merged(argv))
    except Refused as refused:
        return {"refused": str(refused)}
    args = {k: v for k, v in vars(given).items() if v != parser.get_default(k)}
    args.pop("config", None)
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return {"args": args, "unknown": list(dict.fromkeys(flags)), "rest": rest}

def plain(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)

parser = Parser(prog="sglang serve")
ServerArgs.add_cli_args(parser)
print("\\n" + mark + json.dumps([read(argv) for argv in lines], default=plain))
"""


class Unavailable(Exception):
    """SGLang's parser cannot be asked; the message says why."""


def ask(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the server arguments that differ from SGLang's defaults, and flags and words
    that it does not know.

    Raises NotArguments where SGLang refuses the command line, Unavailable where it
    cannot be asked.
    """
    (found,) = ask_all([argv])
    if "refused" in found:
        raise NotArguments(f"SGLang refuses it: {found['refused']}")
    return found["args"], [*found["unknown"], *stray(argv, found["rest"])]


def ask_all(lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return for each command line ``args`` and ``unknown``, or why it is ``refused``."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            input=json.dumps([[list(argv) for argv in lines], _MARK]),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from None
    told = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not told:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unavailable(last[-1][:300])
    found: list[dict[str, Any]] = json.loads(told[-1].removeprefix(_MARK))
    return found
