"""The ``dspark-pd`` command: parse, run one verb, print, exit.

Imports are inside the functions that need them: ``--help`` and a mistyped option answer
at once, and no verb pays for another.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import dspark_pd
from dspark_pd.messages import exit_codes, output

_VERBS: Final = {
    "status": "what each hunk is to the target: applied, needed, not needed, conflict",
    "list": "the hunks of the set, or one of them in full",
    "diff": "the lines that apply would change",
    "apply": "put the set on the target; twice is the same as once",
    "revert": "take it off again, byte for byte",
    "export": "write a branch or patch in SGLang's own form on a checkout",
    "describe": "print what an engine would be started with, for the doctor",
    "doctor": "compare a prefill and a decode engine before traffic",
    "measure": "accept length of a live deployment, by step, cache tier and prefill",
    "explain": "what is known of a hunk or of a code",
    "demo": "run prefill, decode and router with tiny models on this machine",
}
_MODULES: Final = {"list": "listing"}
_OWN_OPTIONS: Final = ("export", "describe", "doctor", "measure", "explain")
_GO_ON: Final = "dspark-pd apply or revert"
_PLANNING: Final = ("status", "diff", "apply", "revert")


class _Parser(output.Parser):
    """An argument parser whose errors are coded like all others."""

    asked: str | None = None
    """The verb on the command line, if it is one."""

    def error(self, message: str) -> NoReturn:
        from dspark_pd.messages.errors import refuse

        # An unknown option is found by the parser of all verbs.
        asked = [self.asked] if self.asked and " " not in self.prog else []
        refuse("U001", message=message, command=" ".join([self.prog, *asked]))


def build_parser(asked: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all verbs.

    A large verb defines its own options, and only when it is the one ``asked`` for.
    """
    description = "A patch set on released SGLang: apply it, explain it, revert it."
    codes = "\n".join(f"  {code}  {text}" for code, text in exit_codes.MEANINGS.items())
    parser = _Parser(
        prog="dspark-pd",
        description=description,
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.asked = asked if asked in _VERBS else None
    version = f"%(prog)s {dspark_pd.__version__}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in _VERBS.items():
        if verb != "demo":
            sub = verbs.add_parser(
                verb, help=text, description=text, allow_abbrev=False
            )
            _add_options(verb, sub)
            if verb == asked and verb in _OWN_OPTIONS:
                _module_of(verb).add_arguments(sub)
    verbs.add_parser("demo", help=_VERBS["demo"], add_help=False)
    return parser


def _add_options(verb: str, parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    if verb in _PLANNING:
        _add_target(parser)
    if verb in (*_PLANNING, "list", "export"):
        _add_component(parser, "all" if verb == "list" else "all but cpu")
    if verb in ("status", "diff", "apply", "export"):
        text = (
            "treat the target as this release: none can be read, or it is a newer one"
        )
        parser.add_argument(
            "--assume-version", metavar="X.Y.Z", type=_release, help=text
        )
    if verb == "apply":
        text = "check everything, write nothing; exit 1 if apply would change something"
        parser.add_argument("--dry-run", action="store_true", help=text)
    elif verb == "revert":
        text = "restore originals over edited files, keeping each edit as FILE.edited"
        parser.add_argument("--discard-edits", action="store_true", help=text)
    elif verb == "list":
        text = "one hunk, in full, or the hunks of one upstream file"
        parser.add_argument(
            "id", nargs="?", type=output.a_path, metavar="ID|FILE", help=text
        )
        text = "every error message, with made-up values"
        parser.add_argument("--errors", action="store_true", help=text)
        text = "check the set itself (needs a clone of the repository)"
        parser.add_argument("--check", action="store_true", help=text)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="errors only")
    loudness.add_argument("-v", "--verbose", action="store_true", help="more detail")
    hidden = argparse.SUPPRESS
    parser.add_argument("--overlay", type=Path, default=None, help=hidden)


def _add_target(parser: argparse.ArgumentParser) -> None:
    text = (
        "a checkout, a venv, a python, a site-packages or a folder sglang; "
        "default: the SGLang of this interpreter"
    )
    parser.add_argument("--target", metavar="PATH", type=output.a_path, help=text)


def _add_component(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"a part of the set, or all (repeatable; default: {default})"
    parser.add_argument("--component", action="append", metavar="NAME", help=text)


def _release(text: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text))
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"{text} is not a release") from None


def _module_of(verb: str) -> Any:
    return importlib.import_module(f"dspark_pd.verbs.{_MODULES.get(verb, verb)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verb = given[0] if given and given[0] in _VERBS else None
    ours = _divided(given)[0]
    loud = bool({"-v", "--verbose"} & set(ours))
    in_json = "--json" in ours and verb != "demo"
    options = argparse.Namespace(
        verb=verb, json=in_json, quiet=False, verbose=loud, target=None
    )
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A path may hold bytes, or letters, that the terminal cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if verb == "demo":
            # The bed parses its own options: they are an engine launcher's.
            demo = importlib.import_module("dspark_pd.bed.demo")
            return int(demo.main(given[1:]))
        return _finish(*_run(given, options))
    except output.Unwritten as lost:
        return _unwritten(options, lost.error, exit_codes.OK)
    except Exception as error:
        # The last resort: no traceback, and no exit code that means something else.
        from dspark_pd.messages.errors import from_fault

        if loud:
            traceback.print_exception(error)
        return _finish(options, _refusal([from_fault(error)]))
    except KeyboardInterrupt:
        from dspark_pd.messages.errors import on_target

        text = "interrupted"
        if options.verb in ("apply", "revert"):
            text += on_target(f"; {_GO_ON} goes on from here", options.target)
        print(text, file=sys.stderr)
        return exit_codes.INTERRUPTED


def _run(given: list[str], options: Any) -> tuple[argparse.Namespace, Any]:
    """Run a verb; return its options, as far as they could be parsed, and its result."""
    from dspark_pd.messages.errors import Refused, from_os_error

    try:
        ours, engines = _divided(given)
        build_parser(given[0] if given else None).parse_args(ours, options)
        if engines is not None:
            options.argv = engines
        return options, _module_of(options.verb).run(options)
    except Refused as refused:
        return options, _refusal(refused.problems, refused.target)
    except OSError as error:
        return options, _refusal([from_os_error(error)])


def _divided(given: list[str]) -> tuple[list[str], list[str] | None]:
    """Return our words and, for ``describe``, the engine's words behind ``--``."""
    if given[:1] != ["describe"] or "--" not in given:
        return given, None
    at = given.index("--")
    return given[:at], given[at + 1 :]


def _refusal(problems: list[Any], target: Any = None) -> Any:
    from dspark_pd.messages.result import Result

    code = problems[0].exit_code
    return Result(exit_code=code, target=target, problems=problems)


def _replace_closed_streams() -> None:
    """Give a stream that the caller closed (``>&-``) a place to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _finish(options: argparse.Namespace, result: Any) -> int:
    result.problems = [problem.on(options.target) for problem in result.problems]
    try:
        if options.json:
            output.as_json(options.verb, result)
        else:
            output.as_text(result, options.quiet, options.verbose)
    except output.Unwritten as lost:
        return _unwritten(options, lost.error, int(result.exit_code))
    except OSError as error:
        return _unwritten(options, error, int(result.exit_code))
    return int(result.exit_code)


def _unwritten(options: argparse.Namespace, error: OSError, code: int) -> int:
    """Say that the answer is lost; what was done to a target stays done."""
    from dspark_pd.messages.errors import Problem

    with contextlib.suppress(OSError, ValueError):
        # What is left in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        # The reader, such as head, has seen enough.
        return code
    problem = Problem("F506", {"detail": str(error)}, options.target)
    with contextlib.suppress(OSError):
        print(problem.as_text(), file=sys.stderr)
    return problem.exit_code
