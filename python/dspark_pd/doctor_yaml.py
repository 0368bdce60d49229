"""Engines in YAML: a Kubernetes manifest, a compose file, the file of ``--config``.

A container becomes the script that it runs: its variables, then its command with its
arguments, quoted so that `doctor_files` reads it as the container would be given it.
Scripts that a manifest holds as text (a ConfigMap) are handed on as they are. A variable
whose value stands elsewhere (a Secret, ``envFrom``) stays an expression without a value.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_pd.doctor_fields import FIELDS, field_of, value_of

_TOP_KEYS = ("apiVersion", "services", "spec", "containers")
_TELLS = re.compile(rf'^[\s{{]*"?({"|".join(_TOP_KEYS)})"?\s*:', re.M)
_PLACES = ("containers", "initContainers", "services")
_ENGINE_TEXT = re.compile(r"(sglang|launch_server)\S*\s.*--\w", re.S)
_REFERENCE = re.compile(r"\$\((\w+)\)")
_SPECIAL = re.compile(r'(["\\`]|\$(?!\())')
_RELEASE = re.compile(r"sglang[^:]*:v?(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)")


@dataclass(frozen=True)
class Script:
    """What one container runs.

    ``outside`` are the variables that it starts with, ``release`` the SGLang of its
    image, if the tag tells.
    """

    text: str
    outside: Mapping[str, str]
    release: str | None = None


def scripts(text: str) -> list[Script] | None:
    """Return what a manifest runs; None for a text that is none."""
    if not _TELLS.search(text):
        return None
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, RecursionError):
        return None  # a template; what can be read of it as text is
    manifests = [d for d in documents if isinstance(d, dict) and d.keys() & _TOP_KEYS]
    return list(_scripts_in(manifests)) if manifests else None


def _scripts_in(node: Any) -> Iterator[Script]:
    if isinstance(node, str):
        if _ENGINE_TEXT.search(node):
            yield Script(node, {})
    elif isinstance(node, list):
        for item in node:
            yield from _scripts_in(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in _PLACES and isinstance(value, dict | list):
                named = value.values() if isinstance(value, dict) else value
                for container in named:
                    if isinstance(container, dict):
                        yield _script_of(container)
            else:
                yield from _scripts_in(value)


# -- one container ----------------------------------------------------------------------


def _script_of(container: dict[str, Any]) -> Script:
    # A list of a compose file is NAME=value; one of Kubernetes has name and value.
    known, lines = _variables(container.get("env"), container.get("environment"))
    for key in ("envFrom", "env_file"):
        if container.get(key):
            lines.append(f"source {key}")
    composed = any(key in container for key in ("entrypoint", "environment"))
    words = [
        _words(container.get(key), known) for key in ("entrypoint", "command", "args")
    ]
    lines.append(" ".join(word for word in words if word))
    found = _RELEASE.search(str(container.get("image") or ""))
    outside = {**os.environ, **known} if composed else known
    return Script("\n".join(lines), outside, found[1] if found else None)


def _variables(*places: Any) -> tuple[dict[str, str], list[str]]:
    """Return the values that are known, and the lines that set all of them."""
    known: dict[str, str] = {}
    lines = []
    for name, value in (pair for place in places for pair in _pairs(place)):
        if value is None:
            lines.append(f'export {name}="$(a value from elsewhere)"')
        else:
            known[name] = _expanded(value, known)
            lines.append(f"export {name}={shlex.quote(known[name])}")
    return known, lines


def _pairs(place: Any) -> Iterator[tuple[str, str | None]]:
    items = list(place.items()) if isinstance(place, dict) else place or []
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict):
            name, value = item.get("name"), item.get("value")
            if "valueFrom" not in item and value is None:
                value = ""
        elif isinstance(item, str):
            name, equals, text = item.partition("=")
            value = text if equals else None
        else:
            name, value = item
        if re.fullmatch(r"[A-Za-z_]\w*", str(name), re.A):
            yield str(name), _text(value)


def _text(value: Any) -> str | None:
    """A value as a container gets it: YAML's true is not Python's."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


def _words(command: Any, known: Mapping[str, str]) -> str:
    """Return a command as a shell would have to be given it."""
    if isinstance(command, str):  # a compose file's short form is split as by a shell
        return command.replace("$$", "$")
    words = [_text(word) or "" for word in command] if isinstance(command, list) else []
    return " ".join(_quoted(_expanded(word, known)) for word in words)


def _expanded(text: str, known: Mapping[str, str]) -> str:
    """Kubernetes puts variables of the container in the place of ``$(NAME)``."""
    return _REFERENCE.sub(lambda found: known.get(found[1], found[0]), text)


def _quoted(word: str) -> str:
    """Quote a word, but for a reference without a value: nobody may take it for one."""
    if _REFERENCE.search(word) and not _ENGINE_TEXT.search(word):
        return '"' + _SPECIAL.sub(r"\\\1", word) + '"'
    return shlex.quote(word)


# -- the file of --config ---------------------------------------------------------------


def config_flags(place: str) -> dict[str, Any] | None:
    """Return the flags that a file of ``--config`` sets; None if it cannot be read."""
    path = Path(place)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(document, dict | None):
        return None
    flags: dict[str, Any] = {}
    for key, value in (document or {}).items():
        name = field_of(str(key))
        if value is False and FIELDS.get(name) == "switch":
            continue
        if isinstance(value, list):
            if value:
                flags[name] = value if len(value) > 1 else value[0]
        elif isinstance(value, dict):
            flags[name] = json.dumps(value)
        elif value is True and FIELDS.get(name) == "switch":
            flags[name] = True
        else:
            text = _text(value) or "None"
            flags[name] = text if FIELDS.get(name) == "text" else value_of(text)
    return flags
