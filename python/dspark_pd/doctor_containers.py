"""What the containers of a Kubernetes manifest or of a compose file run.

A container becomes the script that it runs: its variables, then its command with its
arguments, quoted so that `doctor_scripts` reads it as the container would be given it.
Where no container starts an engine itself, the scripts that a manifest holds as text (a
ConfigMap) are read, with the variables of the one container that may run them. A value
that stands elsewhere (a Secret, ``envFrom``, the shell that runs compose) stays an
expression without a value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark_pd.doctor_expressions import (
    ELSEWHERE_VALUE,
    Expand,
    expander,
    is_unknown,
    quoted,
    unknown,
)
from dspark_pd.doctor_scanner import ANY_OTHER

_COMMANDS = ("entrypoint", "command", "args")
_CONTAINER = ("image", "name", "env", "environment")
_SKIPPED = ("metadata", "status", "initContainers")
# A script that may start an engine.
ENGINE_TEXT = re.compile(
    r"\blaunch_server\b|\bsglang\s+serve\b|sglang\S*\s.*--\w", re.S
)
_RELEASE = re.compile(
    r"(?:^|/)sglang(?:-(?:rocm|xpu|npu|cpu))?:v?(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)"
)
_MAX_EXTENDED = 16


@dataclass(frozen=True)
class Script:
    """What one container runs.

    ``outside`` are the variables that it starts with, None where a value is not known;
    ``release`` is the SGLang of its image, if the tag tells.
    """

    text: str
    outside: Mapping[str, str | None]
    release: str | None = None


@dataclass
class Manifest:
    """The scripts of containers, and those held as text, which containers may run."""

    containers: list[Script] = field(default_factory=list)
    texts: list[Script] = field(default_factory=list)


@dataclass(frozen=True)
class _Container:
    """One container; ``shell`` has the variables that compose takes, if it is its."""

    fields: dict[str, Any]
    shell: Mapping[str, str] | None

    def expander(self, known: Mapping[str, str | None]) -> Expand:
        if self.shell is None:
            return expander(known, composed=False)
        return expander(self.shell, composed=True)


def read_manifest(documents: list[Any], shell: Mapping[str, str]) -> Manifest:
    """Return what the containers of all documents run.

    ``shell`` has the variables that compose puts into a file.
    """
    found = _Walk()
    for document in documents:
        if _is_compose(document):
            found.visit(_with_extended(document), shell)
        else:
            found.visit(document, None)
    manifest = Manifest([_script_of(container) for container in found.containers])
    manifest.texts = [_loose(text, found.containers) for text in found.texts]
    return manifest


def _is_compose(document: Any) -> bool:
    """A whole file, or one service of it."""
    if not isinstance(document, dict) or "apiVersion" in document:
        return False
    return isinstance(document.get("services"), dict) or "environment" in document


class _Walk:
    """Finds containers under whatever key a resource has them; each node once."""

    def __init__(self) -> None:
        self.containers: list[_Container] = []
        self.texts: list[str] = []
        self._seen: set[int] = set()

    def visit(
        self, node: Any, shell: Mapping[str, str] | None, place: str = ""
    ) -> None:
        if isinstance(node, str):
            if ENGINE_TEXT.search(node):
                self.texts.append(node)
            return
        if not isinstance(node, dict | list) or id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(node, list):
            for item in node:
                self.visit(item, shell, place)
        elif _is_container(node, place):
            self.containers.append(_Container(node, shell))
        else:
            for key, value in node.items():
                if key not in _SKIPPED and not str(key).startswith("x-"):
                    # The services of a compose file have names of their own.
                    named = shell is not None and place == "services"
                    self.visit(value, shell, "containers" if named else str(key))


def _is_container(node: dict[str, Any], place: str) -> bool:
    runs = any(isinstance(node.get(key), list | str) for key in _COMMANDS)
    return runs and (place == "containers" or any(key in node for key in _CONTAINER))


def _loose(text: str, containers: list[_Container]) -> Script:
    """A script held as text, with what the only container that there is gives it."""
    if len(containers) != 1:
        lines = ['source "its container\'s variables"', text]
        return Script("\n".join(lines), {ANY_OTHER: None})
    known, lines = _variables(containers[0])
    return Script("\n".join([*lines, text]), known, _release(containers[0]))


# -- one container ----------------------------------------------------------------------


def _script_of(container: _Container) -> Script:
    known, lines = _variables(container)
    expand, fields = container.expander(known), container.fields
    words = [w for key in _COMMANDS for w in _words(fields.get(key), expand)]
    if fields.get(_ELSEWHERE):
        words.append(unknown("extends"))
        lines.append("source extends")
        known = {**known, ANY_OTHER: None}
    lines.append(" ".join(quoted(word) for word in words))
    return Script("\n".join(lines), known, _release(container))


def _release(container: _Container) -> str | None:
    image = _text(container.fields.get("image")) or ""
    found = _RELEASE.search(container.expander({})(image))
    return found[1] if found else None


def _variables(container: _Container) -> tuple[dict[str, str | None], list[str]]:
    """Return the values, None where not known, and the lines that set them."""
    known: dict[str, str | None] = {}
    fields = container.fields
    lines = [f"source {key}" for key in ("envFrom", "env_file") if fields.get(key)]
    if lines:
        known[ANY_OTHER] = None
    for name, value in _pairs(fields.get("environment", fields.get("env"))):
        if value is None and container.shell is not None:
            value = container.shell.get(name)
        text = ELSEWHERE_VALUE if value is None else container.expander(known)(value)
        known[name] = None if is_unknown(text) else text
        lines.append(f"export {name}={quoted(text)}")
    return known, lines


def _pairs(place: Any) -> Iterator[tuple[str, str | None]]:
    """Yield names and values, as both kinds of files give them; None is elsewhere."""
    if isinstance(place, dict):
        items = [(name, _text(value)) for name, value in place.items()]
    else:
        items = [_pair(item) for item in (place if isinstance(place, list) else [])]
    for name, value in items:
        if re.fullmatch(r"[A-Za-z_]\w*", str(name), re.A):
            yield str(name), value


def _pair(item: Any) -> tuple[Any, str | None]:
    if isinstance(item, str):  # compose: NAME=value, or NAME of the shell
        name, equals, text = item.partition("=")
        return name, text if equals else None
    if not isinstance(item, dict):
        return "", None
    if "valueFrom" in item:
        return item.get("name"), None
    return item.get("name"), _text(item.get("value")) or ""


def _text(value: Any) -> str | None:
    """A scalar as a container gets it: YAML's true is not Python's."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or isinstance(value, dict | list):
        return None
    return str(value)


def _words(command: Any, expand: Expand) -> list[str]:
    if isinstance(command, str):  # a compose file's short form is split as by a shell
        try:
            return shlex.split(expand(command))
        except ValueError:  # whoever reads it as a script says what is wrong
            return [command]
    if not isinstance(command, list):
        return []
    return [expand(_text(word) or "") for word in command]


# -- compose: extends -------------------------------------------------------------------

_ELSEWHERE = "x-extends-another-file"


def _with_extended(document: dict[str, Any]) -> dict[str, Any]:
    services = document.get("services") or {}
    return {**document, "services": {n: _extended(services, n) for n in services}}


def _extended(services: dict[str, Any], name: str, depth: int = 0) -> Any:
    """A service with what it takes over from another one of the same file."""
    service = services.get(name)
    if not isinstance(service, dict) or "extends" not in service:
        return service
    extends = service["extends"]
    base = extends.get("service") if isinstance(extends, dict) else extends
    elsewhere = isinstance(extends, dict) and "file" in extends
    known = isinstance(base, str) and base in services
    if elsewhere or not known or depth >= _MAX_EXTENDED:
        return {**service, _ELSEWHERE: True}
    taken = _extended(services, str(base), depth + 1)
    if not isinstance(taken, dict):
        return service
    environment = {
        **dict(_pairs(taken.get("environment"))),
        **dict(_pairs(service.get("environment"))),
    }
    return {**taken, **service, "environment": environment}
