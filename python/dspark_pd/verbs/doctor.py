"""``doctor``: would this prefill and this decode engine work together?

Two engines come in, each as the address of a running server or as what is known of its
start; findings come out, each with its severity, its consequence and its fix. The rules
are the very ones the engines decide by (``doctor.tables``), plus checks that
need no peer (``doctor.checks``). Nothing is changed and nothing but ``GET``
is sent. Exit 1 when there is an error among the findings.
"""

from __future__ import annotations

import argparse
import textwrap

from dspark_pd.doctor.checks import check_findings
from dspark_pd.doctor.engine import ERROR, SEVERITIES, Engine, Finding
from dspark_pd.doctor.gaps import gap_findings
from dspark_pd.doctor.sources import read_engine
from dspark_pd.doctor.tables import agreement_findings, tail_findings
from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import Problem, Refused, refuse
from dspark_pd.messages.output import a_path
from dspark_pd.messages.result import Result
from dspark_pd.verbs.servers import add_api_key, api_key, seconds

_WIDTH = 88
_EPILOG = """\
a FILE is one of
  the JSON of dspark-pd describe, which stands in place of the engine's command
  a saved /server_info
  one flat command line, flags and NAME=value in front of it
  -, which reads one of these from stdin
Scripts, units and manifests are not read: let the real shell, container or supervisor run
dspark-pd describe -- with the engine's arguments, and give its output.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    text = "URL of the running engine, or what describes it"
    for flag in ("--prefill", "--decode"):
        parser.add_argument(
            flag, required=True, type=a_path, metavar="URL|FILE", help=text
        )
    text = "seconds to wait for an engine's answer (default: 5)"
    parser.add_argument("--timeout", type=seconds, default=5.0, metavar="S", help=text)
    add_api_key(parser)


def run(options: argparse.Namespace) -> Result:
    """Compare the two engines named in `options`."""
    key = api_key(options)
    prefill, decode = _read_both(options, key)
    findings = diagnose(prefill, decode)
    errors = any(finding.severity == ERROR for finding in findings)
    return Result(
        exit_code=exit_codes.DIFFERS if errors else exit_codes.OK,
        data={
            "would_work": not errors,
            "prefill": prefill.as_dict(),
            "decode": decode.as_dict(),
            "findings": [finding.as_dict() for finding in findings],
        },
        lines=render(prefill, decode, findings),
        details=_details(prefill, decode),
    )


def _read_both(options: argparse.Namespace, key: str | None) -> tuple[Engine, Engine]:
    """Read both engines; refuse with the problems of both."""
    if options.prefill == options.decode == "-":
        message = "argument --decode: stdin is read for --prefill already"
        refuse("U001", message=message, command="dspark-pd doctor")
    engines: list[Engine] = []
    problems: list[Problem] = []
    for role in ("prefill", "decode"):
        try:
            source = getattr(options, role)
            engines.append(read_engine(role, source, options.timeout, key))
        except Refused as refused:
            problems += refused.problems
    if problems:
        raise Refused(problems)
    prefill, decode = engines
    return prefill, decode


def diagnose(prefill: Engine, decode: Engine) -> list[Finding]:
    """All findings on a pair, the worst first, otherwise in the order of the tables."""
    findings = [*prefill.problems, *decode.problems]
    if not (prefill.broken or decode.broken):
        findings += agreement_findings(prefill, decode)
        findings += check_findings(prefill, decode)
        findings += gap_findings(prefill, decode)
        findings += [*tail_findings(prefill), *tail_findings(decode)]
    return sorted(findings, key=lambda f: SEVERITIES.index(f.severity))


def render(prefill: Engine, decode: Engine, findings: list[Finding]) -> list[str]:
    """The answer for a person: what was compared, the findings, the conclusion."""
    lines = [f"prefill  {prefill.shown}", f"decode   {decode.shown}", ""]
    for finding in findings:
        lines.append(f"{finding.severity}  [{finding.code}]")
        for label in ("message", "consequence", "fix"):
            lines += _wrapped(label, getattr(finding, label))
        lines.append("")
    counts = [
        f"{count} {severity}{'s' if count > 1 else ''}"
        for severity in SEVERITIES
        if (count := sum(finding.severity == severity for finding in findings))
    ]
    if any(finding.severity == ERROR for finding in findings):
        lines.append(f"This pair would not work: {', '.join(counts)}.")
    elif counts:
        lines.append(f"No errors found; {', '.join(counts)}.")
    else:
        lines.append("No problems found.")
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
