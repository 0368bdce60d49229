"""YAML with what the loader of PyYAML leaves out: line numbers, no repeated key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_pd.messages.errors import refuse

# libyaml is five times faster; the pure loader gives the same result without it.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """PyYAML keeps the last of two equal keys, so a pasted field would win unseen."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"key {key.value} is given twice"
                mark = key.start_mark
                raise yaml.constructor.ConstructorError(None, None, problem, mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Document:
    """One YAML document and the line, from 1, on which it starts."""

    line: int
    data: Any


def load_documents(path: Path, shown: str) -> list[Document]:
    """Return the documents of ``path``; refuse with S201 under the name ``shown``."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        refuse("S201", file=shown, line=1, detail=str(error))
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            data = loader.construct_document(node)
            documents.append(Document(node.start_mark.line + 1, data))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        detail = getattr(error, "problem", None) or str(error)
        refuse("S201", file=shown, line=line, detail=detail)
    finally:
        loader.dispose()
    return documents
