"""Commit messages in the form of SGLang's pull requests."""

from __future__ import annotations

from collections.abc import Iterable

from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Component, Module


def compose(
    purpose: Component,
    modules: Iterable[Module],
    hunks: Iterable[Hunk],
    tests: Iterable[str],
    formatter: str,
) -> str:
    """Return title, motivation, modifications, tests and how they were run."""
    added = [f"- new `{module.path}`: {module.what}" for module in modules]
    changed = [
        f"- `{hunk.target}`: {_lower_first(hunk.message)}{_link(hunk)}"
        for hunk in hunks
    ]
    tests = sorted(tests)
    listed = [f"- `{path}`" for path in tests] or ["- none of its own"]
    runs = [f"python3 {path}" for path in tests if "/test_" in path]
    sections = {
        "Motivation": [purpose.motivation.strip()],
        "Modifications": [*added, *changed],
        "Tests": listed,
        "How verified": [
            *(["Run on a CPU, without weights:", "", *_indented(runs)] if runs else []),
            "",
            f"Formatted with {formatter}.",
        ],
    }
    text = [purpose.title]
    for heading, lines in sections.items():
        text += ["", f"## {heading}", "", *lines]
    return "\n".join(text).replace("\n\n\n", "\n\n") + "\n"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _lower_first(text: str) -> str:
    first_word = text.split(" ", 1)[0]
    return (
        text
        if first_word.isupper() or "_" in first_word
        else text[0].lower() + text[1:]
    )


def _link(hunk: Hunk) -> str:
    return f" ({hunk.url})" if hunk.url else ""
