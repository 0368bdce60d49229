"""Expressions of manifests and compose files: ``$(NAME)``, ``${NAME:-default}``.

Kubernetes puts variables of the container in their place, compose those of the shell
that runs it and of the ``.env`` beside its file. An expression without a value is kept
in one piece, marked, until the word that holds it is quoted as a command's output: so
nobody takes it for a value.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

_KUBERNETES = re.compile(r"\$\$|\$\((\w+)\)")
_COMPOSE = re.compile(
    r"\$\$|\$\{(\w+)(?:(:?[-?+])((?:[^{}]|\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)"
)
_TEMPLATE = re.compile(r"\{\{.*?\}\}", re.S)
# Around an expression without a value, until the word is quoted.
_OPEN, _CLOSE, _SPACE = "\ue000", "\ue001", "\ue002"
_UNKNOWN = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.S)
_SPECIAL = re.compile(r'(["\\`$])')
_UNSHOWN = re.compile(r"[^\w .:{}-]")
_ENV_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=(.*)", re.A)

Expand = Callable[[str], str]


def shell_of(folder: Path | None) -> dict[str, str]:
    """Variables of the shell that runs compose, and of the ``.env`` beside its file."""
    shell = dict(os.environ)
    try:
        text = (folder / ".env").read_text(encoding="utf-8") if folder else ""
    except (OSError, ValueError):
        text = ""
    for line in text.splitlines():
        found = _ENV_LINE.fullmatch(line)
        if found:
            value = found[2].strip()
            in_quotes = value[:1] in ("'", '"') and value[:1] == value[-1:]
            shell.setdefault(found[1], value[1:-1] if in_quotes else value)
    return shell


def unknown(expression: str) -> str:
    """An expression without a value, in one piece for whoever splits words."""
    shown = re.sub(r"\s+", _SPACE, _UNSHOWN.sub("", expression))
    return f"{_OPEN}{shown}{_CLOSE}"


ELSEWHERE_VALUE = unknown("a value from elsewhere")


def expander(known: Mapping[str, str | None], *, composed: bool) -> Expand:
    """Return what puts values in the place of a file's own expressions.

    ``known`` has a container's own variables, or, where ``composed``, those of the shell
    that runs compose: a service's own never count there.
    """

    def kubernetes(found: re.Match[str]) -> str:
        value = "$" if found[1] is None else known.get(found[1])
        return unknown(found[1]) if value is None else value

    def compose(found: re.Match[str]) -> str:
        name = found[1] or found[4]
        if name is None:
            return "$"
        operator, other = found[2] or "", _COMPOSE.sub(compose, found[3] or "")
        value = known.get(name)
        missing = value is None or (operator.startswith(":") and not value)
        if operator.endswith("+"):
            return "" if missing else other
        if operator.endswith("-") and missing:
            return other
        return unknown(name) if value is None else value

    def expand(text: str) -> str:
        text = _TEMPLATE.sub(lambda found: unknown(found[0]), text)
        if composed:
            return _COMPOSE.sub(compose, text)
        return _KUBERNETES.sub(kubernetes, text)

    return expand


def quoted(word: str) -> str:
    """Quote a word; an expression without a value becomes a command's output."""
    parts = _UNKNOWN.split(word)
    if len(parts) == 1:
        return shlex.quote(word)
    texts = [_SPECIAL.sub(r"\\\1", text) for text in parts[::2]]
    shown = [f"$({text.replace(_SPACE, ' ')})" for text in parts[1::2]]
    return '"' + "".join(a + b for a, b in zip(texts, [*shown, ""], strict=True)) + '"'


def is_unknown(word: str) -> bool:
    """Whether a word holds an expression without a value."""
    return _UNKNOWN.search(word) is not None
