"""The figures as a table for people and as data for programs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dspark_pd.measure.client import Served
from dspark_pd.measure.diagnosis import Finding
from dspark_pd.measure.statistics import (
    REST,
    Figure,
    Measured,
    Speed,
    can_be_named,
    lowest,
)

SCHEMA: Final = 1
_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_ASSERTION = re.compile(r"\s*(\S+?)\s*(>=|<=|==|>|<)\s*([0-9.]+)\s*")
_NUMBER = re.compile(r"\d+")
_MOST_KINDS: Final = 5
_SINGLE: Final = (
    "accept_length",
    "ratio",
    "reference_accept_length",
    "failed",
    "without_speculation",
    "same_text",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "loss_ends_at",
)
_GROUPS: Final = ("step", "prompt", "tier", "prefill")
NAMES: Final = (
    f"{', '.join(_SINGLE)}; ratio.G, the lowest ratio of all G; ratio.G.NAME and "
    f"accept_length.G.NAME; where G is one of {', '.join(_GROUPS)}"
)


@dataclass(frozen=True)
class Assertion:
    """``figure op limit``, as it was given."""

    text: str
    figure: str
    op: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Assertion:
        """Raises ValueError with what is wrong."""
        found = _ASSERTION.fullmatch(text)
        if not found:
            raise ValueError(f"{text} is not FIGURE>=NUMBER")
        figure, op, limit = found.groups()
        base, _, group = figure.partition(".")
        kind, named, name = group.partition(".")
        known = figure in _SINGLE
        if base == "ratio" and not named:
            known = known or kind in _GROUPS
        elif base in ("ratio", "accept_length"):
            known = known or can_be_named(kind, name)
        if not known:
            raise ValueError(f"no figure {figure}; there are {NAMES}")
        return cls(text, figure, op, float(limit))

    def holds(self, figures: Mapping[str, float | None]) -> bool:
        """A figure that was not measured holds nothing."""
        value = figures.get(self.figure)
        return value is not None and _COMPARE[self.op](value, self.limit)


def groups(measured: Measured) -> dict[str, dict[str, Figure]]:
    """All figures but the overall one, by the kind of group."""
    return {
        "step": measured.by_step(),
        "prompt": measured.by_prompt_length(),
        "tier": measured.by_tier(),
        "prefill": measured.by_prefill(),
    }


def flat(measured: Measured) -> dict[str, float | None]:
    """Every figure by the name that ``--assert`` uses."""
    overall, speed = measured.overall, Speed.of(measured.good, measured.seconds)
    found: dict[str, float | None] = {
        "accept_length": overall.accept_length,
        "ratio": overall.ratio,
        "reference_accept_length": overall.reference,
        "failed": len(measured.failed),
        "without_speculation": measured.without_speculation,
        "same_text": measured.same_text,
        "output_throughput": speed.output_throughput,
        "mean_ttft_ms": speed.mean_ttft_ms,
        "median_ttft_ms": speed.median_ttft_ms,
        "loss_ends_at": measured.loss_ends_at(),
    }
    for kind, figures in groups(measured).items():
        found[f"ratio.{kind}"] = lowest(figures)
        for name, figure in figures.items():
            found[f"ratio.{kind}.{name}"] = figure.ratio
            found[f"accept_length.{kind}.{name}"] = figure.accept_length
    return found


def as_data(
    measured: Measured, findings: Sequence[Finding], assertions: Sequence[Assertion]
) -> dict[str, Any]:
    """The report for programs; names are those of SGLang's benchmark client."""
    figures = flat(measured)
    data: dict[str, Any] = {
        "measure_schema": SCHEMA,
        "planned": measured.planned,
        "completed": len(measured.good),
        "failed": len(measured.failed),
        **measured.overall.as_dict(),
        **Speed.of(measured.good, measured.seconds).as_dict(),
        "without_speculation": measured.without_speculation,
        "unread_steps": measured.unread_steps,
    }
    if measured.reference is not None:
        good = [s for s in measured.reference if s.error is None]
        data["same_text"] = measured.same_text
        data["loss_ends_at"] = measured.loss_ends_at()
        data["reference"] = {
            "completed": len(good),
            "failed": len(measured.reference_failed),
            "unread_steps": measured.reference_unread_steps,
            "errors": _errors_as_data(measured.reference_failed),
            **Speed.of(good, measured.reference_seconds).as_dict(),
        }
    for kind, found in groups(measured).items():
        data[f"by_{kind}"] = {name: f.as_dict() for name, f in found.items()}
    data["findings"] = [finding.as_dict() for finding in findings]
    data["asserts"] = [
        {"assert": a.text, "found": figures.get(a.figure), "holds": a.holds(figures)}
        for a in assertions
    ]
    data["errors"] = _errors_as_data(measured.failed)
    return data


def as_lines(
    measured: Measured, findings: Sequence[Finding], assertions: Sequence[Assertion]
) -> list[str]:
    """The report for a person."""
    lines = [*_table(measured), "", *_summary(measured)]
    lines += failures(measured)
    for finding in findings:
        lines += ["", f"{finding.code}  {finding.cause}"]
        lines += [f"    seen  {finding.seen}", f"    next  {finding.next}"]
    if not findings and measured.reference is not None:
        compared = measured.overall.ratio is not None
        text = "No loss found." if compared else "Nothing was compared: no verdict."
        lines += ["", text]
    told = asserted(measured, assertions)
    return [*lines, *([""] if told else []), *told]


def asserted(measured: Measured, assertions: Sequence[Assertion]) -> list[str]:
    """One line for each assertion; those that do not hold begin with FAIL."""
    figures, lines = flat(measured), []
    for a in assertions:
        value = figures.get(a.figure)
        shown = "not measured" if value is None else f"{value:.4g}"
        word = "ok  " if a.holds(figures) else "FAIL"
        lines.append(f"{word}  {a.text}  ({shown})")
    return lines


def failures(measured: Measured) -> list[str]:
    """The most frequent errors of requests, a line for each kind."""
    lines = []
    for title, served in (
        ("failed", measured.failed),
        ("failed on the reference", measured.reference_failed),
    ):
        kinds = _errors(served)
        lines += [f"{title}: {n}x {error}" for error, n in kinds[:_MOST_KINDS]]
        if len(kinds) > _MOST_KINDS:
            rest = sum(n for _, n in kinds[_MOST_KINDS:])
            lines.append(f"{title}: {rest}x other errors; --json lists them")
    return lines


def _table(measured: Measured) -> list[str]:
    """One line for each figure; the time to the first token is a median."""
    with_reference = measured.reference is not None
    rows: list[tuple[str, ...]] = [_HEADER]
    rows.append(_row("all", measured.overall))
    titles = {
        "step": "step {}",
        "prompt": "prompt of {} tokens",
        "tier": "prompt {}",
        "prefill": "prefill {}",
    }
    for kind, figures in groups(measured).items():
        if kind == "prefill" and list(figures) == ["unknown"]:
            continue
        for name, figure in figures.items():
            title = f"steps {REST}" if name == REST else titles[kind].format(name)
            rows.append(_row(title, figure))
    width = max(len(row[0]) for row in rows)
    shown = len(_HEADER) if with_reference else 4
    return [
        "  ".join([row[0].ljust(width), *(c.rjust(13) for c in row[1:shown])]).rstrip()
        for row in rows
    ]


_HEADER: Final = (
    "",
    "requests",
    "first token",
    "accept length",
    "reference",
    "ratio",
)


def _row(title: str, figure: Figure) -> tuple[str, ...]:
    first = figure.median_ttft_ms
    return (
        title,
        str(figure.requests),
        "" if first is None else f"{first:.0f} ms",
        _number(figure.accept_length, 2),
        _number(figure.reference, 2),
        _number(figure.ratio, 3),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _summary(measured: Measured) -> list[str]:
    mine = Speed.of(measured.good, measured.seconds)
    sides = [("measured", mine)]
    if measured.reference is not None:
        good = [s for s in measured.reference if s.error is None]
        sides.append(("reference", Speed.of(good, measured.reference_seconds)))
    lines = [
        f"{name}: {_number(speed.output_throughput, 1)} tokens/s, first token after "
        f"{_number(speed.median_ttft_ms, 0)} ms (median), "
        f"{_number(speed.mean_ttft_ms, 0)} ms (mean)"
        for name, speed in sides
    ]
    share = measured.without_speculation
    if share is not None:
        lines.append(f"requests without speculation: {share:.0%}")
    if measured.same_text is not None:
        lines.append(f"same text as the reference: {measured.same_text:.0%}")
        end = measured.loss_ends_at()
        if measured.overall.ratio is not None:
            text = {1: "no step has a loss", None: "the loss does not end"}
            lines.append(text.get(end, f"the loss ends at step {end}"))
    return lines


def _errors(failed: Sequence[Served]) -> list[tuple[str, int]]:
    """The first error of each kind and how many there are; numbers make no new kind."""
    kinds: dict[tuple[int | None, str], list[str]] = {}
    for served in failed:
        text = _text(served)
        kinds.setdefault((served.status, _NUMBER.sub("N", text)), []).append(text)
    found = [(texts[0], len(texts)) for texts in kinds.values()]
    return sorted(found, key=lambda kind: -kind[1])


def _errors_as_data(failed: Sequence[Served]) -> list[dict[str, Any]]:
    return [{"requests": number, "error": text} for text, number in _errors(failed)]


def _text(served: Served) -> str:
    tokens = served.completion_tokens
    after = f" after {tokens} tokens" if tokens else ""
    return f"{served.error}{after}{_advice(served)}"


def _advice(served: Served) -> str:
    error = (served.error or "").lower()
    if any(word in error for word in ("context length", "longer than", "too long")):
        return "; next: shorter prompts, or fewer --new-tokens"
    if "stream ended" in error or "broke off" in error:
        return "; next: read the logs of the router and of decode at that time"
    if "timed out" in error:
        return "; next: a longer --timeout, or a lower --concurrency"
    return ""
