"""``dspark-pd doctor``: would this prefill and this decode engine work together?

Two engines come in, each as the address of a running server or as a file with its
arguments; findings come out, each with its severity, its consequence and its fix. The
rows are the very ones the engines decide by (`doctor_agreement`), plus checks that need
no peer, such as a flag that the engine will refuse (`doctor_checks`). Nothing is
changed and nothing but ``GET`` is sent. Exit 1 when the pair would not work.
"""

from __future__ import annotations

import argparse
import math
import os
import textwrap

from dspark_pd.doctor_agreement import REFUSE, Finding, agreement_findings
from dspark_pd.doctor_checks import engine_findings
from dspark_pd.doctor_inputs import Engine, read_engine
from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import refuse
from dspark_pd.messages.result import Result

_WIDTH = 88
_MAX_TIMEOUT_S = 3600
_SEVERITY_ORDER = ("refuse", "warn", "note")
_WORDS = {"refuse": "will not work", "warn": "look at this", "note": "good to know"}


_EPILOG = """\
a FILE is one of
  a start script or a command line, with the assignments and exports before it
  a systemd unit (Environment= and ExecStart= lines)
  a Kubernetes manifest or a compose file, rendered
  flags alone, or YAML as for --config
  JSON: server arguments by field name, or {"server_args": {}, "environ": {},
  "version": "0.5.23"}
Scripts are read, not run: ${NAME:-default} and variables that the file or the doctor's
own environment sets are expanded, "$@" counts as empty; the file of --config is read.
What cannot be read, such as a Secret, is named (DOC-ARGS), and nothing is refused for it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    text = "URL of the running engine, or a file with its arguments"
    parser.add_argument("--prefill", required=True, metavar="URL|FILE", help=text)
    parser.add_argument("--decode", required=True, metavar="URL|FILE", help=text)
    text = "seconds to wait for an engine's answer (default: 5)"
    parser.add_argument("--timeout", type=_seconds, default=5.0, metavar="S", help=text)
    text = "variable that holds the API key of the engines"
    parser.add_argument("--api-key-env", metavar="NAME", help=text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        wanted = f"a number of seconds above 0, at most {_MAX_TIMEOUT_S}"
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return seconds


def run(options: argparse.Namespace) -> Result:
    """Compare the two engines named in `options`."""
    key = _api_key(options.api_key_env)
    prefill = read_engine("prefill", options.prefill, options.timeout, key)
    decode = read_engine("decode", options.decode, options.timeout, key)
    findings = diagnose(prefill, decode)
    refused = any(finding.severity == REFUSE for finding in findings)
    return Result(
        exit_code=exit_codes.DIFFERS if refused else exit_codes.OK,
        data={
            "would_work": not refused,
            "prefill": prefill.as_dict(),
            "decode": decode.as_dict(),
            "findings": [finding.as_dict() for finding in findings],
        },
        lines=render(prefill, decode, findings),
        details=_details(prefill, decode),
    )


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        what = "holds no key" if key else "is not set"
        message = f"argument --api-key-env: the variable {name} {what}"
        refuse("U001", message=message, command="dspark-pd doctor")
    return key


def diagnose(prefill: Engine, decode: Engine) -> list[Finding]:
    """All findings on a pair, the worst first, otherwise in the order of the rows."""
    findings = [*prefill.problems, *decode.problems]
    if prefill.args and decode.args:
        findings += agreement_findings(prefill, decode)
        findings += engine_findings(prefill, decode)
    return sorted(findings, key=lambda f: _SEVERITY_ORDER.index(f.severity))


def render(prefill: Engine, decode: Engine, findings: list[Finding]) -> list[str]:
    """The answer for a person: what was compared, the findings, the conclusion."""
    lines = [f"prefill  {prefill.shown}", f"decode   {decode.shown}", ""]
    for finding in findings:
        lines.append(f"{_WORDS[finding.severity]}  [{finding.code}]")
        for label in ("message", "consequence", "fix"):
            lines += _wrapped(label, getattr(finding, label))
        lines.append("")
    refusals = sum(finding.severity == REFUSE for finding in findings)
    others = len(findings) - refusals
    if refusals:
        lines.append(f"This pair would not work: {refusals} reason(s), {others} more.")
    elif others:
        lines.append(
            f"Nothing known speaks against this pair; {others} remark(s) above."
        )
    else:
        lines.append("Nothing known speaks against this pair.")
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=f"    {label:<13}",
        subsequent_indent=" " * 17,
    )


def _details(prefill: Engine, decode: Engine) -> list[str]:
    keys = sorted(prefill.description.keys() | decode.description.keys())
    head = "compared value"
    first = max(map(len, (head, *keys)))
    lines = ["", f"{head:<{first}} {'prefill':<32} decode"]
    for key in keys:
        values = (str(e.description.get(key, "unknown")) for e in (prefill, decode))
        left, right = (
            value if len(value) < 32 else value[:28] + "..." for value in values
        )
        lines.append(f"{key:<{first}} {left:<32} {right}")
    return lines
