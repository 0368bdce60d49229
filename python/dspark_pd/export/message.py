"""Commit messages in the form of SGLang's pull requests."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Commit, Module

_WIDTH = 88


def compose(
    commit: Commit,
    modules: Iterable[tuple[Module, bool]],
    hunks: Iterable[Hunk],
    files: Iterable[str],
    verified: Sequence[Sequence[str]],
    formatter: str,
) -> str:
    """Return a title and the sections of SGLang's pull-request template.

    Args:
        modules: those that the commit changes, and whether they are new.
        files: the paths of all that it changes.
        verified: rows of the table of what was verified where, its head first.
    """
    changed = [
        _item(f"{'new ' if new else ''}`{module.path}`: {module.what}")
        for module, new in modules
    ]
    changed += [
        _item(f"`{hunk.target}`: {_lower_first(hunk.message)}{_link(hunk)}")
        for hunk in hunks
    ]
    paths = sorted(files)
    runs = [f"    python3 {path}" for path in paths if "/test_" in path]
    has_docs = any(path.endswith(".mdx") for path in paths)
    sections = {
        "Motivation": [commit.motivation.strip()],
        "Modifications": changed,
        "Accuracy Tests": [
            *_verified(verified),
            *(["Unit tests, on a CPU and without weights:", "", *runs] if runs else []),
        ],
        "Speed Tests and Profiling": [
            "Not measured: no part of this series was run on a GPU."
        ],
        "Checklist": [
            f"- [x] Formatted with {formatter} and isort.",
            f"- [{'x' if runs else ' '}] Unit tests are added and registered for CI.",
            f"- [{'x' if has_docs else ' '}] Documentation is updated.",
            "- [ ] Accuracy and speed on a GPU.",
        ],
    }
    text = [commit.title]
    for heading, lines in sections.items():
        text += ["", f"## {heading}", "", *lines]
    return "\n".join(text).replace("\n\n\n", "\n\n") + "\n"


def _verified(rows: Sequence[Sequence[str]]) -> list[str]:
    if len(rows) < 2:
        return []
    (_, *heads), *claims = rows
    places = [head.rstrip(")").partition(" (") for head in heads]
    intro = ["With the whole series applied."]
    intro += [f"{name}: {details}." for name, _, details in places if details]
    lines = []
    for claim, *found in claims:
        pairs = zip(places, found, strict=True)
        told = "; ".join(f"{name}: {what}" for (name, _, _), what in pairs)
        lines.append(_item(f"{claim}. {told}"))
    return [*textwrap.wrap(" ".join(intro), _WIDTH), "", *lines, ""]


def _item(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _lower_first(text: str) -> str:
    first_word = text.split(" ", 1)[0]
    return (
        text
        if first_word.isupper() or "_" in first_word
        else text[0].lower() + text[1:]
    )


def _link(hunk: Hunk) -> str:
    return f" ({hunk.url})" if hunk.url else ""
