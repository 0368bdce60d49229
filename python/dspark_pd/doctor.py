"""``dspark-pd doctor``: would this prefill and this decode engine work together?

Two engines come in, each as the address of a running server or as a file with its
arguments; findings come out, each with its severity, its consequence and its fix. The
rows are the very ones the engines decide by (`doctor_agreement`), plus checks that need
no peer, such as a flag that the engine will refuse (`doctor_checks`). Nothing is
changed and nothing but ``GET`` is sent. Exit 1 when the pair would not work.
"""

from __future__ import annotations

import argparse
import textwrap

from dspark_pd import exit_codes
from dspark_pd.doctor_agreement import REFUSE, Finding, agreement_findings
from dspark_pd.doctor_checks import engine_findings
from dspark_pd.doctor_inputs import Engine, read_engine
from dspark_pd.result import Result

_WIDTH = 88
_SEVERITY_ORDER = ("refuse", "warn", "note")
_WORDS = {"refuse": "will not work", "warn": "look at this", "note": "good to know"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    text = (
        "URL of the running engine, or a file with its arguments (command line or JSON)"
    )
    parser.add_argument("--prefill", required=True, metavar="URL|FILE", help=text)
    parser.add_argument("--decode", required=True, metavar="URL|FILE", help=text)
    text = "seconds to wait for an engine's answer (default: 5)"
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help=text)


def run(options: argparse.Namespace) -> Result:
    """Compare the two engines named in `options`."""
    prefill = read_engine("prefill", options.prefill, options.timeout)
    decode = read_engine("decode", options.decode, options.timeout)
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
    lines = ["", f"{'compared value':<20} {'prefill':<32} decode"]
    keys = sorted(prefill.description.keys() | decode.description.keys())
    for key in keys:
        values = (str(e.description.get(key, "unknown")) for e in (prefill, decode))
        left, right = (
            value if len(value) < 32 else value[:28] + "..." for value in values
        )
        lines.append(f"{key:<20} {left:<32} {right}")
    return lines
