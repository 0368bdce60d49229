"""Engines in YAML: manifests, compose files, and flags as ``--config`` takes them.

What is YAML is decided by the first line that says something, because scripts hold YAML
as well. A file that is meant as YAML and cannot be read is refused with the reason: a
template must be rendered first. What containers run is in `doctor_containers`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from dspark_pd.doctor_fields import FIELDS, field_of, value_of

_FIRST_LINE = re.compile(r"""(- )?["']?[A-Za-z_][\w.-]*["']?:(\s|$)""")
_SILENT = re.compile(r"\s*(#.*|---.*|%.*)?$")
_TOP_KEYS = {"apiVersion", "services", "spec", "containers"}
_MEANT = re.compile(rf"^[\s{{\"]*({'|'.join(sorted(_TOP_KEYS))}|kind)\"?\s*:", re.M)
_SEVERAL = re.compile(r"^---", re.M)
_MAX_CHARS = 2_000_000
_MAX_NODES = 10_000
_BROKEN = (ValueError, KeyError, TypeError, AttributeError)


class _Loader(yaml.SafeLoader):
    """Reads what has a tag of its own, such as ``!override``, as if it had none."""


def _untagged(loader: Any, _tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_mapping(node, deep=True)


_Loader.add_multi_constructor("!", _untagged)


def documents(text: str) -> list[Any] | None:
    """Return the documents of a file that is meant as YAML or is JSON of a manifest.

    None for all other text. Raises ValueError for YAML that cannot be read.
    """
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{{"):
        raise ValueError("a template; render it first")
    if text.lstrip().startswith("{") and not _SEVERAL.search(text):
        return _json_manifest(text)
    lines = (line for line in text.splitlines() if not _SILENT.fullmatch(line))
    first = next(lines, "")
    if not _FIRST_LINE.match(first) and not first.lstrip().startswith("{"):
        return None
    if len(text) > _MAX_CHARS:
        raise ValueError(f"YAML of {len(text)} characters")
    try:
        return list(yaml.load_all(text, _Loader))
    except yaml.YAMLError as error:
        if "{{" in text:
            raise ValueError("a template; render it first") from None
        if not _MEANT.search(text):
            return None
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        detail = getattr(error, "problem", None) or "no YAML"
        raise ValueError(f"{detail}{place}") from None
    except _BROKEN as error:
        raise ValueError(f"YAML with a bad value: {error}") from None


def _json_manifest(text: str) -> list[Any] | None:
    """JSON without a manifest's keys is server arguments, and read elsewhere."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return [document] if is_manifest(document) else None


def is_manifest(document: Any) -> bool:
    """Whether it has the keys of a manifest or a compose file."""
    return isinstance(document, dict) and bool(_TOP_KEYS & document.keys())


# -- flags ------------------------------------------------------------------------------


def config_flags(place: str) -> dict[str, Any] | None:
    """Return the flags that a file of ``--config`` sets; None if it cannot be read."""
    try:
        text = Path(place).read_text(encoding="utf-8")
        if len(text) > _MAX_CHARS:
            return None
        document = yaml.load(text, _Loader)
    except (OSError, RecursionError, yaml.YAMLError, *_BROKEN):
        return None
    return flags_of({} if document is None else document)


def flags_of(document: Any) -> dict[str, Any] | None:
    """Return flags by field name as SGLang takes them from YAML; None for no mapping."""
    if not isinstance(document, dict) or _is_large(document):
        return None
    flags: dict[str, Any] = {}
    for key, value in document.items():
        name = field_of(str(key))
        switch = FIELDS.get(name) == "switch"
        if isinstance(value, list):
            if value:
                flags[name] = value if len(value) > 1 else value[0]
        elif isinstance(value, dict):
            flags[name] = json.dumps(value, default=str)
        elif not (switch and value is False):
            flags[name] = True if switch and value is True else _value(name, value)
    return flags


def _value(name: str, value: Any) -> Any:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if FIELDS.get(name) == "text" else value_of(text)


def _is_large(node: Any, budget: int = _MAX_NODES) -> bool:
    """Whether it has more nodes than flags have; aliases count each time."""
    open_nodes = [node]
    while open_nodes and budget > 0:
        node = open_nodes.pop()
        budget -= 1
        if isinstance(node, dict):
            open_nodes += node.values()
        elif isinstance(node, list):
            open_nodes += node
        if len(open_nodes) > _MAX_NODES:
            return True
    return bool(open_nodes)
