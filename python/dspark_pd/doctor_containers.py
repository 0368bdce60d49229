"""What the containers of a Kubernetes manifest or of a compose file run.

A container becomes the script that it runs: its variables, then its command with its
arguments, quoted so that `doctor_files` reads it as the container would be given it.
Where no container starts an engine itself, the scripts that a manifest holds as text (a
ConfigMap) are read, with the variables of the one container that may run them. A value
that stands elsewhere (a Secret, ``envFrom``, the shell that runs compose) stays an
expression without a value.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_COMMANDS = ("entrypoint", "command", "args")
_CONTAINER = ("image", "name", "env", "environment")
_SKIPPED = ("metadata", "status", "initContainers")
_ENGINE_TEXT = re.compile(r"(sglang|launch_server)\S*\s.*--\w", re.S)
_RELEASE = re.compile(
    r"(?:^|/)sglang(?:-(?:rocm|xpu|npu|cpu))?:v?(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)"
)
_KUBERNETES = re.compile(r"\$\$|\$\((\w+)\)")
_COMPOSE = re.compile(
    r"\$\$|\$\{(\w+)(?:(:?[-?+])((?:[^{}]|\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)"
)
_TEMPLATE = re.compile(r"\{\{.*?\}\}", re.S)
# Around an expression without a value, until the word is quoted.
_OPEN, _CLOSE = "\ue000", "\ue001"
_UNKNOWN = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.S)
_SPECIAL = re.compile(r'(["\\`$])')
_UNSHOWN = re.compile(r"[^\w .:{}-]")
_MAX_EXTENDED = 16

Expand = Callable[[str], str]


@dataclass(frozen=True)
class Script:
    """What one container runs.

    ``outside`` are the variables that it starts with, ``release`` the SGLang of its
    image, if the tag tells.
    """

    text: str
    outside: Mapping[str, str]
    release: str | None = None


@dataclass
class Manifest:
    """The scripts of containers, and those held as text, which containers may run."""

    containers: list[Script] = field(default_factory=list)
    texts: list[Script] = field(default_factory=list)


def read_manifest(documents: list[Any]) -> Manifest:
    """Return what the containers of all documents run."""
    found = _Walk()
    for document in documents:
        composed = _is_compose(document)
        found.visit(_with_extended(document) if composed else document, composed)
    manifest = Manifest([_script_of(*container) for container in found.containers])
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
        self.containers: list[tuple[dict[str, Any], bool]] = []
        self.texts: list[str] = []
        self._seen: set[int] = set()

    def visit(self, node: Any, composed: bool, place: str = "") -> None:
        if isinstance(node, str):
            if _ENGINE_TEXT.search(node):
                self.texts.append(node)
            return
        if not isinstance(node, dict | list) or id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(node, list):
            for item in node:
                self.visit(item, composed, place)
        elif _is_container(node, place):
            self.containers.append((node, composed))
        else:
            for key, value in node.items():
                if key not in _SKIPPED and not str(key).startswith("x-"):
                    # The services of a compose file have names of their own.
                    named = composed and place == "services"
                    self.visit(value, composed, "containers" if named else str(key))


def _is_container(node: dict[str, Any], place: str) -> bool:
    runs = any(isinstance(node.get(key), list | str) for key in _COMMANDS)
    return runs and (place == "containers" or any(key in node for key in _CONTAINER))


def _loose(text: str, containers: list[tuple[dict[str, Any], bool]]) -> Script:
    """A script held as text, with what the only container that there is gives it."""
    if len(containers) != 1:
        return Script(f'source "its container\'s variables"\n{text}', {})
    (container, composed) = containers[0]
    known, lines = _variables(container, _expander(composed, {}))
    return Script("\n".join([*lines, text]), known, _release(container, composed))


# -- one container ----------------------------------------------------------------------


def _script_of(container: dict[str, Any], composed: bool) -> Script:
    known, lines = _variables(container, _expander(composed, {}))
    expand = _expander(composed, known)
    words = [w for key in _COMMANDS for w in _words(container.get(key), expand)]
    if container.get(_ELSEWHERE):
        words.append(f"{_OPEN}extends{_CLOSE}")
        lines.append("source extends")
    lines.append(" ".join(_quoted(word) for word in words))
    return Script("\n".join(lines), known, _release(container, composed))


def _release(container: dict[str, Any], composed: bool) -> str | None:
    image = _text(container.get("image")) or ""
    found = _RELEASE.search(_expander(composed, {})(image))
    return found[1] if found else None


def _variables(
    container: dict[str, Any], expand: Expand
) -> tuple[dict[str, str], list[str]]:
    """Return the values that are known, and the lines that set all of them."""
    known: dict[str, str] = {}
    lines = [f"source {key}" for key in ("envFrom", "env_file") if container.get(key)]
    composed = "environment" in container
    for name, value in _pairs(container.get("environment" if composed else "env")):
        if value is None:
            text = f"{_OPEN}a value from elsewhere{_CLOSE}"
        elif composed:
            text = expand(value)
        else:
            text = _expander(False, known)(value)
        if not _UNKNOWN.search(text):
            known[name] = text
        lines.append(f"export {name}={_quoted(text)}")
    return known, lines


def _pairs(place: Any) -> Iterator[tuple[str, str | None]]:
    """Yield names and values, as both kinds of files give them; None is elsewhere."""
    if isinstance(place, dict):
        items = [(name, _text(value)) for name, value in place.items()]
    else:
        items = [_pair(item) for item in (place if isinstance(place, list) else [])]
    for name, value in items:
        if re.fullmatch(r"[A-Za-z_]\w*", str(name), re.A):
            yield str(name), os.environ.get(str(name)) if value is None else value


def _pair(item: Any) -> tuple[Any, str | None]:
    if isinstance(item, str):  # compose: NAME=value, or NAME of the shell
        name, equals, text = item.partition("=")
        return name, text if equals else None
    if not isinstance(item, dict):
        return "", None
    if "valueFrom" in item:
        return item.get("name"), f"{_OPEN}a value from elsewhere{_CLOSE}"
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
        return shlex.split(expand(command))
    if not isinstance(command, list):
        return []
    return [expand(_text(word) or "") for word in command]


def _quoted(word: str) -> str:
    """Quote a word; an expression without a value becomes a command's output."""
    parts = _UNKNOWN.split(word)
    if len(parts) == 1:
        return shlex.quote(word)
    texts = [_SPECIAL.sub(r"\\\1", text) for text in parts[::2]]
    shown = [f"$({_UNSHOWN.sub('', text)})" for text in parts[1::2]]
    return '"' + "".join(a + b for a, b in zip(texts, [*shown, ""], strict=True)) + '"'


# -- expressions ------------------------------------------------------------------------


def _expander(composed: bool, known: Mapping[str, str]) -> Expand:
    """Return what puts values in the place of a file's own expressions."""

    def kubernetes(found: re.Match[str]) -> str:
        if found[1] is None:
            return "$"
        return known.get(found[1], f"{_OPEN}{found[1]}{_CLOSE}")

    def expand(text: str) -> str:
        text = _TEMPLATE.sub(lambda found: f"{_OPEN}{found[0]}{_CLOSE}", text)
        pattern = _COMPOSE if composed else _KUBERNETES
        return pattern.sub(_of_the_shell if composed else kubernetes, text)

    return expand


def _of_the_shell(found: re.Match[str]) -> str:
    """Compose takes values from the shell that runs it, never from the service."""
    name = found[1] or found[4]
    if name is None:
        return "$"
    operator, other = found[2] or "", _COMPOSE.sub(_of_the_shell, found[3] or "")
    value = os.environ.get(name)
    missing = value is None or (operator.startswith(":") and not value)
    if operator.endswith("+"):
        return "" if missing else other
    if operator.endswith("-") and missing:
        return other
    return f"{_OPEN}{name}{_CLOSE}" if value is None else value


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
    if elsewhere or base not in services or depth >= _MAX_EXTENDED:
        return {**service, _ELSEWHERE: True}
    taken = _extended(services, base, depth + 1)
    if not isinstance(taken, dict):
        return service
    environment = {
        **dict(_pairs(taken.get("environment"))),
        **dict(_pairs(service.get("environment"))),
    }
    return {**taken, **service, "environment": environment}
